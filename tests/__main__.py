"""`python3 tests [pytest's arguments]`: makes the environment and runs the tests in it.

Servers of our own are started unless SAFE_EFFECTS_TEST_DATABASE_URL, SAFE_EFFECTS_TEST_REDIS_URL (whose
database is emptied) or SAFE_EFFECTS_TEST_RABBITMQ_URL name running ones. SAFE_EFFECTS_TEST_PATIENCE multiplies the
time that the tests wait for something, for a slow machine.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "example_project"))

import _bootstrap  # type: ignore[import-not-found]


def _absolute(argument: str) -> str:
    """Paths are meant from where the caller is, and pytest runs in the checkout."""
    path, separator, test = argument.partition("::")
    if path and not path.startswith("-") and Path(path).exists():
        return f"{Path(path).absolute()}{separator}{test}"
    return argument


# The whole suite waits more than it computes: two files at a time, which have to wait for each other.
_WHOLE = ["-n", "2", "--dist", "loadfile"]
_PATIENCE = "2"

arguments = [_absolute(a) for a in sys.argv[1:]]
chosen = any(not a.startswith("-") for a in arguments)
if not chosen:
    os.environ.setdefault("SAFE_EFFECTS_TEST_PATIENCE", _PATIENCE)
_bootstrap.run("pytest", arguments if chosen else [*_WHOLE, *arguments])
