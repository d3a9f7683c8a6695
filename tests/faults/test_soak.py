"""The short form of `python3 tests/soak`, and what its judge sees."""

from __future__ import annotations

import xml.etree.ElementTree
from pathlib import Path
from typing import Any

import pytest

from celery_safe_effects.testing import RabbitMQServer
from tests.soak import judge, names, report
from tests.soak.__main__ import soak
from tests.soak.lanes import Event, never
from tests.support.lab import Lab
from tests.support.loud import skip_loudly
from tests.support.services import Sql

SECONDS = 90.0
"""For each broker: the whole takes about twice as long, with what it needs to start and to end."""


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["redis", pytest.param("rabbitmq", marks=pytest.mark.rabbitmq)])
def test_a_short_soak(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if kind == "rabbitmq" and not RabbitMQServer.available():
        skip_loudly(request, "needs RabbitMQ: install rabbitmq-server")
    found = soak([kind], SECONDS, seed="1", folder=tmp_path, gap=4)
    assert {site: {promise: told for promise, told in of.items() if told} for site, of in found.items()} == {
        kind: {},
        "all": {},
    }
    assert len(found[kind]) == 7
    assert (tmp_path / "soak.json").stat().st_size > 1000


def test_the_judge_sees_what_is_broken(lab: Lab, sql: Sql) -> None:
    task = lab.task(lambda self: None, effects=[])
    a = lab.effect("a", lookup=True)
    good, waiting = lab.run(task), task.apply_async(countdown=3600).id
    lab.behaviour["a"] = ConnectionError("lost")
    parked = lab.run(lab.task(lambda self: a().ref, effects=[a]))
    assert lab.status(parked) == "unknown"

    assert judge.lost(sql, [good, "never"]) == ["never"]
    # What may be asked about is not parked rightly, once there was time to ask.
    assert {line.split()[0] for line in judge.ends(sql, 0)} == {waiting, parked}
    sql("UPDATE operation SET has_lookup = false")
    assert {line.split()[0] for line in judge.ends(sql, 0)} == {waiting}

    assert judge.metrics(sql, lab.safe.metrics()) == []
    sql("INSERT INTO tally (name, label) VALUES ('jobs_finished', 'failed')")
    assert [line.split(":")[0] for line in judge.metrics(sql, lab.safe.metrics())] == ["jobs_finished_total"]

    sql("CREATE TABLE public.orders (id text PRIMARY KEY)")
    sql("INSERT INTO public.orders VALUES ('x'), (%s)", good)
    assert judge.enlisted(sql, [waiting]) == [
        "an order without its job: x",
        f"a job whose transaction was rolled back: {waiting}",
    ]
    row = {"kind": "charge", "key": "k"}
    assert judge.twice([row, {**row, "key": "l"}, row]) == ["charge k: 2 times"]
    assert judge.transactions([]) == ["nobody looked"]
    looked: dict[str, Any] = {"kind": names.LOOKED, "body": {"queries": []}}
    assert judge.transactions([looked]) == []
    assert judge.transactions([looked, {"kind": names.OPEN, "body": {"queries": ["BEGIN"]}}]) == ["BEGIN"]


def test_a_fault_that_never_works_is_told() -> None:
    tried = [Event("beat", "killed", 1, 2, "not found"), Event("beat", "killed", 3, 4, "not found")]
    assert never(tried) == ["beat: killed: not found"]
    assert never([*tried, Event("beat", "killed", 5, 6)]) == []


def test_the_picture_is_one() -> None:
    events = [Event("database", "crashed", 1, 3), Event("redis: beat", "killed", 2, None, "no <port>")]
    samples = [{"at": n, "site": "redis", "queued": 3 - n, "succeeded": n} for n in range(4)]
    drawn = xml.etree.ElementTree.fromstring(report.picture(events, samples, 4))
    titles = [one.text for one in drawn.iter("{http://www.w3.org/2000/svg}title")]
    assert "killed, 2.0 s to 4.0 s: no <port>" in titles
    assert report.picture([], [], 1).startswith("<svg")
