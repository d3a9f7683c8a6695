"""Which messages are taken to be lost: judged by rows, what workers hold, and what the broker says of its queues."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from celery_safe_effects.engine.republish import Depth, Republisher
from celery_safe_effects.glue.held import Held, Report
from celery_safe_effects.store.hot import Row, Store
from tests.support.protocol import Protocol, make_store
from tests.support.services import Sql
from tests.support.shop import Shop

EVERY = 0.02
"""Seconds between two sweeps."""
REPUBLISH = 60.0


class Broker:
    """Queues that hold as many messages as the test says; what is published is seen and not counted."""

    def __init__(self) -> None:
        self.depths: dict[str, int | OSError | None] = {}
        self.low_first = False
        self.published: list[str] = []
        self.declared: list[str] = []

    def ask(self, queue: str) -> Depth:
        found = self.depths[queue]
        if isinstance(found, OSError):
            raise found
        return Depth(found, self.low_first)

    def deliver(self, rows: list[Row]) -> int:
        self.published += [row.id for row in rows]
        return len(rows)


class Lab:
    """The sweep's look at a broker, at a pace at which a test can wait for it."""

    def __init__(self, store: Store, sql: Sql) -> None:
        self.store = store
        self.sql = sql
        self.broker = Broker()
        self.counted: dict[str, int] = {}
        self.republisher = Republisher(
            store,
            store.config,
            ask=self.broker.ask,
            declare=self.broker.declared.append,
            deliver=self.broker.deliver,
            count=self._count,
        )
        self.hand = Protocol(store)

    def _count(self, name: str, label: str, by: int) -> None:
        assert name == "republished"
        self.counted[label] = self.counted.get(label, 0) + by

    def published(
        self, first: int, last: int, *, queue: str | None = "celery", priority: int = 0, ago: float = 300.0
    ) -> None:
        """Rows `<first>` to `<last>`, published one after the other; the first one `ago` seconds ago."""
        self.sql(
            "INSERT INTO job (id, task, args_digest, envelope, queue, priority, published_at, publishes)"
            " SELECT n::text, 't', 'digest', '', %s, %s,"
            "        clock_timestamp() - %s * interval '1 s' + (n - %s) * interval '1 ms', 1"
            "   FROM generate_series(%s::int, %s::int) n",
            queue,
            priority,
            ago,
            first,
            first,
            last,
        )

    def claim(self, first: int, last: int) -> None:
        """Jobs are claimed; they run."""
        for number in range(first, last + 1):
            assert self.hand.claim(str(number)) is not None

    def hold(self, first: int, last: int, *, stuck: bool = False) -> None:
        """A worker says that it holds these."""
        ids = [str(n) for n in range(first, last + 1)]
        self.store.rows("HELD", worker="w", believed=60.0, jobs=[] if stuck else ids, stuck=ids if stuck else [])

    def sweeps(self, times: int = 12) -> list[str]:
        """Several sweeps in a row; what was published again, in order."""
        before = len(self.broker.published)
        for _ in range(times):
            self.republisher.run()
            self.sql("SELECT pg_sleep(%s)", EVERY)
        return self.broker.published[before:]


def ids(first: int, last: int) -> list[str]:
    return [str(n) for n in range(first, last + 1)]


@pytest.fixture
def lab(database_url: str, sql: Sql) -> Iterator[Lab]:
    store = make_store(database_url, sweep_interval=EVERY, republish_after=REPUBLISH)
    yield Lab(store, sql)
    store.connections.close()


def test_a_long_queue_is_no_sign_of_loss(lab: Lab) -> None:
    lab.published(1, 2000)
    lab.broker.depths["celery"] = 2000 - 40
    lab.hold(1, 40)  # what left the queue is with a worker
    assert lab.sweeps() == []


def test_what_left_the_queue_and_is_nowhere_is_lost(lab: Lab) -> None:
    lab.published(1, 2000)
    lab.broker.depths["celery"] = 2000 - 45
    lab.hold(1, 40)
    # One look does not condemn: what was just taken from the queue has not been reported yet.
    lab.republisher.run()
    assert lab.broker.published == []
    assert lab.sweeps() == ids(41, 45)
    assert lab.counted == {"lost": 5}
    assert lab.sweeps() == []  # they are in the queue again, at its end


@pytest.mark.parametrize("by", ["commit", "sweep"])
def test_what_is_due_goes_out_as_it_was_accepted(
    shops: Callable[..., Shop], dsn: str, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """An update returns its rows in any order; here in the worst."""
    shop = shops()
    rows = shop.safe.store.rows

    def upside_down(statement: str, /, **params: Any) -> list[Row]:
        found = rows(statement, **params)
        return found[::-1] if statement == "DUE" else found

    monkeypatch.setattr(shop.safe.store, "rows", upside_down)
    with psycopg.connect(dsn) as connection:
        found = shop.safe.enqueue_many([shop.bill.s(n) for n in range(20)], transaction=connection)
    if by == "sweep":
        shop.safe.sweep()
    else:
        shop.safe.publisher.deliver_now(*(str(one.job_id) for one in found))
    assert [body[0] for _, body in shop.messages()] == [[n] for n in range(20)]


def test_a_broker_that_lost_everything(lab: Lab) -> None:
    lab.published(1, 1200)
    lab.broker.depths["celery"] = 1200
    assert lab.sweeps(3) == []
    lab.broker.depths["celery"] = 0
    assert sorted(lab.sweeps(), key=int) == ids(1, 1200)
    assert set(lab.broker.declared) == {"celery"}


def test_the_very_first_message_of_an_idle_system(lab: Lab) -> None:
    lab.published(1, 1, ago=2)
    lab.broker.depths["celery"] = 0
    assert lab.sweeps() == ["1"]


def test_a_message_that_is_on_its_way_is_not_lost(lab: Lab) -> None:
    """Its row is committed before it is published."""
    lab.published(1, 1, ago=0.0)
    lab.broker.depths["celery"] = 0
    assert lab.sweeps(6) == []


def test_one_lost_message_in_the_middle_of_a_backlog(lab: Lab) -> None:
    lab.published(1, 1000)
    lab.broker.depths["celery"] = 999
    assert lab.sweeps() in ([], ["1"])  # one too few, and the queue has not moved: the first is the suspect
    lab.claim(1, 499)
    lab.claim(501, 520)
    lab.broker.depths["celery"] = 480
    assert lab.sweeps() == ["500"]


def test_what_was_published_at_the_same_moment_is_not_behind(lab: Lab) -> None:
    lab.published(1, 100)
    lab.sql("UPDATE job SET published_at = (SELECT min(published_at) FROM job)")
    lab.broker.depths["celery"] = 99
    lab.claim(1, 50)
    assert lab.sweeps() == []
    lab.broker.depths["celery"] = 0
    assert sorted(lab.sweeps(), key=int) == ids(51, 100)


def test_it_is_found_in_a_queue_that_other_tasks_fill(lab: Lab) -> None:
    """The queue's length says nothing there; the jobs that were published later and run already do."""
    lab.published(1, 1000)
    lab.broker.depths["celery"] = 100_000
    assert lab.sweeps() == []
    lab.claim(1, 499)
    lab.claim(501, 520)
    assert lab.sweeps() == ["500"]
    assert lab.counted == {"lost": 1}


def test_finished_jobs_are_as_good_a_sign_as_running_ones(lab: Lab) -> None:
    lab.published(1, 30, ago=REPUBLISH / 2)
    lab.broker.depths["celery"] = None
    assert lab.sweeps(2) == []
    claimed = lab.hand.claim("20")
    assert claimed is not None
    lab.hand.leave(claimed, "succeeded")
    assert lab.sweeps() == ids(1, 19)


def test_a_claim_says_nothing_where_two_messages_may_have_led_to_it(lab: Lab) -> None:
    lab.published(1, 30)
    lab.broker.depths["celery"] = 100
    assert lab.sweeps(2) == []
    lab.sql("UPDATE job SET publishes = 2, published_at = clock_timestamp() WHERE id = '1'")
    lab.claim(1, 1)  # by its first message
    assert lab.sweeps() == []


def test_a_claim_out_of_another_queue_says_nothing(lab: Lab) -> None:
    lab.published(1, 30, queue="a")
    lab.published(31, 60, queue="b")
    lab.published(61, 90, queue="a", priority=3)
    lab.broker.depths = {"a": 60, "b": 30}
    lab.claim(60, 60)
    lab.claim(90, 90)
    lab.broker.depths = {"a": 59, "b": 29}
    lab.hold(31, 59)
    lab.sql("UPDATE held SET jobs = jobs || %s", ids(61, 89))
    assert lab.sweeps() == []


@pytest.mark.parametrize("low_first", [True, False], ids=["redis", "rabbitmq"])
def test_an_urgent_message_is_lost_among_patient_ones(lab: Lab, low_first: bool) -> None:
    """What the broker hands over first is gone first: not the oldest rows, the most urgent ones."""
    urgent, patient = (0, 9) if low_first else (9, 0)
    lab.broker.low_first = low_first
    lab.published(1, 500, priority=patient)
    lab.published(501, 510, priority=urgent, ago=30)
    lab.broker.depths["celery"] = 500
    assert lab.sweeps() == ids(501, 510)


def test_a_broker_that_cannot_be_asked_leaves_the_time(lab: Lab) -> None:
    lab.published(1, 3, ago=REPUBLISH - 5)
    lab.published(4, 6, queue=None, ago=REPUBLISH - 5)
    lab.broker.depths["celery"] = None
    assert lab.sweeps(3) == []
    lab.sql("UPDATE job SET published_at = published_at - interval '6 s'")
    assert sorted(lab.sweeps()) == ids(1, 6)
    assert lab.counted == {"unasked": 6}
    lab.sql("UPDATE job SET published_at = published_at - interval '61 s'")
    assert lab.sweeps(3) == []  # twice as long
    lab.sql("UPDATE job SET published_at = published_at - interval '61 s'")
    assert sorted(lab.sweeps(3)) == ids(1, 6)


def test_a_queue_that_nobody_consumes_is_not_flooded(lab: Lab) -> None:
    """One message in a while, longer each time, for the case that the queue's length is made up by others."""
    lab.published(1, 500)
    lab.broker.depths["celery"] = 500
    assert lab.sweeps(3) == []
    for wait in (1, 2, 4, 8, 16):
        lab.sql("UPDATE lane SET probed_at = probed_at - %s * interval '1 s'", wait * REPUBLISH)
        assert len(lab.sweeps(3)) == 1
        lab.sql("UPDATE lane SET probed_at = probed_at - %s * interval '1 s'", wait * REPUBLISH)
        assert lab.sweeps(3) == []
        lab.sql("UPDATE lane SET probed_at = probed_at + %s * interval '1 s'", wait * REPUBLISH)
    assert lab.counted == {"probe": 5}


def test_a_broker_that_is_down_is_asked_later(lab: Lab) -> None:
    lab.published(1, 5)
    lab.broker.depths["celery"] = OSError("down")
    assert lab.sweeps(5) == []
    lab.broker.depths["celery"] = 0
    assert lab.sweeps() == ids(1, 5)


def test_a_message_behind_a_long_job_goes_to_whoever_is_free(lab: Lab) -> None:
    lab.published(1, 3)
    lab.hold(1, 3, stuck=True)
    lab.broker.depths["celery"] = 50
    assert lab.sweeps() == []  # nobody is free: others wait already
    lab.broker.depths["celery"] = 0
    assert lab.sweeps() == ids(1, 3)
    assert lab.counted == {"stuck": 3}
    assert lab.sweeps() == []  # backs off
    lab.sql("UPDATE job SET published_at = published_at - %s * interval '1 s'", 2.1 * REPUBLISH)
    assert lab.sweeps() == ids(1, 3)


def test_a_worker_that_says_nothing_any_more_is_not_believed(lab: Lab) -> None:
    lab.published(1, 3)
    lab.broker.depths["celery"] = 0
    lab.hold(1, 3)
    assert lab.sweeps() == []
    lab.sql("UPDATE held SET until = clock_timestamp()")
    assert lab.sweeps() == ids(1, 3)


def test_it_backs_off_until_a_worker_starts(lab: Lab) -> None:
    """The message may have gone to a worker that does not know the task; the next one may."""
    lab.published(1, 1)
    lab.broker.depths["celery"] = 0
    seen = 0
    for _ in range(6):
        seen += len(lab.sweeps(5))
        lab.sql("UPDATE job SET published_at = published_at - interval '2 s'")
    assert seen > 3
    lab.sql("UPDATE job SET publishes = 12, published_at = clock_timestamp() - interval '2 s'")
    assert lab.sweeps() == []
    lab.store.row("MAINTENANCE_BEGIN", name="worker", by="w", idle_for=None)
    assert lab.sweeps() == ["1"]


def test_one_sweep_at_a_time_looks_at_a_queue(lab: Lab) -> None:
    lab.published(1, 3)
    lab.broker.depths["celery"] = 0
    turns = [lab.store.rows("LOOKS", every=60.0) for _ in range(3)]
    assert [[row.queue for row in turn] for turn in turns] == [["celery"], [], []]


def test_a_job_that_comes_back_is_published_at_once_and_its_old_place_forgotten(lab: Lab) -> None:
    lab.published(1, 50)
    lab.broker.depths["celery"] = 40
    lab.claim(1, 10)
    assert lab.sweeps(4) == []
    lab.sql("UPDATE job SET lease_until = clock_timestamp() - interval '1 s' WHERE id = '1'")
    lab.store.rows(
        "SWEEP_LEASES", limit=9, wish="again", reason="lease_expired", delay=0.0, max_delay=0.0, actor="sweep"
    )
    due: dict[str, Any] = {"ids": None, "limit": 9, "ahead": 0.0, "settle_tries": 8, "republish": REPUBLISH}
    assert [row.id for row in lab.store.rows("DUE", **due)] == ["1"]
    assert lab.store.rows("DUE", **due) == []
    lab.broker.depths["celery"] = 41
    assert lab.sweeps(4) == []


def test_a_worker_tells_what_it_holds(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Held(["a"], ["b"])
    monkeypatch.setattr("celery_safe_effects.glue.held.here", lambda stuck_after: found)
    report = Report(lab.store, "w", 1.0, 30.0)

    def told() -> list[dict[str, Any]]:
        return lab.sql("SELECT worker, jobs, stuck, until > clock_timestamp() + interval '2 s' AS believed FROM held")

    assert report.send() == 1.0
    assert told() == [{"worker": "w", "jobs": ["a"], "stuck": ["b"], "believed": True}]
    found = Held([], [])
    report.send()
    assert told() == [{"worker": "w", "jobs": [], "stuck": [], "believed": True}]
    lab.sql("UPDATE held SET until = clock_timestamp() - interval '2 hours'")
    report.send()  # nothing held, nothing said
    assert [row["believed"] for row in told()] == [False]
    found = Held(["c"] * 6000, [])
    assert Report(lab.store, "x", 1.0, 30.0).send() == 3.0
    assert [row["worker"] for row in told()] == ["x"]  # and who has been silent for long is forgotten
