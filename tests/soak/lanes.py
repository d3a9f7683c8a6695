"""What goes wrong: a lane for each thing that can break, each with its own deck of faults, drawn by a seed.

A lane does one thing at a time and mends what it broke before it breaks again; lanes know nothing of each other, so
that anything may coincide. A fault comes again only when all others of its lane have come.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from celery_safe_effects.testing import BeatProcess, EmbeddedPostgres, LocalServer, TcpProxy, WorkerProcess
from celery_safe_effects.testing.process import find_faketime
from tests.soak.names import LAG, LEASE

if TYPE_CHECKING:
    from tests.soak.world import Site

SKEWS: Final = (-7200.0, -30.0, 30.0, 7200.0)
"""Seconds by which a worker's clock is wrong."""


@dataclass
class Event:
    """Something that went wrong, and how long; times are seconds since the soak began."""

    lane: str
    what: str
    began: float
    ended: float | None = None
    error: str | None = None


def never(events: Iterable[Event]) -> list[str]:
    """Faults that were tried more than once and never worked: nobody saw what they break."""
    errors: dict[tuple[str, str], list[str | None]] = {}
    for event in events:
        errors.setdefault((event.lane, event.what), []).append(event.error)
    return [
        f"{lane}: {what}: {told[-1]}" for (lane, what), told in sorted(errors.items()) if all(told) and len(told) > 1
    ]


@dataclass
class Lane:
    """One thing that breaks.

    Arguments:
        name: what.
        faults: how it breaks, each as a call that returns when it is mended.
        gap: seconds between two faults, the mean.
    """

    name: str
    faults: Mapping[str, Callable[[random.Random], None]]
    gap: float
    events: list[Event] = field(default_factory=list)

    def run(self, seed: str, began: float, over: threading.Event) -> None:
        """Break and mend until it is over."""
        chance = random.Random(f"{seed}:{self.name}")
        deck: list[str] = []
        while not over.wait(min(chance.expovariate(1 / self.gap), 4 * self.gap)):
            if not deck:
                deck = sorted(self.faults)
                chance.shuffle(deck)
            event = Event(self.name, deck.pop(), time.monotonic() - began)
            self.events.append(event)
            try:
                self.faults[event.what](chance)
            except Exception as error:  # what cannot be broken or mended now is told, and the soak goes on
                event.error = f"{type(error).__name__}: {str(error)[-300:]}"
                deck.append(event.what)  # once more
            event.ended = time.monotonic() - began


def started(process: WorkerProcess | BeatProcess) -> None:
    """Start a process, however often it takes: what it needs may be away."""
    for last in [*[False] * 19, True]:
        process.kill()
        try:
            process.start()
            return
        except (AssertionError, RuntimeError):
            if last:
                raise
            time.sleep(1)


def worker_lane(site: Site, name: str, gap: float) -> Lane:
    """A worker: its children, its main process, both; its clock; and deploys with other settings."""

    def worker() -> WorkerProcess:
        return site.workers[name]

    def again(**changes: Any) -> None:
        worker().kill()
        started(site.renew(name, **changes))

    def killed(part: str) -> Callable[[random.Random], None]:
        def fault(_: random.Random) -> None:
            getattr(worker(), part)()
            again()

        return fault

    def pauses(part: Any) -> Callable[[random.Random], None]:
        def fault(chance: random.Random) -> None:
            try:
                worker().pause(part)
                time.sleep(chance.uniform(0.2, 3 * LEASE))
            finally:
                worker().resume(part)

        return fault

    def child(_: random.Random) -> None:
        worker().kill_child()

    def deploy(chance: random.Random) -> None:
        worker().stop(8)
        again(concurrency=chance.choice((1, 2)), acks_late=chance.random() < 0.5)

    def cold(_: random.Random) -> None:
        worker().quit()
        worker().stop(5)
        again()

    def impatient(chance: random.Random) -> None:
        worker().terminate()
        time.sleep(chance.uniform(0, 1))
        again()

    def skewed(chance: random.Random) -> None:
        worker().stop(8)
        again(clock_offset=chance.choice(SKEWS))
        time.sleep(chance.uniform(5, 15))
        again(clock_offset=None)

    faults: dict[str, Callable[[random.Random], None]] = {
        "child killed": child,
        "parent killed": killed("kill_parent"),
        "all killed": killed("kill"),
        "child paused": pauses("child"),
        "parent paused": pauses("parent"),
        "all paused": pauses("both"),
        "deploy": deploy,
        "cold stop": cold,
        "TERM then KILL": impatient,
    }
    if find_faketime() is not None:
        faults["clock wrong"] = skewed
    return Lane(f"{site.kind}: worker {name}", faults, gap)


def beat_lane(site: Site, gap: float) -> Lane:
    """Beat: nothing may depend on there being one."""
    beat = site.beat
    assert beat is not None

    def killed(chance: random.Random) -> None:
        beat.kill()
        time.sleep(chance.uniform(0, 10))
        started(beat)

    def paused(chance: random.Random) -> None:
        try:
            beat.pause()
            time.sleep(chance.uniform(1, 10))
        finally:
            beat.resume()

    return Lane(f"{site.kind}: beat", {"killed": killed, "paused": paused}, gap)


def broker_lane(site: Site, gap: float) -> Lane:
    """A broker, and the way to it."""
    server, proxy = site.broker, site.proxy

    def restarted(_: random.Random) -> None:
        server.kill()
        server.start()

    def forgets(_: random.Random) -> None:
        site.forget()

    return Lane(
        f"{site.kind}: broker",
        {"killed": restarted, "paused": paused(server, 0.5, 6), "everything lost": forgets, **wires(proxy)},
        gap,
    )


def database_lane(server: EmbeddedPostgres, gap: float) -> Lane:
    """PostgreSQL: crashes, restarts, connections that break, a machine that stands still."""

    def crashes(_: random.Random) -> None:
        server.restart("immediate")

    def restarts(_: random.Random) -> None:
        server.restart("fast")

    def cut(chance: random.Random) -> None:
        with server.connect() as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE application_name = 'celery-safe-effects' AND random() < %s",
                [chance.choice((0.2, 1.0))],
            )

    faults = {"crashed": crashes, "restarted": restarts, "connections cut": cut, "paused": paused(server, 0.5, 7)}
    return Lane("database", faults, gap)


def provider_lane(site: Site, gap: float) -> Lane:
    """The provider: answers that are lost, refusals, errors, slowness, silence."""
    # Most often all of them, or those without keys: only there does a second request show in the ledger.
    kinds: Final = (None, None, None, "charge", "charge", "charge_plain", "charge_keyed", "charge_both")

    def answers(**faults: Any) -> Callable[[random.Random], None]:
        def fault(chance: random.Random) -> None:
            site.provider.client.control(kind=chance.choice(kinds), times=chance.randint(3, 8), **faults)

        return fault

    def down(chance: random.Random) -> None:
        seconds = chance.uniform(0.5, 3)
        site.provider.client.control(down=seconds)
        time.sleep(seconds)

    def killed(chance: random.Random) -> None:
        site.provider.kill()
        time.sleep(chance.uniform(0, 2))
        site.provider.start()
        site.tell_provider()

    return Lane(
        f"{site.kind}: provider",
        {
            "replies lost": answers(drop_reply=True),
            "declines": answers(refuse=402),
            "errors after accepting": answers(status_after=500),
            "slow": answers(delay_after=1.0),
            "lookups fail": answers(lookup_status=503),
            "down": down,
            "killed": killed,
            # No longer than the effects' lag: what arrives later than that is nobody's promise.
            "paused": paused(site.provider, 0.2, LAG * 0.5),
        },
        gap,
    )


def paused(server: LocalServer, least: float, most: float) -> Callable[[random.Random], None]:
    """Make a fault: a server stands still."""

    def fault(chance: random.Random) -> None:
        server.pause()
        try:
            time.sleep(chance.uniform(least, most))
        finally:
            server.resume()

    return fault


def wires(proxy: TcpProxy) -> dict[str, Callable[[random.Random], None]]:
    """The faults of a wire."""

    def cut(_: random.Random) -> None:
        proxy.cut()

    def refused(chance: random.Random) -> None:
        proxy.refuse()
        time.sleep(chance.uniform(0.5, 5))
        proxy.resume()

    def swallowed(chance: random.Random) -> None:
        proxy.blackhole()
        time.sleep(chance.uniform(0.5, 5))
        proxy.resume()

    def slow(chance: random.Random) -> None:
        proxy.delay(0.05)
        time.sleep(chance.uniform(1, 5))
        proxy.resume()

    return {"connections cut": cut, "connections refused": refused, "wire swallows": swallowed, "wire slow": slow}
