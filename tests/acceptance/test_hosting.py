"""The pages for those who host it: every command on them runs, and what they show is what is to be seen."""

from __future__ import annotations

import contextlib
import inspect
import re
import shlex
from pathlib import Path
from typing import Any

import psycopg
import pytest
from celery import Celery
from celery.bin.base import CLIContext
from celery.bin.control import inspect as inspect_command
from click.testing import CliRunner

from celery_safe_effects.cli import safe_effects
from celery_safe_effects.testing import eventually
from example_project.provider_client import Provider
from tests.support.brokers import Broker
from tests.support.checks import wait_status
from tests.support.names import PROVIDER_VARIABLE
from tests.support.processes import Beats, Workers
from tests.support.roles import roles
from tests.support.services import Sql

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("hosting.md", "troubleshooting.md")
IN_A_LINE = re.compile(r"`((?:celery|psql|python3) [^`]+)`")
ALONE = re.compile(r"(?m)^ {4,}((?:celery|psql|python3) .+?)(?: {2,}#.*)?$")
ELSEWHERE = {
    "python3 example_project": ROOT / "tests" / "acceptance" / "test_demo.py",
    "python3 tests/bench_growth.py": ROOT / "tests" / "bench_growth.py",
    "python3 tests/bench_retention.py": ROOT / "tests" / "bench_retention.py",
}


@pytest.fixture
def broker(redis_broker: Broker) -> Broker:
    """The pages are about the database."""
    return redis_broker


def commands(page: str) -> list[str]:
    """Every command on a page, once."""
    text = (ROOT / "docs" / page).read_text()
    return list(dict.fromkeys([*ALONE.findall(text), *IN_A_LINE.findall(text)]))


def filled(word: str, given: dict[str, str]) -> str:
    """A word of a command with the page's placeholders replaced."""
    return re.sub(r"\b(" + "|".join(given) + r")\b", lambda found: given[found[1]], word)


def test_commands_are_found() -> None:
    for page in PAGES:
        found = commands(page)
        assert len(found) > 15
        text = (ROOT / "docs" / page).read_text()
        assert sum(text.count(start) for start in ("celery -A", "psql ", "python3 ")) == sum(
            len(pattern.findall(text)) for pattern in (ALONE, IN_A_LINE)
        )


@pytest.mark.parametrize("page", PAGES)
def test_every_command_runs(
    app: Celery, provider: Provider, database_url: str, dsn: str, sql: Sql, page: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PROVIDER_VARIABLE, provider.url)
    provider.control(kind="charge_plain", drop_reply=True)
    safe: Any = app.__dict__["_safe_effects"]

    def placeholders(line: str) -> dict[str, str]:
        """A job for those that move one, and names for the rest."""
        if " retry " in line:
            job = str(app.tasks["tests.charge"].apply(("cus_1",)).id)  # which fails: an argument is missing
        else:
            job = str(app.tasks["tests.charge_plain"].apply(("cus_1", 5)).id)
        return {"JOB": job, "KEY": f"{job}:1", "REF": "ch_1", "TEXT": "a reason", "TENANT": "acme", **made}

    with roles(database_url, "web", "shop_worker", "grafana") as made, psycopg.connect(dsn, autocommit=True) as plain:
        for line in commands(page):
            words = shlex.split(line)
            if words[0] == "python3":
                assert ELSEWHERE[line].exists()
            elif words[0] == "psql":
                assert (words[1:3], len(words)) == (["shop", "-c"], 4)
                plain.execute(words[3].encode())
            elif words[3] == "inspect":
                assert words[4] in inspect_command.methods if hasattr(inspect_command, "methods") else True
            else:
                assert words[:4] == ["celery", "-A", "proj", "safe-effects"]
                given = placeholders(line)
                arguments = [filled(word, given) for word in words[4:]]
                mixes = "mix_stderr" in inspect.signature(CliRunner).parameters
                runner = CliRunner(**({"mix_stderr": False} if mixes else {}))  # type: ignore[arg-type]
                context = CLIContext(app=app, no_color=True, workdir=None)
                done = runner.invoke(safe_effects, arguments, obj=context, catch_exceptions=False)
                assert done.exit_code in ((0, 1) if words[4] in {"status", "doctor"} else EXPECTED.get(line, (0,))), (
                    line,
                    done.stdout,
                    done.stderr,
                )
    with contextlib.suppress(Exception):
        safe.close()


EXPECTED = {
    # A step that was never refused has no new key.
    "celery -A proj safe-effects retry JOB --reason TEXT --new-key STEP": (1,),
}


def test_the_transitions_of_a_killed_worker_are_those_that_the_page_shows(
    app: Celery, workers: Workers, beat: Beats, provider: Provider, sql: Sql
) -> None:
    text = (ROOT / "docs" / "hosting.md").read_text().partition("<!-- killed worker -->")[2]
    shown = text.partition("```\n")[2].partition("```")[0].splitlines()
    provider.control(delay_before=3, kind="charge", times=1)
    first = workers("a")
    job = str(app.tasks["tests.charge"].apply_async(("cus_1", 500)).id)
    eventually(lambda: provider.received("charge"), 10, message="the provider received the call")
    first.kill()
    workers("b")
    beat()
    wait_status(sql, job, "succeeded", timeout=60)
    context = CLIContext(app=app, no_color=True, workdir=None)
    done = CliRunner(env={"COLUMNS": "200"}).invoke(safe_effects, ["log", job], obj=context, catch_exceptions=False)
    assert done.exit_code == 0
    seen = [re.sub(r"^\S+ +\S+ +", "", line) for line in done.output.splitlines() if "→" in line or "->" in line]

    def gist(line: str) -> tuple[str, ...]:
        """Who moved, where to, and why or by which claim, whatever the columns are."""
        subject, came, went = re.fullmatch(r"(job|step 1) +(\w*) *(?:→|->) +(\w+).*", line).groups()  # type: ignore[union-attr]
        note = re.search(r"lease_expired|lookup|resolved", line)
        fence = re.search(r"fence (\d+)", line)
        return subject, came, went, note[0] if note else fence[0] if fence and subject == "job" and came else ""

    assert [gist(line) for line in shown] == [gist(line) for line in seen]
    assert len(provider.ledger()) == 1
