"""The keeper of leases, without a database."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any
from uuid import uuid4

import pytest

from celery_safe_effects.engine import lease as lease_module
from celery_safe_effects.engine.lease import HeldLease, LeaseKeeper
from celery_safe_effects.store.hot import Lease
from celery_safe_effects.testing import eventually


class SlowStore:
    """Writes settlements when it is let."""

    def __init__(self) -> None:
        self.begun, self.let = threading.Event(), threading.Event()
        self.written: list[tuple[str, int]] = []

    def settle(self, ended: Iterable[tuple[str, int]]) -> None:
        pairs = list(ended)
        if pairs:
            self.begun.set()
            assert self.let.wait(30)
            self.written += pairs


def test_flush_waits_for_a_batch_that_is_being_written() -> None:
    """Whoever flushes relies upon it: what was noted before stands when it returns."""
    store: Any = SlowStore()
    keeper = LeaseKeeper(store, interval=10.0)
    keeper.settle("a", 1)
    assert store.begun.wait(10), "the keeper's own thread writes it"
    seen: list[list[tuple[str, int]]] = []

    def flush() -> None:
        keeper.flush(store)
        seen.append(list(store.written))

    caller = threading.Thread(target=flush)
    caller.start()
    eventually(keeper._settling.locked, 5)
    caller.join(0.3)
    assert caller.is_alive(), "it waits"
    store.let.set()
    caller.join(10)
    assert seen == [[("a", 1)]]


def test_a_flush_that_hangs_does_not_hold_up_renewals() -> None:
    store: Any = SlowStore()
    renewed = threading.Event()
    keeper = LeaseKeeper(store, interval=0.2)
    keeper.renew = renewed.set  # type: ignore[method-assign]
    keeper._settling.acquire()  # somebody flushes, and the database does not answer
    keeper.settle("a", 1)
    try:
        assert renewed.wait(10)
        assert not store.begun.is_set()
    finally:
        keeper._settling.release()
        store.let.set()


def test_a_worker_stops_trusting_its_lease_before_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the database said last: by its own clock, from before it asked."""
    now = [100.0]
    monkeypatch.setattr(lease_module, "clock", lambda: now[0])
    held = HeldLease(Lease("job", uuid4(), 0, "w@h/1/1"), ttl=30.0)
    assert not held.trusted(), "not claimed yet"
    held.claimed(1, since=100.0)
    for later, trusted in ((0.0, True), (28.9, True), (29.0, False), (31.0, False)):
        now[0] = 100.0 + later
        assert held.trusted() == trusted, later
    held.renewed = 120.0
    assert held.trusted()
    held.lost = True
    assert not held.trusted()
