"""Workers and beat can be killed, paused and ended, whole or in part."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from celery import Celery
from celery.exceptions import TimeoutError as ResultTimeout

from celery_safe_effects.testing import BeatProcess, WorkerProcess, eventually, find_faketime
from celery_safe_effects.testing.process import _parents
from tests.support.brokers import Broker
from tests.support.loud import skip_loudly
from tests.support.processes import ROOT

APP = "tests.support.plain_app:app"


@pytest.fixture
def plain(redis_broker: Broker) -> Iterator[Celery]:
    app = Celery("producer", broker=redis_broker.url, backend=redis_broker.url, set_as_current=False)
    yield app
    app.close()


@pytest.fixture
def worker(redis_broker: Broker, tmp_path: Path) -> Iterator[WorkerProcess]:
    made = WorkerProcess(APP, name="w", env={"PLAIN_BROKER": redis_broker.url}, cwd=ROOT, log_path=tmp_path / "w.log")
    with made.start():
        yield made


def _alive(pids: list[int]) -> list[int]:
    table = _parents()
    return [p for p in pids if table.get(p, (0, "Z"))[1] not in "ZX"]


def test_a_worker_works_and_ends_warmly(plain: Celery, worker: WorkerProcess) -> None:
    assert plain.send_task("plain.pid").get(timeout=10) in worker.children()
    assert "w@test ready." in worker.log()
    worker.terminate()
    assert worker.wait(15) == 0


def test_kill_ends_parent_and_children(plain: Celery, worker: WorkerProcess) -> None:
    plain.send_task("plain.sleep", (60,))
    pids = [worker.pid, *eventually(worker.children)]
    worker.kill()
    assert _alive(pids) == []
    assert worker.returncode == -9
    worker.start()
    assert worker.running


def test_a_killed_child_is_replaced(plain: Celery, worker: WorkerProcess) -> None:
    first = plain.send_task("plain.pid").get(timeout=10)
    assert first in worker.kill_child()
    assert plain.send_task("plain.pid").get(timeout=20) != first
    assert worker.running


def test_killing_the_parent_alone(worker: WorkerProcess) -> None:
    children = worker.children()
    worker.kill_parent()
    assert not worker.running
    # The children notice that their pipe is closed.
    eventually(lambda: not _alive(children), 15)


@pytest.mark.parametrize("part", ["child", "parent", "both"])
def test_a_paused_worker_does_nothing_until_it_goes_on(plain: Celery, worker: WorkerProcess, part: str) -> None:
    plain.send_task("plain.pid").get(timeout=10)
    assert worker.pause(part)  # type: ignore[arg-type]
    result = plain.send_task("plain.pid")
    with pytest.raises(ResultTimeout):
        result.get(timeout=1)
    worker.resume(part)  # type: ignore[arg-type]
    assert result.get(timeout=10)


def test_a_worker_that_cannot_start_says_why(tmp_path: Path) -> None:
    broken = WorkerProcess("tests.support.no_such_app:app", cwd=ROOT, log_path=tmp_path / "broken.log")
    with pytest.raises(AssertionError, match="no_such_app"):
        broken.start()


def test_beat_sends(plain: Celery, worker: WorkerProcess, redis_broker: Broker, tmp_path: Path) -> None:
    with BeatProcess(APP, env={"PLAIN_BROKER": redis_broker.url}, cwd=ROOT, log_path=tmp_path / "beat.log") as beat:
        eventually(lambda: plain.backend.client.get("ticks"), 15)
        beat.terminate()
        assert beat.wait(10) == 0


def test_a_worker_at_another_time(
    plain: Celery, redis_broker: Broker, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if find_faketime() is None:
        skip_loudly(request, "needs libfaketime (Debian: apt-get install faketime)")
    late = WorkerProcess(
        APP,
        name="late",
        env={"PLAIN_BROKER": redis_broker.url},
        cwd=ROOT,
        log_path=tmp_path / "late.log",
        clock_offset=-3600,
    )
    with late.start():
        wall, monotonic = plain.send_task("plain.clock").get(timeout=10)
    assert time.time() - wall == pytest.approx(3600, abs=30)
    assert time.monotonic() - monotonic < 30
