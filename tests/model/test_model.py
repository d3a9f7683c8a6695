"""The model of the protocol, checked exhaustively; and that it can fail: without any one guard something does not hold.

It needs `spin` and a C compiler. `docs/model.md` says what stands for what.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest

from tests.support.loud import skip_loudly

MODEL: Final = Path(__file__).with_name("protocol.pml")
PROVIDERS: Final = {"neither": (0, 0), "lookup": (0, 1), "key": (1, 0), "key-and-lookup": (1, 1)}
GUARDS: Final = {
    "CLAIM_QUEUED": "lookup",
    "INTENT_FENCE": "lookup",
    "INTENT_LIVE": "lookup",
    "INTENT_CANCEL": "lookup",
    "INTENT_ONCE": "key",
    "RETAINED": "key",
    "SEND_IN_TIME": "key",
    "NONCE": "key",
    "IN_DOUBT": "key",
    "END_FENCE": "lookup",
    "PARK": "lookup",
    "SWEEP_OVER": "lookup",
    "GONE_SEEN": "lookup",
    "GONE_LATE": "lookup",
    "VERDICT_GONE": "lookup",
    "VERDICT_GONE_BEFORE": "lookup",
    "VERDICT_LATE": "lookup",
    "VERDICT_ATTEMPT": "lookup",
}
"""What can be taken away, and the kind of provider with which that is seen."""


def flags(provider: str, trouble: int, *more: str) -> list[str]:
    """What the model is made with."""
    key, lookup = PROVIDERS[provider]
    return [f"-DKEY={key}", f"-DLOOKUP={lookup}", f"-DTROUBLE={trouble}", *more]


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Where the checker is made."""
    for program, package in (("spin", "spin"), ("cc", "gcc")):
        if shutil.which(program) is None:
            skip_loudly(request, f"needs {program}: install it (Debian: apt-get install {package})")
    shutil.copy(MODEL, tmp_path)
    return tmp_path


def errors(folder: Path, made_with: Sequence[str], ends: bool = False) -> int:
    """Look at every state; returns how many counterexamples were found.

    Args:
        folder: where.
        made_with: the model's flags.
        ends: whether the question is that accepted work ends, under fairness, instead of what always holds.
    """

    def run(*command: str) -> str:
        done = subprocess.run(
            command,
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=250,
            env={**os.environ, "LC_ALL": "C"},
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("spin", *made_with, *(["-DENDS"] if ends else []), "-a", MODEL.name)
    run("cc", "-O1", *(["-DNFAIR=3"] if ends else ["-DSAFETY", "-DNOCLAIM"]), "-o", "pan", "pan.c")
    told = run("./pan", "-m100000", *(["-a", "-f"] if ends else []))
    assert "max search depth too small" not in told
    assert "Search not completed" not in told or "errors: 0" not in told, "not every state was looked at"
    (found,) = re.findall(r"errors: (\d+)", told)
    return int(found)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_what_always_holds_in_every_state(folder: Path, provider: str) -> None:
    assert errors(folder, flags(provider, 2)) == 0


def test_two_reconcilers_hold_it_too(folder: Path) -> None:
    assert errors(folder, flags("lookup", 2, "-DRECONCILERS=2")) == 0


@pytest.mark.parametrize("provider", PROVIDERS)
def test_accepted_work_ends(folder: Path, provider: str) -> None:
    """It is over, or parked with a question that is open; whatever crashes, as long as somebody comes after."""
    assert errors(folder, flags(provider, 1 if "key" in provider else 2), ends=True) == 0


@pytest.mark.parametrize("guard", GUARDS)
def test_a_guard_that_is_gone_has_a_counterexample(folder: Path, guard: str) -> None:
    more = ["-DRECONCILERS=2"] if guard == "VERDICT_ATTEMPT" else []
    assert errors(folder, flags(GUARDS[guard], 2, f"-DNO_{guard}", *more)) > 0


def test_without_a_sweeper_work_does_not_end(folder: Path) -> None:
    assert errors(folder, flags("lookup", 1, "-DNO_SWEEPER"), ends=True) > 0
