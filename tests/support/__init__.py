"""Fixtures, as pytest plugins, and the application that the test workers run."""
