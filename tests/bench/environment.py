"""Environments of their own for what the project itself does not need, with the standard library alone."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path


def installed(folder: Path, wanted: Path) -> Path | None:
    """Make a virtual environment, unless it is there and up to date.

    Arguments:
        folder: where.
        wanted: a requirements file.

    Returns:
        Its interpreter; ``None`` where it cannot be made.
    """
    python, stamp = folder / "bin/python", folder / "requirements.txt"
    if python.exists() and stamp.exists() and stamp.read_text() == wanted.read_text():
        return python
    print(f"[setup] installing {wanted.name} into {folder} (a minute, once)", file=sys.stderr, flush=True)
    made = subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=False)
    install = [str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check", "-r", str(wanted)]
    if made.returncode != 0 or subprocess.run(install, check=False).returncode != 0:
        return None
    shutil.copy(wanted, stamp)
    return python
