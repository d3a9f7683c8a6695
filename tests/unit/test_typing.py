"""Users' code that type-checks in mypy strict, and what it must not let pass: a missing ``await``, wrong arguments."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.loud import skip_loudly

ROOT = Path(__file__).resolve().parents[2]

# Each "type: ignore" stands for an error that has to be there: strict mode reports one that is not needed.
SAMPLE = """
from __future__ import annotations

import asyncio

from typing_extensions import assert_type

from celery_safe_effects import Happened, NotHappened, Operation, Outcome, effect


@effect(name="typed.charge")
async def charge(op: Operation, customer: str, cents: int = 5) -> Outcome[dict[str, int]]:
    return Outcome(op.key, {"cents": cents})


@charge.lookup
async def find(op: Operation) -> Happened | NotHappened:
    return NotHappened()


@effect(name="typed.ask", repeatable=True)
async def ask(op: Operation, prompt: str) -> str:
    return prompt


@effect(name="typed.mail")
def mail(op: Operation, to: str) -> Outcome[int]:
    return Outcome(to, 1)


@mail.lookup
def find_mail(op: Operation) -> Happened | NotHappened:
    return Happened("seen")


async def coroutine() -> None:
    assert_type(await charge("c"), Outcome[dict[str, int]])
    assert_type(await charge.step("deposit")("c", cents=5), Outcome[dict[str, int]])
    assert_type(await charge.keyed("invoice-7")("c"), Outcome[dict[str, int]])
    assert_type(await ask("who?"), Outcome[str])
    assert_type(mail("c"), Outcome[int])
    assert_type(await asyncio.to_thread(mail, "c"), Outcome[int])
    task = asyncio.create_task(charge("c"))
    assert_type((await task).result["cents"], int)
    one, two = await asyncio.gather(charge("c"), ask("who?"))
    assert_type(one, Outcome[dict[str, int]])
    assert_type(two, Outcome[str])
    charge("c")  # type: ignore[unused-coroutine]
    await mail("c")  # type: ignore[misc]
    await charge(5)  # type: ignore[arg-type]
    charge("c").ref  # type: ignore[attr-defined]


def function() -> None:
    assert_type(mail("c").ref, str)
    assert_type(charge.blocking("c"), Outcome[dict[str, int]])
    assert_type(charge.blocking.step("deposit")("c", 5), Outcome[dict[str, int]])
    mail.blocking("c")  # type: ignore[misc]
    mail(5)  # type: ignore[arg-type]


@mail.lookup  # type: ignore[type-var]
def wrong(op: Operation) -> int:
    return 5
"""


def test_users_code_type_checks(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    if importlib.util.find_spec("mypy") is None:
        skip_loudly(request, "needs mypy: pip install mypy")
    sample = tmp_path / "typed_sample.py"
    sample.write_text(SAMPLE)
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file", "", "--follow-imports", "silent", str(sample)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert (checked.returncode, checked.stderr) == (0, ""), checked.stdout
