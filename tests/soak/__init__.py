"""Everything goes wrong at once, for as long as one likes, and then the books are checked."""
