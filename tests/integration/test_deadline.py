"""The kernel timer ends a process at its deadline, stopped or not, and no other."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from celery_safe_effects.app import SafeEffects
from celery_safe_effects.engine import deadline, process
from tests.support.lab import Lab

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's POSIX timers")


def ended(body: Callable[[], None]) -> tuple[int, float]:
    """Run something in a child; its wait status, and after how many seconds it ended."""
    started = time.monotonic()
    pid = os.fork()
    if pid == 0:
        try:
            body()
        finally:
            os._exit(7)
    _, status = os.waitpid(pid, 0)
    return status, time.monotonic() - started


def stopped() -> None:
    with deadline.killed_after(0.5):
        os.kill(os.getpid(), signal.SIGSTOP)


def busy() -> None:
    with deadline.killed_after(0.5):
        while True:
            sum(range(1000))


def inner_is_longer() -> None:
    with deadline.killed_after(0.5), deadline.killed_after(60):
        time.sleep(30)


def inner_is_over() -> None:
    with deadline.killed_after(0.5):
        with deadline.killed_after(60):
            pass
        time.sleep(30)


def overlapping() -> None:
    """Two calls in flight at once: the one that began first returns first, in another thread."""
    first, second = deadline.killed_after(60), deadline.killed_after(0.5)
    first.__enter__()
    second.__enter__()
    thread = threading.Thread(target=first.__exit__, args=(None, None, None))
    thread.start()
    thread.join()
    time.sleep(30)


@pytest.mark.parametrize("body", [stopped, busy, inner_is_longer, inner_is_over, overlapping])
def test_it_is_killed_at_the_deadline(body: Callable[[], None]) -> None:
    status, after = ended(body)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert 0.4 < after < 10


def over_in_time() -> None:
    with deadline.killed_after(1):
        pass
    with deadline.killed_after(60), deadline.killed_after(1):
        pass
    with deadline.killed_after(None):
        time.sleep(1.5)


def overlapping_in_time() -> None:
    first, second = deadline.killed_after(1), deadline.killed_after(1)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    time.sleep(1.5)


def forked_off() -> None:
    """A timer belongs to the process that armed it."""
    with deadline.killed_after(1):
        pid = os.fork()
        if pid == 0:
            time.sleep(1.5)
            os._exit(7)
    os.waitpid(pid, 0)


@pytest.mark.parametrize("body", [over_in_time, overlapping_in_time, forked_off])
def test_a_block_that_is_over_in_time_lives_on(body: Callable[[], None]) -> None:
    status, _ = ended(body)
    assert os.WIFEXITED(status)
    assert os.WEXITSTATUS(status) == 7


def test_a_process_is_gone_when_it_has_exited_and_not_before() -> None:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writer, process.identity().encode())
        signal.pause()
        os._exit(0)
    identity = os.read(reader, 1000).decode()
    assert not process.is_gone(identity)
    os.kill(pid, signal.SIGSTOP)
    assert not process.is_gone(identity), "paused is not gone"
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert process.is_gone(identity)
    here, _, _ = identity.rpartition("|")
    assert process.is_gone(f"{here}|1"), "another process of the same number is not the same"
    assert not process.is_gone("another boot|pid:[1]|1|1")
    os.close(reader)
    os.close(writer)


# -- what is recorded of it --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [False, True], ids=["declared", "whole-body"])
@pytest.mark.parametrize("trusted", [False, True], ids=["", "trusted"])
@pytest.mark.parametrize(
    ("prefork", "kill", "works", "armed"),
    [(True, True, True, True), (True, True, False, False), (True, False, True, False), (False, True, True, False)],
    ids=["armed", "the kernel has none left", "turned off", "another pool"],
)
def test_an_intent_says_what_the_timer_said(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, prefork: bool, kill: bool, works: bool, armed: bool, trusted: bool,
    whole: bool,
) -> None:  # fmt: skip
    """Not what was asked for: an absence may be believed because of it."""

    @contextmanager
    def timer(seconds: float | None) -> Iterator[bool]:
        yield seconds is not None and works

    monkeypatch.setattr(SafeEffects, "prefork", property(lambda _: prefork))
    monkeypatch.setattr(lab.safe, "hooks", dataclasses.replace(lab.safe.hooks, armed=timer))
    options: dict[str, Any] = {"deadline": 30.0, "kill_at_deadline": kill, "trust_deadline_kill": trusted}
    if whole:
        task = lab.task(lambda self: None, effect_options=options)
    else:
        a = lab.effect("a", **options)
        task = lab.task(lambda self: a().ref, effects=[a])
    lab.run(task)
    assert lab.sql("SELECT deadline_kills, deadline_is_proof FROM operation") == [
        {"deadline_kills": armed, "deadline_is_proof": armed and trusted}
    ]
