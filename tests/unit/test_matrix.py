"""The runner of version combinations, and the files of versions."""

from __future__ import annotations

import ast
import functools
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from celery_safe_effects.glue import compat
from tests import matrix

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DIRECT = [
    requirement
    for line in [*PROJECT["dependencies"], *(r for extra in PROJECT["optional-dependencies"].values() for r in extra)]
    if (requirement := Requirement(line)).name != PROJECT["name"]
]


OURS = {"tests", "example_project", "celery_safe_effects", "_bootstrap"}


@functools.cache
def pins(path: Path) -> dict[str, list[Requirement]]:
    """The pinned versions of a file, by name; several where they depend on the Python."""
    found: dict[str, list[Requirement]] = {}
    for line in path.read_text().splitlines():
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            found.setdefault(requirement.name, []).append(requirement)
    return found


def version(pin: Requirement) -> Version:
    (one,) = pin.specifier
    assert one.operator == "=="
    return Version(one.version)


PEERS = sorted(ROOT.glob("tests/bench/systems/*_peer.py"))
SIMULATION = ROOT / "tests/bench/simulation.py"


@pytest.mark.parametrize("path", [matrix.LOCK, matrix.LOWEST], ids=lambda path: path.name)
@pytest.mark.parametrize("wanted", DIRECT, ids=str)
def test_the_files_of_versions_are_up_to_date(wanted: Requirement, path: Path) -> None:
    found = pins(path).get(wanted.name, [])
    assert found, f"{wanted.name} is not in {path.name}: run the command at the file's head"
    for pin in found:
        assert wanted.specifier.contains(version(pin), prereleases=True), f"{path.name} has {pin}: make it anew"


@pytest.mark.parametrize("wanted", DIRECT, ids=str)
def test_the_lowest_versions_are_what_pyproject_promises(wanted: Requirement) -> None:
    """A lower bound that no test runs on would be a guess."""
    (pin,) = pins(matrix.LOWEST)[wanted.name]
    (bound,) = [Version(one.version) for one in wanted.specifier if one.operator == ">="]
    lowest = version(pin)
    assert (lowest.major, lowest.minor) == (bound.major, bound.minor)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 does not tell which package an import is of")
def test_what_is_imported_is_locked() -> None:
    """A package that happens to be there would be missed elsewhere, by the tests or by users."""
    places = metadata.packages_distributions()
    missing = {}
    for path in (
        *ROOT.glob("tests/**/*.py"),
        *ROOT.glob("celery_safe_effects/**/*.py"),
        *ROOT.glob("example_project/*.py"),
    ):
        if path in {*PEERS, SIMULATION}:
            continue
        for name in imported(ast.parse(path.read_text())) - OURS - sys.stdlib_module_names:
            if not {one.lower().replace("_", "-") for one in places.get(name) or [name]} & pins(matrix.LOCK).keys():
                missing[name] = str(path.relative_to(ROOT))
    assert missing == {}


def test_what_the_benchmarks_peers_import_is_pinned() -> None:
    """They run in an environment of their own."""
    pinned = {line.partition("==")[0] for line in (ROOT / "tests/bench/peers.txt").read_text().splitlines()}
    for path in PEERS:
        found = imported(ast.parse(path.read_text())) - sys.stdlib_module_names - {"work", "psycopg"}
        assert len(found) == 1
        assert {name.replace("_", "-") for name in found} <= pinned
    assert imported(ast.parse(SIMULATION.read_text())) - sys.stdlib_module_names == {"simpy", "tests"}
    assert "\nsimpy==" in SIMULATION.with_suffix(".txt").read_text()


def imported(tree: ast.AST) -> set[str]:
    """The top-level packages that a module imports, wherever in it."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(str(node.module).partition(".")[0])
    return found


def test_the_lock_names_no_place_to_fetch_from() -> None:
    for path in (matrix.LOCK, matrix.LOWEST):
        assert not re.search(r"://|--index|--find-links| @ ", path.read_text())


def test_the_supported_versions_are_told_in_one_way() -> None:
    told = {line.rpartition(" ")[2] for line in PROJECT["classifiers"] if "Python :: 3." in line}
    assert set(matrix.PYTHONS) == told
    assert matrix.CELERIES == compat.SUPPORTED
    assert PROJECT["requires-python"] == f">={matrix.PYTHONS[0]}"
    assert [one.name for one in matrix.CORNERS] == ["python3.10-celery5.5-lowest", "python3.13-celery5.7"]
    assert len({one.name for one in matrix.ALL}) == len(matrix.PYTHONS) * len(matrix.CELERIES) + 1


def test_another_celery_comes_with_its_own_family() -> None:
    newest = matrix.constraints(matrix.Combination("3.12", matrix.CELERIES[-1]))
    assert newest == matrix.LOCK.read_text()
    other = matrix.constraints(matrix.Combination("3.12", "5.6")).splitlines()
    assert [line for line in other if line.startswith(("celery==", "kombu=="))] == ["celery==5.6.*"]
    assert "pytest==" in "".join(other)
    lowest = matrix.constraints(matrix.CORNERS[0])
    assert lowest == matrix.LOWEST.read_text()


def test_an_interpreter_that_does_not_run_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shim without a version behind it, and a Python of another version."""
    for name, content in {"python3.99": "exit 127", "python3.98": 'echo "3.97"; echo /nowhere'}.items():
        shim = tmp_path / name
        shim.write_text(f"#!/bin/sh\n{content}\n")
        shim.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert matrix.find_python("3.99") is None
    assert matrix.find_python("3.98") is None
    here = "{}.{}".format(*sys.version_info[:2])
    assert matrix.find_python(here)


def test_what_could_not_be_tested_is_no_success(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(matrix, "find_python", lambda wanted: None)
    assert matrix.main([]) == 1
    out = capsys.readouterr().out
    for corner in matrix.CORNERS:
        assert f"{corner.name:32} NOT TESTED: there is no Python {corner.python} here" in out


def test_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, list[str]]] = []

    def run(combination: matrix.Combination, arguments: Any) -> str:
        ran.append((combination.name, list(arguments)))
        return "passed"

    monkeypatch.setattr(matrix, "run", run)
    assert matrix.main([]) == 0
    assert matrix.main(["--python", "3.12", "--celery", "5.6", "--", "tests", "-q"]) == 0
    assert ran == [
        *((corner.name, list(matrix.SHORT)) for corner in matrix.CORNERS),
        ("python3.12-celery5.6", ["tests", "-q"]),
    ]
    ran.clear()
    assert matrix.main(["--all"]) == 0
    assert [name for name, _ in ran] == [one.name for one in matrix.ALL]
    with pytest.raises(SystemExit):
        matrix.main(["--python", "3.13", "--lowest"])
