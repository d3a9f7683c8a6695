"""One migration for each of the library's own, in the same order."""
