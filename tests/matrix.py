"""`python3 tests/matrix.py`: the tests on other versions of Python and Celery, with the standard library alone.

Makes one environment for each combination under `.matrix` in the checkout and runs pytest in it. A combination is a
Python, a Celery, and either the locked dependencies or the lowest ones that pyproject.toml allows.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "example_project"))

import _bootstrap  # type: ignore[import-not-found]

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
CELERIES = ("5.5", "5.6", "5.7")
CACHE = ROOT / ".matrix"
LOCK = ROOT / "requirements/lock.txt"
LOWEST = ROOT / "requirements/lowest.txt"
FAMILY = ("celery", "kombu", "billiard", "vine", "amqp")
"""What comes with a version of Celery."""
VARIABLE = "SAFE_EFFECTS_TEST_MATRIX"
"""Tells the tests which combination they run on."""

SHORT = (
    "tests/unit",
    "tests/integration/test_jobs.py",
    "tests/acceptance/test_plain_task.py",
    "tests/acceptance/test_main_job.py",
    "tests/acceptance/test_revoke.py",
    "-k",
    "not rabbitmq and not slow",
)
"""The tests that a combination runs unless others are named."""


@dataclass(frozen=True)
class Combination:
    """What to run on."""

    python: str
    celery: str
    lowest: bool = False

    @property
    def name(self) -> str:
        """As a folder and a person take it."""
        return f"python{self.python}-celery{self.celery}{'-lowest' if self.lowest else ''}"


ALL = [
    Combination(PYTHONS[0], CELERIES[0], lowest=True),
    *(Combination(python, celery) for python in PYTHONS for celery in CELERIES),
]
CORNERS = [ALL[0], ALL[-1]]
"""Oldest with oldest, newest with newest."""


# -- interpreters ------------------------------------------------------------------------------------------------------


def find_python(version: str) -> str | None:
    """Find an interpreter.

    Args:
        version: such as `3.12`.

    Returns:
        Its path, not an environment's own; None where there is none.
    """
    for candidate in _candidates(version):
        code = "import sys; print('%d.%d' % sys.version_info[:2]); print(getattr(sys, '_base_executable', ''))"
        try:
            # A shim may be found and then have nothing behind it.
            done = subprocess.run([candidate, "-c", code], capture_output=True, text=True, check=False, timeout=30)
        except (OSError, subprocess.TimeoutExpired):
            continue
        found, base = [*done.stdout.splitlines(), "", ""][:2]
        if done.returncode == 0 and found == version:
            return base or str(candidate)
    return None


def _candidates(version: str) -> Iterator[str]:
    if sys.version_info[:2] == tuple(map(int, version.split("."))):
        yield sys.executable
    on_path = shutil.which(f"python{version}")
    if on_path:
        yield on_path
    for folder, pattern in _managers():
        found = folder.glob(pattern.format(version=version))
        yield from map(str, sorted(found, key=lambda path: [int(n) for n in re.findall(r"\d+", str(path))]))


def _managers() -> Iterator[tuple[Path, str]]:
    """Where pyenv, asdf, mise and uv keep interpreters."""
    asked = {"pyenv": ["pyenv", "root"], "uv": ["uv", "python", "dir"]}
    told = {name: _output(command) for name, command in asked.items()}
    home = Path.home()
    for pyenv in (os.environ.get("PYENV_ROOT"), told["pyenv"], home / ".pyenv"):
        if pyenv:
            yield Path(pyenv) / "versions", "{version}.*/bin/python"
    yield Path(os.environ.get("ASDF_DATA_DIR") or home / ".asdf") / "installs/python", "{version}.*/bin/python"
    yield home / ".local/share/mise/installs/python", "{version}.*/bin/python"
    yield Path(told["uv"] or home / ".local/share/uv/python"), "cpython-{version}.*/bin/python{version}"


def _output(command: Sequence[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=30).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


# -- environments ------------------------------------------------------------------------------------------------------


def constraints(combination: Combination) -> str:
    """The versions to install, as pip's `--constraint` takes them.

    Args:
        combination: what to run on.

    Returns:
        The file's text: the lock, with another Celery where another one is wanted.
    """
    lines = (LOWEST if combination.lowest else LOCK).read_text().splitlines()
    pinned = next(line for line in lines if line.startswith("celery=="))
    if not pinned.startswith(f"celery=={combination.celery}."):
        lines = [line for line in lines if not line.startswith(tuple(f"{name}==" for name in FAMILY))]
        lines.append(f"celery=={combination.celery}.*")
    return "\n".join(lines) + "\n"


def prepare(combination: Combination, base: str) -> Path:
    """Make the environment of a combination, unless it is there.

    Args:
        combination: what to run on.
        base: the interpreter.

    Returns:
        The environment's interpreter.
    """
    CACHE.mkdir(exist_ok=True)
    versions = CACHE / f"{combination.name}.txt"
    text = constraints(combination)
    if not versions.exists() or versions.read_text() != text:
        versions.write_text(text)
    found: Path = _bootstrap.environment(CACHE / combination.name, base, _bootstrap.extras(), versions)
    return found


# -- running -----------------------------------------------------------------------------------------------------------


def run(combination: Combination, arguments: Sequence[str]) -> str:
    """Run pytest on one combination.

    Args:
        combination: what to run on.
        arguments: pytest's.

    Returns:
        What became of it: `passed`, or words that say what went wrong.
    """
    base = find_python(combination.python)
    if base is None:
        return f"NOT TESTED: there is no Python {combination.python} here"
    try:
        python = prepare(combination, base)
    except SystemExit as failed:
        return f"NOT TESTED: {failed}"
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "COV_"))}
    environment |= {VARIABLE: combination.name, "PYTHONPATH": str(ROOT)}
    cache = f"cache_dir={CACHE / combination.name / 'pytest-cache'}"
    command = [str(python), "-m", "pytest", "-o", cache, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, check=False)
    return "passed" if done.returncode == 0 else f"FAILED: pytest ended with {done.returncode}"


def chosen(options: argparse.Namespace) -> list[Combination]:
    """The combinations that the command line asks for."""
    if options.python or options.celery:
        return [
            one
            for one in ALL
            if one.python in (options.python or PYTHONS)
            and one.celery in (options.celery or CELERIES)
            and one.lowest in ((True,) if options.lowest else (False,))
        ]
    return ALL if options.all else CORNERS


def main(arguments: Sequence[str]) -> int:
    """Run what the command line asks for.

    Args:
        arguments: without the program's name.

    Returns:
        The exit status: 0 only if every combination was tested and passed.
    """
    parser = argparse.ArgumentParser(
        prog="tests/matrix.py",
        usage="%(prog)s [--corner | --all | --python X.Y --celery X.Y [--lowest]] [-- PYTEST ...]",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--corner", action="store_true", help="oldest with oldest, newest with newest (the default)")
    which.add_argument("--all", action="store_true", help="every combination")
    parser.add_argument("--python", action="append", choices=PYTHONS, help="only this Python; may be repeated")
    parser.add_argument("--celery", action="append", choices=CELERIES, help="only this Celery; may be repeated")
    parser.add_argument("--lowest", action="store_true", help="with the lowest dependencies, where there is such a one")
    parser.add_argument("--list", action="store_true", help="tell the combinations and their interpreters, run nothing")
    own, pytest_arguments = list(arguments), list(SHORT)
    if "--" in own:
        at = own.index("--")
        own, pytest_arguments = own[:at], own[at + 1 :]
    options = parser.parse_args(own)
    combinations = chosen(options)
    if not combinations:
        parser.error("there is no such combination; see --list --all")
    if options.list:
        for one in combinations:
            print(f"{one.name:32} {find_python(one.python) or 'no interpreter here'}")
        return 0
    results: list[tuple[Combination, str, float]] = []
    for one in combinations:
        print(f"\n======== {one.name} ========", flush=True)
        began = time.monotonic()
        results.append((one, run(one, pytest_arguments), time.monotonic() - began))
    print("\n======== versions ========")
    for one, result, seconds in results:
        print(f"{one.name:32} {result} ({seconds:.0f} s)")
    return 0 if all(result == "passed" for _, result, _ in results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
