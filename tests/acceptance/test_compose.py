"""Every command of `docker-compose.yml` that is ours, as a process here, until its health check says it is well."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from celery_safe_effects.testing import eventually
from celery_safe_effects.testing._ports import free_port
from tests.support.brokers import Broker
from tests.support.processes import ROOT
from tests.unit.test_compose import SERVICES

OURS = ("provider", "upgrade", "worker-a", "worker-b", "beat", "flower", "metrics")
PORTS = ("8001", "5555", "9540")
LOGIN = "ada:secret"


@pytest.fixture
def broker(redis_broker: Broker) -> Broker:
    """RabbitMQ's address is another one; the commands are the same."""
    return redis_broker


class Stack:
    """The services, with this machine's addresses in place of the containers' names."""

    def __init__(self, folder: Path, database_url: str, broker: Broker, result_backend_url: str) -> None:
        self.folder = folder
        self.ports = {port: str(free_port()) for port in PORTS}
        self.addresses = {
            "amqp://shop:${RABBITMQ_PASSWORD:?fill in .env}@rabbitmq:5672//": broker.url,
            "postgresql+psycopg://shop:${POSTGRES_PASSWORD:?fill in .env}@postgres:5432/shop": database_url,
            "http://provider:8001": f"http://127.0.0.1:{self.ports['8001']}",
            "redis://redis:6379/0": result_backend_url,
            "${FLOWER_BASIC_AUTH:?fill in .env}": LOGIN,
            "0.0.0.0": "127.0.0.1",
            "/tmp/": f"{folder}/",  # before the next, whose replacement may contain it
            "/data/": f"{folder}/",
        }
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def here(self, text: str) -> str:
        for there, here in self.addresses.items():
            text = text.replace(there, here)
        for port, mine in self.ports.items():
            text = text.replace(f"--port={port}", f"--port={mine}").replace(f":{port}/", f":{mine}/")
            text = mine if text == port else text
        return text

    def environment(self, name: str) -> dict[str, str]:
        given = {key: self.here(value) for key, value in SERVICES[name]["environment"].items()}
        return {**os.environ, **given, "PYTHONPATH": str(ROOT)}

    def command(self, words: list[str]) -> list[str]:
        first, *rest = map(self.here, words)
        return [sys.executable, *(["-m", "celery"] if first == "celery" else []), *rest]

    def start(self, name: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                self.command(SERVICES[name]["command"]),
                env=self.environment(name),
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.processes[name] = process
        return process

    def is_well(self, name: str) -> bool:
        process = self.processes[name]
        assert process.poll() is None, (self.folder / f"{name}.log").read_text()[-3000:]
        _, *words = SERVICES[name]["healthcheck"]["test"]
        done = subprocess.run(
            self.command(words), env=self.environment(name), cwd=ROOT, check=False, capture_output=True, timeout=60
        )
        return done.returncode == 0


@pytest.fixture
def stack(tmp_path: Path, empty_database_url: str, broker: Broker, result_backend_url: str) -> Iterator[Stack]:
    made = Stack(tmp_path, empty_database_url, broker, result_backend_url)
    yield made
    for process in made.processes.values():
        process.terminate()
    for process in made.processes.values():
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.mark.slow
def test_the_services_of_ours_run_and_are_well(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in OURS:
        process = stack.start(name)
        if name == "upgrade":
            assert process.wait(60) == 0, (stack.folder / "upgrade.log").read_text()
    for name in OURS:
        if name != "upgrade":
            eventually(lambda: stack.is_well(name), 60, 0.5, message=f"{name} is well")  # noqa: B023

    environment = stack.environment("worker-a")
    ticket = {"id": "t-1", "customer": "ada@example.org", "payment": "pay_1", "cents": 500, "service": "shop"}
    sends = (
        "import json, sys; from example_project.tasks import handle_ticket;"
        " print(handle_ticket.delay(json.loads(sys.argv[1])).get(timeout=60))"
    )
    done = subprocess.run(
        [sys.executable, "-c", sends, json.dumps(ticket)],
        env=environment, cwd=ROOT, check=False, capture_output=True, text=True, timeout=90,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "deployment" in done.stdout

    user, _, password = LOGIN.partition(":")
    page = httpx.get(f"http://127.0.0.1:{stack.ports['5555']}/safe-effects", auth=(user, password))
    assert (page.status_code, "Healthy" in page.text) == (200, True)
    scraped = httpx.get(f"http://127.0.0.1:{stack.ports['9540']}/metrics").text
    assert 'safe_effects_jobs_finished_total{status="succeeded"} 1.0' in scraped
