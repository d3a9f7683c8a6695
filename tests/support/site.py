"""One worker for a whole module: its tests share a database, a broker and a provider, and look at their own jobs."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.result import AsyncResult

from celery_safe_effects.testing import WorkerProcess
from example_project.provider_client import Provider
from example_project.provider_process import ProviderProcess
from tests.support.brokers import Broker
from tests.support.checks import assert_invariants, log, wait_status
from tests.support.names import PROVIDER_VARIABLE
from tests.support.processes import APP, FAST, ROOT, process_environment
from tests.support.provider import KEYLESS
from tests.support.services import PostgresServer, Sql, fresh_database, queries
from tests.support.tasks import create_app


@dataclass
class Site:
    """An application with a worker that runs already."""

    app: Celery
    conf: dict[str, Any]
    sql: Sql
    provider: Provider
    broker: Broker
    worker: WorkerProcess
    start: Callable[..., AbstractContextManager[WorkerProcess]]
    """Starts another worker: its name, `conf`, `env` and the options of `WorkerProcess`."""

    @property
    def safe(self) -> Any:
        return self.app.__dict__["_safe_effects"]

    def send(self, name: str, *args: Any, **options: Any) -> AsyncResult[Any]:
        """Enqueue `tests.<name>`."""
        return self.app.tasks[f"tests.{name}"].apply_async(args, **options)

    def ends(self, result: AsyncResult[Any], *statuses: str, timeout: float = 30.0) -> dict[str, Any]:
        """Wait for a job's end; its row."""
        return wait_status(self.sql, result.id, *(statuses or ("succeeded",)), timeout=timeout)

    def log(self, result: AsyncResult[Any]) -> list[str]:
        return log(self.sql, result.id)


@pytest.fixture(scope="module")
def site_conf() -> dict[str, Any]:
    """Settings of the module's application; `imports` also names what its producer gets by `add_tasks`."""
    return {}


@pytest.fixture(scope="module")
def site_worker() -> dict[str, Any]:
    """Options of the module's worker."""
    return {}


@pytest.fixture(scope="module")
def site(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    postgres_server: PostgresServer,
    _templates: dict[int, tuple[PostgresServer, str]],
    module_broker: Broker,
    _provider_process: ProviderProcess,
    site_conf: dict[str, Any],
    site_worker: dict[str, Any],
) -> Iterator[Site]:
    """The module's application and its worker; what it promises always is checked at its end."""
    provider = _provider_process.client
    provider.reset()
    for kind in KEYLESS:
        provider.control(kind=kind, dedupe=False)
    with ExitStack() as stack:
        database = stack.enter_context(fresh_database(postgres_server, _templates))
        sql = stack.enter_context(queries(database.replace("+psycopg", "", 1)))
        conf = {
            **FAST,
            "broker_url": module_broker.url,
            "result_backend": module_broker.url,
            "safe_effects_database_url": database,
            **site_conf,
        }
        folder: Path = tmp_path_factory.mktemp("site")

        @contextmanager
        def start(name: str, **options: Any) -> Iterator[WorkerProcess]:
            changed = {**conf, **options.pop("conf", {})}
            env = {**process_environment(changed, provider), **options.pop("env", {})}
            process = WorkerProcess(APP, name=name, env=env, cwd=ROOT, log_path=folder / f"{name}.log", **options)
            process.start()
            try:
                yield process
            finally:
                process.kill()

        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv(PROVIDER_VARIABLE, provider.url)
        app = create_app({**conf, "imports": []})
        stack.callback(app.close)
        stack.callback(app.__dict__["_safe_effects"].close)
        for name in conf.get("imports", ()):
            importlib.import_module(name).add_tasks(app)
        worker = stack.enter_context(start("site", **site_worker))
        yield Site(app, conf, sql, provider, module_broker, worker, start)
        worker.kill()
        assert_invariants(sql, provider)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the log of a failed test's worker."""
    report = yield
    held = getattr(item, "funcargs", {}).get("site")
    if report.failed and isinstance(held, Site):
        report.sections.append(("log of the module's worker", held.worker.log()[-20000:]))
    return report
