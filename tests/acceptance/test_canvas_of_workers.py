"""Canvases of SafeTasks and plain ones on a real worker: what Celery's users know goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest
from celery import chain, chord, group
from celery.canvas import StampingVisitor
from celery.result import GroupResult

from celery_safe_effects.testing import eventually
from tests.support.canvases import (
    decide,
    module_broker,  # noqa: F401
    parked,
    ran,
    results,  # noqa: F401
    s,
    settled,
    site_conf,  # noqa: F401
)
from tests.support.site import Site

TIMEOUT = 30


class Parts:
    """Signatures of members and bodies; an immutable one where the name ends with `i`."""

    def __init__(self, site: Site) -> None:
        self.site = site

    def safe(self, *args: Any) -> Any:
        return s(self.site, "part", *args)

    def plain(self, *args: Any) -> Any:
        return s(self.site, "plain_part", *args)

    def safei(self, *args: Any) -> Any:
        return self.safe(*args).set(immutable=True)

    def plaini(self, *args: Any) -> Any:
        return self.plain(*args).set(immutable=True)

    @property
    def body(self) -> Any:
        return s(self.site, "collect")

    @property
    def plain_body(self) -> Any:
        return s(self.site, "plain_collect")

    def chunks(self, many: int, size: int) -> Any:
        return self.safe().type.chunks([(number,) for number in range(many)], size).group()


CANVASES: dict[str, tuple[Callable[[Parts], Any], Any]] = {
    "group": (lambda p: group(p.safe(1), p.plain(2), p.safe(3)), [1, 2, 3]),
    "group in a group": (lambda p: group(p.safe(1), group(p.plain(2), p.safe(3)), p.safe(4)), [1, 2, 3, 4]),
    "chain": (lambda p: chain(p.safe(1), p.plain(2), p.safe(3)), [[1, 2], 3]),
    "chain that begins plain": (lambda p: chain(p.plain(1), p.safe(2), p.plain(3)), [[1, 2], 3]),
    "chain of immutable steps": (lambda p: chain(p.safe(1), p.plaini(2), p.safei(3)), 3),
    "the operator": (lambda p: p.safe(1) | p.plain("x") | p.safe("y"), [[1, "x"], "y"]),
    "chord": (lambda p: chord([p.safe(1), p.plain(2), p.safe(3)], p.body), [1, 2, 3]),
    "chord with a plain body": (lambda p: chord([p.safe(1), p.plain(2)], p.plain_body), [1, 2]),
    "chord of plain members": (lambda p: chord([p.plain(1), p.plain(2)], p.body), [1, 2]),
    "chord with an immutable body": (lambda p: chord([p.safe(1), p.plain(2)], p.safei(5)), 5),
    "chord of one": (lambda p: chord([p.safe(1)], p.body), [1]),
    "group, task": (lambda p: group(p.safe(1), p.plain(2)) | p.body, [1, 2]),
    "task, group": (lambda p: p.safe(1) | group(p.safe("x"), p.plain("y")), [[1, "x"], [1, "y"]]),
    "task, group, task": (lambda p: p.safe(1) | group(p.safe("x"), p.plain("y")) | p.body, [[1, "x"], [1, "y"]]),
    "chord in a chain": (
        lambda p: chain(p.safe(1), chord([p.safe(2), p.plain(3)], p.body), p.plain("z")),
        [[[1, 2], [1, 3]], "z"],
    ),
    "chain in a chord": (lambda p: chord([chain(p.safe(1), p.plain("x")), p.plain(2)], p.body), [[1, "x"], 2]),
    "chord in a chord": (lambda p: chord([chord([p.safe(1), p.plain(2)], p.body), p.safe(3)], p.body), [[1, 2], 3]),
    "chord with a chain as its body": (lambda p: chord([p.safe(1), p.safe(2)], p.body | p.plain("z")), [[1, 2], "z"]),
    "chord with a group as its body": (
        lambda p: chord([p.safe(1), p.safe(2)], group(p.safe("x"), p.plain("y"))),
        [[[1, 2], "x"], [[1, 2], "y"]],
    ),
    "chord in a group": (lambda p: group(chord([p.safe(1), p.plain(2)], p.body), p.safe(3)), [[1, 2], 3]),
    "chunks": (lambda p: p.chunks(5, 2), [[0, 1], [2, 3], [4]]),
    "chunks, task": (lambda p: p.chunks(5, 2) | p.body, [[0, 1], [2, 3], [4]]),
    "map, task": (lambda p: p.safe().type.map([1, 2]) | p.safe("z"), [[1, 2], "z"]),
    "starmap": (lambda p: p.safe().type.starmap([(1, "x"), (2, "y")]), [[1, "x"], [2, "y"]]),
}


@pytest.mark.parametrize("name", CANVASES)
def test_a_canvas(site: Site, name: str) -> None:
    make, expected = CANVASES[name]
    assert make(Parts(site)).apply_async().get(timeout=TIMEOUT) == expected


@pytest.mark.parametrize("name", ["group", "chain", "chord", "chord in a chain", "chain in a chord", "chunks, task"])
def test_a_canvas_of_one_name_is_one(site: Site, name: str) -> None:
    make, expected = CANVASES[name]
    key, tenant = str(uuid4()), "acme"
    first = make(Parts(site)).apply_async(idempotency_key=key, tenant=tenant)
    assert first.get(timeout=TIMEOUT) == expected
    query = "SELECT id, idempotency_key, tenant FROM jobs WHERE starts_with(idempotency_key, %s) ORDER BY id"
    jobs = site.sql(query, key)
    numbers = [row["idempotency_key"].removeprefix(f"{key}:") for row in jobs]
    assert all(part.isdigit() for number in numbers for part in number.split(":")), numbers
    assert {row["tenant"] for row in jobs} == {tenant}
    again = make(Parts(site)).apply_async(idempotency_key=key, tenant=tenant)
    assert again.as_tuple() == first.as_tuple()
    assert again.get(timeout=TIMEOUT) == expected
    site.ends(site.send("pure"))
    assert site.sql(query, key) == jobs


def test_a_group_is_saved_and_found_again(site: Site) -> None:
    result = group(s(site, "part", 1), s(site, "plain_part", 2)).apply_async()
    result.save()
    found = GroupResult.restore(result.id, app=site.app)
    assert [one.id for one in found] == [one.id for one in result]
    eventually(found.ready, TIMEOUT, message="all have ended")
    assert [one.get(timeout=TIMEOUT) for one in found] == [1, 2]
    assert (found.successful(), found.completed_count()) == (True, 2)


def test_results_know_their_parents_and_children(site: Site) -> None:
    parts = Parts(site)
    result = chain(parts.safe(1), parts.plain(2), parts.safe(3)).apply_async()
    assert result.get(timeout=TIMEOUT) == [[1, 2], 3]
    assert [result.parent.get(timeout=TIMEOUT), result.parent.parent.get(timeout=TIMEOUT)] == [[1, 2], 1]
    assert [one.id for one in result.parent.parent.children] == [result.parent.id]

    family = site.send("family", 3)
    assert family.get(timeout=TIMEOUT) == [family.id, None, family.id]
    children = [row["id"] for row in site.sql("SELECT id FROM jobs WHERE parent_id = %s", family.id)]
    assert sorted(one.id for one in family.children) == sorted(children)
    assert len(children) == 3
    assert [one.get(timeout=TIMEOUT) for one in family.children] == [0, 1, 2]
    assert len(list(family.collect())) == 4

    second = chain(s(site, "family", 0), s(site, "family", 0).set(immutable=True)).apply_async()
    first = second.parent.id
    assert second.get(timeout=TIMEOUT) == [second.id, first, first]


def test_callbacks(site: Site) -> None:
    name = str(uuid4())
    links = [
        s(site, "collect", named=name),
        s(site, "plain_collect", named=name),
        group(s(site, "collect", named=name), s(site, "plain_collect", named=name)),
        chain(s(site, "part", "x"), s(site, "collect", named=name)),
        s(site, "collect", "own", named=name).set(immutable=True),
    ]
    result = s(site, "part", 1).apply_async(link=links)
    expected = sorted([repr([name, 1])] * 4 + [repr([name, [1, "x"]]), repr([name, "own"])])
    eventually(lambda: len(ran(site, name)) >= 6, TIMEOUT, message="the callbacks ran")
    site.ends(site.send("pure"))
    assert sorted(ran(site, name)) == expected
    assert result.get(timeout=TIMEOUT) == 1


@pytest.mark.parametrize("task", ["part", "plain_part"])
def test_errbacks(site: Site, task: str) -> None:
    name = str(uuid4())
    errbacks = [s(site, errback, named=name) for errback in ("oops", "plain_oops")]
    result = chain(s(site, task, "bad"), s(site, "part", "x")).apply_async(link_error=errbacks)
    failed = result.parent
    eventually(lambda: len(ran(site, name)) >= 2, TIMEOUT, message="the errbacks ran")
    with pytest.raises(Exception, match="bad"):
        failed.get(timeout=TIMEOUT)
    with pytest.raises(Exception, match="bad"):
        result.get(timeout=TIMEOUT)
    site.ends(site.send("pure"))
    assert ran(site, name) == [repr([name, failed.id])] * 2


REPLACED = {
    "task": "own",
    "plain": "own",
    "chain": ["own", "after"],
    "group": ["own", "other"],
    "chord": ["own", "other"],
}


@pytest.mark.parametrize("by", REPLACED)
@pytest.mark.parametrize("then", ["alone", "in a chain", "in a group"])
def test_replace(site: Site, by: str, then: str) -> None:
    replaced = s(site, "replaced", by, "own")
    own = REPLACED[by]
    if then == "alone":
        result = replaced.apply_async()
        assert result.get(timeout=TIMEOUT) == own
    elif then == "in a chain":
        assert (replaced | s(site, "part", "z")).apply_async().get(timeout=TIMEOUT) == [own, "z"]
    else:
        found, second = group(replaced, s(site, "part", 2)).apply_async().get(timeout=TIMEOUT)
        # Before 5.7, Celery gives a group that takes a member's place one index.
        assert (sorted(found), second) == (sorted(own), 2) if by == "group" else (found, second) == (own, 2)


def test_replaced_task_nesting(site: Site) -> None:
    result = site.send("nesting", 3)
    assert result.get(timeout=TIMEOUT) == 3
    assert site.ends(result)["attempts"] == 1


class Stamping(StampingVisitor):
    def on_signature(self, sig: Any, **headers: Any) -> dict[str, Any]:
        return {"order": "o-1", "stamped_headers": ["order"]}


@pytest.mark.parametrize("shape", ["task", "group", "chain", "chord"])
def test_stamps(site: Site, shape: str) -> None:
    def one() -> Any:
        return s(site, "stamps")

    canvas, expected = {
        "task": (one(), {"order": "o-1"}),
        "group": (group(one(), one()), [{"order": "o-1"}] * 2),
        "chain": (chain(s(site, "plain_part", 1), one()), {"order": "o-1"}),
        "chord": (chord([one(), s(site, "plain_part", 1)], one()), {"order": "o-1"}),
    }[shape]
    canvas.stamp(Stamping())
    found = canvas.apply_async().get(timeout=TIMEOUT)
    assert found == expected


def test_stamps_survive_a_republication(site: Site) -> None:
    name = str(uuid4())
    site.provider.control(kind="charge_plain", times=1, drop_reply=True)
    signature = s(site, "stamped_charge", name).set(task_id=str(uuid4()))
    signature.stamp(order="o-2")
    result = signature.apply_async()
    decide(site, signature)
    assert result.get(timeout=TIMEOUT) == {"order": "o-2"}
    assert site.ends(result)["attempts"] == 2


@pytest.mark.parametrize("how", ["map", "starmap", "chunks"])
def test_items_with_effects(site: Site, how: str) -> None:
    name = str(uuid4())
    task = s(site, "item").type
    if how == "map":
        sent = [task.map([name]).apply_async()]
        expected, steps = {f"{name}:0"}, [["0.1"]]
    elif how == "starmap":
        sent = [task.starmap([(name, 0), (name, 1)]).apply_async()]
        expected, steps = {f"{name}:0", f"{name}:1"}, [["0.1", "1.1"]]
    else:
        sent = list(task.chunks([(name, 0), (name, 1), (name, 2)], 2).group().apply_async())
        expected, steps = {f"{name}:{n}" for n in range(3)}, [["0.1", "1.1"], ["0.1"]]
    for result, wanted in zip(sent, steps, strict=True):
        row = site.ends(result)
        assert row["task"] == "tests.item.map"
        found = site.sql("SELECT step FROM operations WHERE job_id = %s ORDER BY step", result.id)
        assert [one["step"] for one in found] == wanted
    refunds = [row["body"]["argument"] for row in site.provider.ledger(kind="refund")]
    assert sorted(one for one in refunds if one.startswith(name)) == sorted(expected)


def test_a_chain_behind_a_parked_job(site: Site) -> None:
    """It goes on after the verdict, once."""
    name = str(uuid4())
    waiting = parked(site, name)
    result = chain(waiting, s(site, "collect", named=name)).apply_async()
    ref = decide(site, waiting)
    assert result.get(timeout=TIMEOUT) == ref
    settled(site, result, result.parent)
    assert ran(site, name) == [repr([name, ref])]
