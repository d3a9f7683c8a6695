"""Workers and beat as processes, and the application as a producer sees it."""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from celery_safe_effects.testing import BeatProcess, CeleryProcess, FaketimeNotFound, WorkerProcess
from example_project.provider_client import Provider
from tests.support.brokers import Broker
from tests.support.loud import skip_loudly
from tests.support.names import CONF_VARIABLE, PROVIDER_VARIABLE

ROOT = Path(__file__).resolve().parents[2]
APP = "tests.support.app:app"

# Short intervals: a test waits for lease + 2 sweeps + reconcile.
FAST: dict[str, Any] = {
    "safe_effects_lease_ttl": 3,
    "safe_effects_sweep_interval": 0.5,
    "safe_effects_reconcile_interval": 0.5,
    "safe_effects_republish_after": 3,
    "safe_effects_statement_timeout": 5,
    "broker_connection_retry_on_startup": True,
    "worker_hijack_root_logger": True,
    "worker_send_task_events": True,
}


def process_environment(conf: Mapping[str, Any], provider: Provider) -> dict[str, str]:
    """Make the environment of a process of the test application.

    Args:
        conf: its settings.
        provider: the provider that its effects call.

    Returns:
        The variables, to be added to ours.
    """
    return {
        CONF_VARIABLE: json.dumps(dict(conf)),
        PROVIDER_VARIABLE: provider.url,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }


@pytest.fixture
def app_conf(database_url: str, broker: Broker, result_backend_url: str) -> dict[str, Any]:
    """The settings of app, workers and beat; a test changes them before it starts any."""
    return {
        **FAST,
        "broker_url": broker.url,
        "result_backend": result_backend_url,
        "safe_effects_database_url": database_url,
    }


@pytest.fixture
def app(app_conf: dict[str, Any], provider: Provider) -> Iterator[Celery]:
    """The producer's side of the application, in this process."""
    from tests.support.tasks import create_app

    made = create_app(app_conf)
    made.set_current()
    yield made
    close = getattr(getattr(made, "safe_effects", None), "close", None)
    if close is not None:
        close()
    made.close()


class Processes:
    """The Celery processes of one test; all are killed at its end, and a failure shows their logs."""

    def __init__(
        self,
        request: pytest.FixtureRequest,
        folder: Path,
        conf: dict[str, Any],
        provider: Provider,
    ) -> None:
        self._request = request
        self._folder = folder
        self._conf = conf
        self._provider = provider
        self.started: list[CeleryProcess] = []

    def env(self, conf: Mapping[str, Any] | None, env: Mapping[str, str] | None) -> dict[str, str]:
        """The environment of a process: the test's settings, changed by `conf`."""
        return {**process_environment({**self._conf, **(conf or {})}, self._provider), **(env or {})}

    def worker(
        self,
        name: str = "worker",
        *,
        acks_late: bool | None = None,
        conf: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        concurrency: int = 1,
        pool: str = "prefork",
        queues: Sequence[str] | None = None,
        extra: Sequence[str] = (),
        clock_offset: float | None = None,
        ready: bool = True,
    ) -> WorkerProcess:
        """Start a worker of the test application.

        Args:
            name: its node name; two at one time need two names.
            acks_late: sets `task_acks_late`; None leaves it alone.
            conf: settings, on top of `app_conf`.
            env: environment variables.
            concurrency: pool size.
            pool: the pool's kind.
            queues: queues to consume.
            extra: more arguments of `celery worker`.
            clock_offset: seconds by which its clock is wrong; skips loudly without libfaketime.
            ready: whether to wait until it is ready.

        Returns:
            The worker.
        """
        acks = {} if acks_late is None else {"task_acks_late": acks_late}
        made = WorkerProcess(
            APP,
            name=name,
            env=self.env({**acks, **(conf or {})}, env),
            concurrency=concurrency,
            pool=pool,
            queues=queues,
            extra=extra,
            cwd=ROOT,
            log_path=self._folder / f"{name}-{len(self.started)}.log",
            clock_offset=clock_offset,
        )
        self._start(made, ready)
        return made

    def beat(
        self,
        name: str = "beat",
        *,
        conf: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        extra: Sequence[str] = (),
        clock_offset: float | None = None,
    ) -> BeatProcess:
        """Start a beat of the test application.

        Args:
            name: what it is called.
            conf: settings, on top of `app_conf`.
            env: environment variables.
            extra: more arguments of `celery beat`.
            clock_offset: seconds by which its clock is wrong; skips loudly without libfaketime.

        Returns:
            The beat.
        """
        made = BeatProcess(
            APP,
            name=name,
            env=self.env(conf, env),
            extra=extra,
            max_interval=1,
            cwd=ROOT,
            log_path=self._folder / f"{name}-{len(self.started)}.log",
            clock_offset=clock_offset,
        )
        self._start(made, True)
        return made

    def _start(self, made: CeleryProcess, ready: bool) -> None:
        self.started.append(made)
        try:
            made.start(ready=ready)
        except FaketimeNotFound as missing:
            skip_loudly(self._request, str(missing))

    def kill(self) -> None:
        """Kill all of them."""
        for process in self.started:
            process.kill()


class Workers(Processes):
    """`workers("a", acks_late=True)` starts a worker and returns it ready."""

    __call__ = Processes.worker


class Beats(Processes):
    """`beat()` starts a beat and returns it."""

    __call__ = Processes.beat


@pytest.fixture
def workers(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    app_conf: dict[str, Any],
    provider: Provider,
) -> Iterator[Workers]:
    """Starts workers, each a process of its own; killed at the end."""
    made = Workers(request, tmp_path, app_conf, provider)
    yield made
    made.kill()


@pytest.fixture
def beat(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    app_conf: dict[str, Any],
    provider: Provider,
) -> Iterator[Beats]:
    """Starts beats, each a process of its own; killed at the end."""
    made = Beats(request, tmp_path, app_conf, provider)
    yield made
    made.kill()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the logs of a failed test's processes."""
    report = yield
    if report.failed:
        for name in ("workers", "beat"):
            held = getattr(item, "funcargs", {}).get(name)
            for process in held.started if isinstance(held, Processes) else []:
                report.sections.append((f"log of {process.name}", process.log()[-20000:]))
    return report
