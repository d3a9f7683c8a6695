"""A small service that a reader learns from, and the fake provider that it calls."""
