"""The tests: `python3 tests` from anywhere makes the environment and runs them."""
