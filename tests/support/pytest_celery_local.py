"""pytest-celery's nodes on local processes, so that `celery_setup` works without Docker.

A pytest-celery node drives its container through a small set of methods, and takes any object that has them.
Workers are always local processes: they run this checkout and reach the test's database. Brokers and backends
are containers where a Docker engine answers and has their images, else servers of our own.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import subprocess
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from celery import Celery
from pytest_celery import (
    CeleryTestBackend,
    CeleryTestBroker,
    CeleryTestWorker,
    CeleryWorkerContainer,
    RabbitMQTestBroker,
    RedisTestBackend,
    RedisTestBroker,
)
from pytest_celery.vendors.rabbitmq.defaults import RABBITMQ_IMAGE
from pytest_celery.vendors.redis.defaults import REDIS_IMAGE

from celery_safe_effects.testing import LocalServer, WorkerProcess
from example_project.provider_client import Provider
from tests.support.brokers import Broker
from tests.support.processes import APP, ROOT, process_environment

CONTAINERS_VARIABLE = "SAFE_EFFECTS_TEST_CONTAINERS"  # 0 never, 1 without asking


def _docker(*arguments: str, timeout: float) -> bool:
    try:
        done = subprocess.run(["docker", *arguments], capture_output=True, check=False, timeout=timeout)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


@functools.cache
def containers_usable() -> bool:
    """Tell whether brokers and backends can be containers here.

    Returns:
        Whether a Docker engine answers and has the images, or can get them.
    """
    choice = os.environ.get(CONTAINERS_VARIABLE)
    if choice in {"0", "1"}:
        return choice == "1"
    if shutil.which("docker") is None or not _docker("info", timeout=10):
        return False
    return all(
        _docker("image", "inspect", image, timeout=20) or _docker("pull", "--quiet", image, timeout=300)
        for image in (REDIS_IMAGE, RABBITMQ_IMAGE)
    )


class LocalContainer(ABC):
    """What pytest-celery's nodes ask of a container."""

    def __init__(self, name: str) -> None:
        self.id = uuid.uuid4().hex
        self.name = f"{name}-{self.id[:8]}"
        self.attrs: dict[str, Any] = {"Config": {"Hostname": self.id[:12]}}

    @property
    @abstractmethod
    def status(self) -> str:
        """ "running" or "exited"."""

    @abstractmethod
    def kill(self, signal: str | int = "SIGKILL") -> None:
        """Send a signal to it."""

    @abstractmethod
    def restart(self, timeout: float = 30) -> None:
        """Stop it if it runs, and start it."""

    @abstractmethod
    def logs(self) -> str:
        """Its output."""

    def ready(self) -> bool:
        """Whether it answers; our processes are started ready."""
        return self.status == "running"

    def reload(self) -> None:  # noqa: B027 - nothing to do is what every kind here does
        """Nothing is cached here."""

    def teardown(self) -> None:  # noqa: B027
        """The fixture that made it ends it."""


def _number(name: str | int) -> int:
    return name if isinstance(name, int) else int(signal.Signals[name])


class LocalServerContainer(LocalContainer):
    """A broker or backend: one database number or virtual host of a server of this run."""

    def __init__(self, broker: Broker) -> None:
        super().__init__(broker.kind)
        self._broker = broker

    @property
    def celeryconfig(self) -> dict[str, Any]:
        """Addresses, as pytest-celery's own containers give them."""
        parts = urlsplit(self._broker.url)
        return {
            "url": self._broker.url,
            "host_url": self._broker.url,
            "hostname": parts.hostname,
            "port": parts.port,
            "vhost": parts.path.removeprefix("/"),
        }

    @property
    def status(self) -> str:
        return "running" if self._broker.server is None or self._broker.server.running else "exited"

    def kill(self, signal: str | int = "SIGKILL") -> None:
        if _number(signal) == 9:
            self._owned().kill()
        else:
            self._owned().stop()

    def restart(self, timeout: float = 30) -> None:
        self._owned().stop(timeout=timeout)
        self._owned().start()

    def logs(self) -> str:
        return self._broker.server.log() if self._broker.server is not None else ""

    def _owned(self) -> LocalServer:
        if self._broker.server is None:
            raise RuntimeError("this server was named by the environment and is not ours to stop")
        return self._broker.server


class LocalWorkerContainer(LocalContainer):
    """A worker of an application, as a process of ours."""

    def __init__(self, process: WorkerProcess, kind: type[Any] = CeleryWorkerContainer) -> None:
        super().__init__("worker")
        self.process = process
        self._kind = kind

    @property
    def status(self) -> str:
        return "running" if self.process.running else "exited"

    def kill(self, signal: str | int = "SIGKILL") -> None:
        # As in a container, where PID 1's death takes everything along.
        if _number(signal) == 9:
            self.process.kill()
        else:
            os.kill(self.process.pid, _number(signal))
            self.process.wait(30)

    def restart(self, timeout: float = 30) -> None:
        self.process.stop(timeout)
        self.process.start()

    def logs(self) -> str:
        return self.process.log()

    def exec_run(self, command: str | Sequence[str]) -> tuple[int, bytes]:
        """Answer the one question that nodes ask: which processes the worker has."""
        import psutil

        del command

        parent = psutil.Process(self.process.pid)
        columns = ["pid", "name", "username", "cmdline", "cpu_percent", "memory_percent", "create_time"]
        rows = [p.as_dict(columns) for p in (parent, *parent.children(recursive=True))]
        return 0, json.dumps(rows).encode()

    def version(self) -> str:
        """The version of Celery that it runs."""
        from celery import __version__

        return str(__version__)

    def log_level(self) -> str:
        """Its log level."""
        return str(self._kind.log_level())

    def worker_name(self) -> str:
        """Its node name before the `@`."""
        return self.process.node.partition("@")[0]

    def worker_queue(self) -> str:
        """The queue that it consumes."""
        return str(self._kind.worker_queue())


class LocalTestWorker(CeleryTestWorker):
    """A worker's node; its host name is not derived from a container's id."""

    def hostname(self) -> str:
        """The node's full name."""
        return str(self.container.process.node)


@contextmanager
def safe_worker(
    name: str, conf: Mapping[str, Any], app: Celery, provider: Provider, folder: Path
) -> Iterator[CeleryTestWorker]:
    """A worker of the test application as one more node of a setup.

    Args:
        name: its node name before the `@`.
        conf: its settings.
        app: the setup's application.
        provider: the provider that its effects call.
        folder: where its log goes.
    """
    log = folder / f"{name}.log"
    process = WorkerProcess(APP, name=name, env=process_environment(conf, provider), cwd=ROOT, log_path=log)
    with process.start():
        worker = LocalTestWorker(LocalWorkerContainer(process), app)
        yield worker
        worker.teardown()


def write_content(folder: Path, content: Mapping[str, bytes]) -> None:
    """Lay out what pytest-celery would put into the worker's volume.

    Args:
        folder: where.
        content: bytes by relative path.
    """
    for name, data in content.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


@pytest.fixture
def celery_setup_worker(
    tmp_path: Path,
    default_worker_container_cls: type[Any],
    default_worker_initial_content: Mapping[str, bytes],
    default_worker_app: Any,
    celery_worker_cluster_config: Mapping[str, Any],
) -> Iterator[CeleryTestWorker]:
    """A worker of pytest-celery's application, with the modules and settings that its fixtures ask for."""
    folder = tmp_path / "worker"
    write_content(folder, default_worker_initial_content)
    kind = default_worker_container_cls
    # From outside a container's network: the addresses that the host sees.
    urls = {
        name: ";".join(config["host_urls"])
        for name, config in (
            ("CELERY_BROKER_URL", celery_worker_cluster_config["celery_broker_cluster_config"]),
            ("CELERY_RESULT_BACKEND", celery_worker_cluster_config["celery_backend_cluster_config"]),
        )
        if config
    }
    process = WorkerProcess(
        "app:app",
        name=kind.worker_name(),
        env={**urls, "PYTHONPATH": str(folder)},
        queues=[kind.worker_queue()],
        log_level=kind.log_level(),
        cwd=folder,
        log_path=tmp_path / "worker.log",
    )
    with process.start():
        worker = LocalTestWorker(LocalWorkerContainer(process, kind), default_worker_app)
        yield worker
        worker.teardown()


if not containers_usable():

    @pytest.fixture
    def celery_redis_broker(redis_broker: Broker) -> Iterator[CeleryTestBroker]:
        """Redis as a broker node."""
        node = RedisTestBroker(LocalServerContainer(redis_broker))
        yield node
        node.teardown()

    @pytest.fixture
    def celery_rabbitmq_broker(rabbitmq_broker: Broker) -> Iterator[CeleryTestBroker]:
        """RabbitMQ as a broker node."""
        node = RabbitMQTestBroker(LocalServerContainer(rabbitmq_broker))
        yield node
        node.teardown()

    @pytest.fixture
    def celery_redis_backend(request: pytest.FixtureRequest, result_backend_url: str) -> Iterator[CeleryTestBackend]:
        """Redis as a backend node."""
        node = RedisTestBackend(LocalServerContainer(Broker("redis", result_backend_url, None)))
        yield node
        node.teardown()


def pytest_report_header() -> str:
    """Say what pytest-celery's nodes are in this run."""
    servers = "containers" if containers_usable() else "processes"
    return f"pytest-celery: workers as processes, servers as {servers}"
