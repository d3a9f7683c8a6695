"""The README's first command: the demo keeps its promise, and says so to machines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from celery_safe_effects.testing import EmbeddedPostgres, EmbeddedRedis

ROOT = Path(__file__).resolve().parents[2]
VARIABLES = ("SAFE_EFFECTS_TEST_DATABASE_URL", "SAFE_EFFECTS_TEST_REDIS_URL")


def _environment(temporary: Path) -> dict[str, str]:
    # Servers of its own where there are some: it empties the Redis database that it is given.
    own = EmbeddedPostgres.available() and EmbeddedRedis.available()
    kept = {name: value for name, value in os.environ.items() if not (own and name in VARIABLES)}
    return {**kept, "TMPDIR": str(temporary)}


@pytest.mark.slow
@pytest.mark.faults
def test_the_demo_shows_the_problem_and_the_promise(tmp_path_factory: pytest.TempPathFactory) -> None:
    temporary = tmp_path_factory.mktemp("demo")
    for folder in (temporary, *temporary.parents):
        if folder.owner() == temporary.owner() and folder.stat().st_mode & 0o001 == 0:
            folder.chmod(folder.stat().st_mode | 0o011)  # PostgreSQL may run as another user
    done = subprocess.run(
        [sys.executable, "-m", "example_project.demo", "--json"],
        cwd=ROOT,
        env=_environment(temporary),
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    summary: dict[str, Any] = json.loads(done.stdout)
    assert summary["ok"] is True
    assert summary["broken"] == []

    safe = summary["safe"]
    assert safe["killed_while_accepting"] is True
    assert (safe["status"], safe["state"]) == ("succeeded", "SUCCESS")
    assert [(row["kind"], row["key"]) for row in safe["ledger"]] == [
        ("refund", f"{safe['id']}:2"),
        ("email", f"{safe['id']}:3"),
        ("deployment", f"{safe['id']}:4"),
    ]
    refs = {row["kind"]: row["ref"] for row in safe["ledger"]}
    assert safe["outcome_ref"] == refs["deployment"]
    assert safe["result"] == {"ticket": "T-1001", **refs}
    job = [row["to_status"] for row in safe["transitions"] if row["operation_key"] is None]
    assert job == [
        "queued", "leased", "running", "unknown",  # killed
        "queued", "leased", "running", "succeeded",
    ]  # fmt: skip
    refund = [row["to_status"] for row in safe["transitions"] if row["operation_key"] == f"{safe['id']}:2"]
    assert refund == ["intent_recorded", "unknown", "outcome_confirmed"]

    plain = summary["plain"]
    assert plain["killed_while_accepting"] is True
    assert plain["counts"] == {"refund": 2, "email": 1, "deployment": 1}
    assert plain["state"] == "SUCCESS"
    assert plain["problem"] == "refund happened 2 times"

    assert "AGAIN" in done.stderr
    assert [path.name for path in temporary.iterdir()] == []
