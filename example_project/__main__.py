"""`python3 example_project`: makes the environment and runs the demo in it."""

import sys
from pathlib import Path

# Run as a folder, this file is no part of a package and only its own folder is on the path.
sys.path.insert(0, str(Path(__file__).resolve().parent))

import _bootstrap  # type: ignore[import-not-found]

_bootstrap.run("example_project.demo", sys.argv[1:])
