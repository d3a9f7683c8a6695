"""What needs a package that the library itself does not: one module each, imported by whoever uses it."""
