"""The acceptance tests run the test application in pytest-celery's setup."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from pytest_celery import CeleryTestWorker

from celery_safe_effects.testing import WorkerProcess
from example_project.provider_client import Provider
from tests.support.processes import APP, FAST, ROOT, process_environment
from tests.support.pytest_celery_local import LocalTestWorker, LocalWorkerContainer


@pytest.fixture
def safe_effects_conf() -> dict[str, Any]:
    """Settings on top of `FAST`; a module or test overrides it."""
    return {}


@pytest.fixture
def celery_setup_app(
    celery_setup_config: Mapping[str, Any],
    safe_effects_conf: Mapping[str, Any],
    database_url: str,
    provider: Provider,
) -> Iterator[Celery]:
    """The test application, on the brokers and backends of pytest-celery's setup."""
    from tests.support.tasks import create_app

    app = create_app({**FAST, **celery_setup_config, "safe_effects_database_url": database_url, **safe_effects_conf})
    app.set_current()
    yield app
    app.close()


@pytest.fixture
def celery_setup_worker(
    tmp_path: Path,
    celery_setup_config: Mapping[str, Any],
    safe_effects_conf: Mapping[str, Any],
    database_url: str,
    provider: Provider,
    celery_setup_app: Celery,
) -> Iterator[CeleryTestWorker]:
    """A worker of the test application."""
    conf = {**FAST, **celery_setup_config, "safe_effects_database_url": database_url, **safe_effects_conf}
    process = WorkerProcess(
        APP,
        name="acceptance",
        env=process_environment(conf, provider),
        cwd=ROOT,
        log_path=tmp_path / "acceptance.log",
    )
    with process.start():
        worker = LocalTestWorker(LocalWorkerContainer(process), celery_setup_app)
        yield worker
        worker.teardown()
