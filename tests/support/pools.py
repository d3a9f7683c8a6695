"""The pools of a worker, as parameters of tests."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any, Final

import pytest

from celery_safe_effects.testing import WorkerProcess
from tests.support.loud import skip_loudly
from tests.support.processes import Workers

POOLS: Final = ("prefork", "threads", "solo", "gevent", "eventlet")
SHARED_POOLS: Final = ("threads", "gevent", "eventlet")
"""Those in which many jobs share a process."""


def needs_pool(request: pytest.FixtureRequest, *pools: str) -> None:
    """Skip loudly where a pool's library is missing.

    Args:
        request: the test's request.
        *pools: the pools.
    """
    for pool in pools:
        if pool in ("gevent", "eventlet") and importlib.util.find_spec(pool) is None:
            skip_loudly(request, f"needs {pool}: pip install {pool}")


def one_worker_each(
    request: pytest.FixtureRequest, workers: Workers, kinds: Mapping[str, Mapping[str, Any]], **common: Any
) -> dict[str, WorkerProcess]:
    """Start workers of several kinds at one time, each on a queue of its kind's name.

    Args:
        request: the test's request.
        workers: starts workers.
        kinds: their options, by kind; the pool is the kind's first word.
        **common: options of all of them.

    Returns:
        The workers by kind, all ready.
    """
    made = {}
    for kind, options in kinds.items():
        pool = kind.partition("-")[0]
        needs_pool(request, pool)
        given = {"pool": pool, "queues": [kind], **common, **options}
        made[kind] = workers(f"{kind}-{len(workers.started)}", ready=False, **given)
    for worker in made.values():
        worker.wait_ready(60)
    return made
