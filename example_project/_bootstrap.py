"""Makes the environment that the demo and the tests run in, with the standard library alone.

A folder `.venv` in the checkout (or where SAFE_EFFECTS_VENV says) gets the project in editable mode with its
extras, in the versions of `requirements/lock.txt`. A stamp in it tells whether that is still up to date.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = Path(__file__).resolve().parent.parent
OLDEST = (3, 10)
LOCK = ROOT / "requirements/lock.txt"
# Not an environment's interpreter: that one may be the environment which is made anew.
_BASE: str = getattr(sys, "_base_executable", None) or sys.executable
_NEWER = ("python3.13", "python3.12", "python3.11", "python3.10", "python3.14")
# What would send an installation somewhere else, or make our interpreter import something else.
_MISLEADING = ("PYTHONHOME", "PYTHONPATH", "PIP_TARGET", "PIP_PREFIX", "PIP_USER", "__PYVENV_LAUNCHER__")


def run(module: str, arguments: Sequence[str]) -> NoReturn:
    """Make the environment if need be, and become `python -m module arguments` in it, from the checkout.

    Args:
        module: what to run.
        arguments: its arguments.
    """
    if sys.version_info < OLDEST:
        _use_newer_python()
    folder = Path(os.environ.get("SAFE_EFFECTS_VENV") or ROOT / ".venv").absolute()
    python = environment(folder, _BASE, extras(), LOCK)
    os.chdir(ROOT)
    sys.stdout.flush()
    os.execv(python, [str(python), "-m", module, *arguments])


def fail(message: str) -> NoReturn:
    """End with a message.

    Args:
        message: what is wrong and what to do.
    """
    sys.exit(f"error: {message}")


def _say(message: str) -> None:
    print(f"[setup] {message}", file=sys.stderr, flush=True)


def _use_newer_python() -> NoReturn:
    wanted = ".".join(map(str, OLDEST))
    for name in _NEWER:
        check = f"import sys; sys.exit(sys.version_info < {OLDEST})"
        try:
            done = subprocess.run([name, "-c", check], check=False, stderr=subprocess.DEVNULL)
        except OSError:
            continue
        if done.returncode == 0:
            os.execvp(name, [name, *sys.argv])
    fail(f"Python {wanted} or newer is needed, this is {platform.python_version()}")


def extras() -> str:
    """The project's extras that the demo and the tests need here."""
    # The server binaries are wheels for glibc and macOS; elsewhere installed servers are used.
    musl = "musl" in (sysconfig.get_config_var("HOST_GNU_TYPE") or "")
    return "redis,test" if musl else "demo,test"


def environment(folder: Path, base: str, wanted: str, constraints: Path) -> Path:
    """Make an environment with the project and its extras in it, unless it is there and up to date.

    Args:
        folder: where.
        base: the interpreter to make it with.
        wanted: the project's extras, with commas.
        constraints: a file of versions, as pip's `--constraint` takes it.

    Returns:
        Its interpreter.
    """
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    stamp = folder / "safe-effects-stamp"
    fingerprint = _fingerprint(base, wanted, constraints)
    with _one_at_a_time(folder):
        try:
            if python.exists() and stamp.read_text() == fingerprint:
                return python
        except OSError:
            pass
        installer = _make(folder, base, python)
        _say(f"installing the project and its extras [{wanted}] (a minute, once)")
        done = subprocess.run(
            [
                *installer,
                "install",
                "-qq",
                "--no-input",
                "--disable-pip-version-check",
                "--constraint",
                str(constraints),
                "--editable",
                f"{ROOT}[{wanted}]",
            ],
            check=False,
            env=_clean(),
            cwd=ROOT,
            stdout=sys.stderr,
        )
        if done.returncode != 0:
            fail("pip could not install the project; its message is above. It needs a package index (see `pip config`)")
        stamp.write_text(fingerprint)
        _say("ready")
    return python


def _fingerprint(base: str, wanted: str, constraints: Path) -> str:
    digest = hashlib.sha256((ROOT / "pyproject.toml").read_bytes())
    digest.update(constraints.read_bytes())
    version = sys.version if base == _BASE else ""
    # An editable installation and its scripts hold both paths.
    for part in (version, str(Path(base).resolve()), str(ROOT), wanted):
        digest.update(part.encode())
    return digest.hexdigest()


def _make(folder: Path, base: str, python: Path) -> list[str]:
    """Make the environment, empty, and tell how pip is run for it."""
    _say(f"making {folder} with {base}")
    command = [base, "-m", "venv", "--clear", str(folder)]
    done = subprocess.run(command, check=False, env=_clean(), capture_output=True, text=True)
    if done.returncode == 0:
        return [str(python), "-m", "pip"]
    # Debian splits ensurepip off into a package of its own.
    bare = subprocess.run([*command, "--without-pip"], check=False, env=_clean(), capture_output=True, text=True)
    outer = [sys.executable, "-m", "pip", "--python", str(python)]
    if bare.returncode == 0 and subprocess.run([*outer, "--version"], check=False, capture_output=True).returncode == 0:
        return outer
    fail(
        f"Python's venv module could not make {folder}:\n{(done.stdout + done.stderr).strip()}\n"
        "Install ensurepip or a pip of 22.3 or newer (Debian, Ubuntu: apt-get install python3-venv; Fedora:"
        " dnf install python3-pip; Alpine: apk add py3-pip), or name a folder that can be written in"
        " SAFE_EFFECTS_VENV"
    )


def _clean() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in _MISLEADING}


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    try:
        import fcntl
    except ImportError:
        yield
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = (folder.parent / f"{folder.name}.lock").open("w")
    except OSError as error:
        fail(f"cannot write in {folder.parent} ({error.strerror}); name another folder in SAFE_EFFECTS_VENV")
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
