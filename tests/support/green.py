"""Run as a script: `green.py gevent|eventlet|none URL`. Statements in a process that a greenlet library has patched."""

# ruff: noqa: E402 - patching comes before everything else
from __future__ import annotations

import importlib
import sys

KIND, URL = sys.argv[1:]
if KIND == "gevent":
    importlib.import_module("gevent.monkey").patch_all()
elif KIND == "eventlet":
    importlib.import_module("eventlet").monkey_patch()

import json
import threading
import time
from typing import Any

from celery_safe_effects import native
from celery_safe_effects.config import from_conf
from celery_safe_effects.errors import StoreUnavailable
from celery_safe_effects.store.connection import StatementTimeout
from celery_safe_effects.store.hot import Store

found: dict[str, Any] = {}


def store(**how: Any) -> Store:
    """A store with two connections and a second's patience."""
    conf = {"database_url": URL, "statement_timeout": 1, "max_connections": 3}
    made = Store(from_conf({f"safe_effects_{name}": value for name, value in conf.items()}), **how)
    made.sql["SLEEP"] = "SELECT pg_sleep(%(seconds)s::float8)"
    return made


def timed(at: Store, seconds: float) -> str:
    """How a statement ends, and when it ended too late."""
    begun = time.monotonic()
    try:
        at.rows("SLEEP", seconds=seconds)
    except (StatementTimeout, StoreUnavailable) as exc:
        return f"{str(exc).partition(';')[0]}: {0.8 < time.monotonic() - begun < 6}"
    return "done"


def all_at_once(*calls: Any) -> list[Any]:
    """What some calls return, each in a thread (or greenlet) of its own."""
    results: list[Any] = [None] * len(calls)

    def run(number: int) -> None:
        results[number] = calls[number]()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


# Others run while a statement waits, and its deadline holds.
ticks, over = 0, False


def tick() -> None:
    """Count the turns that others get."""
    global ticks  # noqa: PLW0603
    while not over:
        time.sleep(0.02)
        ticks += 1


threading.Thread(target=tick, daemon=True).start()
shared = store()
found["deadline"] = timed(shared, 30)
found["others ran"] = ticks > 4
# Two connections for four: two wait their turn, and get it; who waits too long is told what to change.
found["turns"] = all_at_once(*[lambda: timed(shared, 0.15)] * 4)
with shared.connections.connection(), shared.connections.connection():
    found["too long"] = timed(shared, 0)
found["free again"] = all_at_once(*[lambda: timed(shared, 0)] * 3)

if KIND in ("gevent", "eventlet"):
    # A greenlet that is killed in the middle of a statement gives its slot back, and its connection to nobody.
    library: Any = importlib.import_module(KIND)
    victim = library.spawn(lambda: shared.rows("SLEEP", seconds=0.45))
    time.sleep(0.15)
    victim.kill()
    found["after a kill"] = all_at_once(*[lambda: timed(shared, 0.15)] * 2)

# A thread of the system: the same deadline, also while nobody here gives way.
answers: list[str] = []
own = store(natively=True)
native.start(lambda: answers.extend([timed(own, 0.1), timed(own, 30), timed(own, 0)]), "own")
until = time.monotonic() + 20
while len(answers) < 3 and time.monotonic() < until:
    pass
found["native"] = answers
over = True
print(json.dumps(found))
