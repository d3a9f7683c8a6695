"""The oldest supported Python with the oldest Celery and dependencies, and the newest with the newest.

Every combination: `python3 tests/matrix.py --all`.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests import matrix
from tests.support.brokers import REDIS_VARIABLE
from tests.support.loud import skip_loudly
from tests.support.services import DATABASE_VARIABLE, PostgresServer


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(matrix.VARIABLE in os.environ, reason="this is one of the combinations already")
@pytest.mark.parametrize("corner", matrix.CORNERS, ids=lambda one: one.name)
def test_a_corner_of_what_is_supported(
    corner: matrix.Combination,
    request: pytest.FixtureRequest,
    postgres_server: PostgresServer,
    result_backend_url: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """In an environment of its own, on the servers of this run."""
    if matrix.find_python(corner.python) is None:
        skip_loudly(request, f"needs Python {corner.python}, as python{corner.python} or in pyenv, asdf, mise or uv")
    servers = {DATABASE_VARIABLE: postgres_server.url("postgres"), REDIS_VARIABLE: result_backend_url}
    options = ["--python", corner.python, "--celery", corner.celery, *(["--lowest"] if corner.lowest else [])]
    done = subprocess.run(
        [sys.executable, matrix.__file__, *options],
        env={**os.environ, **servers},
        check=False,
        timeout=840,
    )
    out, err = capfd.readouterr()
    failures = out[max(0, out.find("= FAILURES =")) :]
    assert done.returncode == 0, f"{err[-5000:]}\n{failures[:10_000]}\n[...]\n{failures[-10_000:]}"
    assert f"{corner.name:32} passed" in out
