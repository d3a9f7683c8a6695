"""Statements give way to greenlets, keep their deadlines, and wait for connections in every kind of process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.pools import needs_pool

SCRIPT = Path(__file__).resolve().parents[1] / "support" / "green.py"


@pytest.mark.parametrize("kind", ["none", "gevent", "eventlet"])
def test_statements(kind: str, empty_database_url: str, request: pytest.FixtureRequest) -> None:
    needs_pool(request, kind)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT), kind, empty_database_url],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        cwd=SCRIPT.parents[2],
        env={**os.environ, "PYTHONPATH": str(SCRIPT.parents[2])},
    )
    assert done.returncode == 0, done.stderr
    late = "no answer from PostgreSQL within 1 s: True"
    expected = {
        "deadline": late,
        "others ran": True,
        "turns": ["done"] * 4,
        "too long": "[store_unavailable] all 2 connections of this process were busy for 1 s: True",
        "free again": ["done"] * 3,
        "after a kill": ["done"] * 2,
        "native": ["done", late, "done"],
    }
    if kind == "none":
        del expected["after a kill"]
    assert json.loads(done.stdout) == expected
