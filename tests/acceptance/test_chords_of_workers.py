"""Chords on a real worker: the body runs once, also where the result backend has forgotten all about them."""

from __future__ import annotations

import ast
from typing import Any
from uuid import uuid4

import pytest
from celery import chain, chord, group

from celery_safe_effects.testing import eventually
from tests.support import canvas_tasks
from tests.support.canvases import (
    decide,
    forget,
    module_broker,  # noqa: F401
    over,
    parked,
    ran,
    results,  # noqa: F401
    s,
    settled,
    site_conf,  # noqa: F401
)
from tests.support.site import Site
from tests.support.tasks import create_app

BODIES = ["safe", "plain", "chain", "group", "chord"]


def a_body(site: Site, kind: str, name: str) -> Any:
    return {
        "safe": s(site, "collect", named=name),
        "plain": s(site, "plain_collect", named=name),
        "chain": chain(s(site, "part"), s(site, "plain_collect", named=name)),
        "group": group(s(site, "collect", named=name), s(site, "part")),
        "chord": chord([s(site, "part"), s(site, "plain_part")], s(site, "collect", named=name)),
    }[kind]


@pytest.mark.parametrize("kind", BODIES)
@pytest.mark.parametrize("forgets", [True, False], ids=["forgotten", "known"])
def test_a_parked_member(site: Site, kind: str, forgets: bool) -> None:
    """The body waits for the verdict, and runs once, with the results in the header's order."""
    name = str(uuid4())
    member = parked(site, name)
    header = [s(site, "part", 1), member, chain(s(site, "part", 2), s(site, "part", "x")), s(site, "part", 3)]
    result = chord(header, a_body(site, kind, name)).apply_async()
    waited_for = result
    while getattr(waited_for, "parent", None) is not None and len(getattr(waited_for, "results", [])) != 4:
        waited_for = waited_for.parent
    job = member.options["task_id"]
    site.ends(site.app.AsyncResult(job), "unknown")
    others = [one for one in waited_for.results if one.id != job]
    settled(site, *others)
    if forgets:
        forget(site)
    assert ran(site, name) == []
    expected = [1, decide(site, member), [2, "x"], 3]
    argument = eventually(lambda: ran(site, name), 30, message="the body ran")
    over(site, waited_for.id)
    inner = [expected, expected] if kind == "chord" else expected

    assert argument == ran(site, name) == [repr([name, inner])]


def test_a_verdict_after_the_results_have_expired(site: Site) -> None:
    """Celery's own `result_expires`: Redis forgets by itself, a database is told to."""
    name = str(uuid4())
    conf = {**site.conf, "result_expires": 2}
    app = create_app({**conf, "imports": []})
    canvas_tasks.add_tasks(app)
    site.provider.control(kind="charge_plain", times=1, drop_reply=True)
    with site.start("expires", conf={"result_expires": 2, "task_default_queue": "expires"}, queues=["expires"]):
        app.conf.task_default_queue = "expires"
        waiting = app.tasks["tests.charge_plain"].si(name, 5).set(task_id=str(uuid4()))
        part, body = app.tasks["tests.part"].s(1), app.tasks["tests.collect"].s(named=name)
        result = chord([part, waiting], body).apply_async()
        member = result.parent[0].id
        settled(site, member)
        site.ends(site.app.AsyncResult(waiting.options["task_id"]), "unknown")

        def expired() -> bool:
            app.backend.cleanup()
            return bool(app.AsyncResult(member).state == "PENDING")

        eventually(expired, 20, message="the result has expired")
        ref = decide(site, waiting)
        eventually(lambda: ran(site, name), 30, message="the body ran")
        eventually(lambda: not site.sql("SELECT id FROM chord WHERE id = %s", result.parent.id), 30)
        settled(site, result.id)
    assert ran(site, name) == [repr([name, [1, ref]])]
    app.__dict__["_safe_effects"].close()
    app.close()


FAILURES = ["fails", "is cancelled", "a step fails", "an inner chord fails"]


@pytest.mark.parametrize("how", FAILURES)
@pytest.mark.parametrize("forgets", [True, False], ids=["forgotten", "known"])
def test_a_member_without_success(site: Site, how: str, forgets: bool) -> None:
    """The body's errback is called once, and the body never runs."""
    name = str(uuid4())
    waiting = parked(site, name)
    header = {
        "fails": [s(site, "part", "bad"), waiting],
        "is cancelled": [s(site, "part", 1).set(countdown=600), waiting],
        "a step fails": [chain(s(site, "part", "bad"), s(site, "part", 1)), waiting],
        "an inner chord fails": [chord([s(site, "part", "bad"), s(site, "part", 1)], s(site, "part", 2)), waiting],
    }[how]
    body = s(site, "collect", named=name)
    errbacks = ["oops", "plain_oops"] if forgets else ["plain_oops"]
    for errback in errbacks:
        body.link_error(s(site, errback, named=name))
    result = chord(header, body).apply_async()
    site.ends(site.app.AsyncResult(waiting.options["task_id"]), "unknown")
    member = result.parent[0]
    if how == "is cancelled":
        site.safe.cancel(member.id, "not wanted")
        settled(site, member)
    elif how == "an inner chord fails":
        settled(site, *member.parent)
    else:
        settled(site, member.parent or member)
    if forgets:
        forget(site)
    assert ran(site, name) == []
    decide(site, waiting)
    over(site, result.parent.id)
    eventually(lambda: len(ran(site, name)) >= len(errbacks), 30, message="the errbacks ran")
    assert ran(site, name) == [repr([name, result.id])] * len(errbacks)
    assert result.state == "FAILURE"
    assert type(result.result).__name__ == "ChordError"
    assert not site.sql("SELECT id FROM jobs WHERE id = %s", result.id)


def test_a_chord_outlives_the_retention_of_its_members(site: Site) -> None:
    """What the body will get is not pruned."""
    name = str(uuid4())
    member = parked(site, name)
    result = chord([s(site, "part", 1), member], s(site, "collect", named=name)).apply_async()
    site.ends(result.parent[0])
    settled(site, result.parent[0])
    forget(site)
    pruned = site.send("pure", 1)
    site.ends(pruned)
    site.sql("ALTER TABLE job DISABLE TRIGGER USER")
    site.sql(
        "UPDATE job SET finished_at = finished_at - interval '90 days' WHERE id = ANY (%s)",
        [result.parent[0].id, pruned.id],
    )
    site.sql("ALTER TABLE job ENABLE TRIGGER USER")
    site.safe.prune()
    assert [
        row["id"] for row in site.sql("SELECT id FROM job WHERE id = ANY (%s)", [result.parent[0].id, pruned.id])
    ] == [result.parent[0].id]
    ref = decide(site, member)
    eventually(lambda: ran(site, name) == [repr([name, [1, ref]])], 30, message="the body ran")


@pytest.mark.parametrize("forgets", [True, False], ids=["forgotten", "known"])
@pytest.mark.parametrize("dies", ["", "sent", "counted"])
def test_a_member_that_adds_another(site: Site, dies: str, forgets: bool) -> None:
    """One more member, one more result, one body; where a result backend cannot do it, the member says so.

    Killed once it is counted, before that is written down, it is counted twice.
    """
    name = str(uuid4())
    waiting = parked(site, name)
    member = s(site, "adds", "own", "added", dies)
    result = chord([member, waiting], s(site, "collect", named=name)).apply_async()
    adder = result.parent[0]
    if site.conf["result_backend"].startswith("db+"):
        assert site.ends(adder, "failed")["last_error"].startswith("NotImplementedError")
        decide(site, waiting)
        over(site, result.parent.id)
        assert ran(site, name) == []
        return
    assert site.ends(adder)["attempts"] == (2 if dies else 1)
    (added,) = site.sql("SELECT id FROM jobs WHERE parent_id = %s", adder.id)
    settled(site, adder, added["id"])
    if forgets:
        forget(site)
    else:
        backend = site.app.backend
        assert int(backend.client.get(backend.get_key_for_group(result.parent.id, ".t"))) == (
            2 if dies == "counted" else 1
        )
    assert ran(site, name) == []
    ref = decide(site, waiting)
    over(site, result.parent.id)
    (argument,) = eventually(lambda: ran(site, name), 30, message="the body ran")
    given = argument.removeprefix(f"['{name}', ")
    assert all(repr(value) in given for value in ("own", "added", ref)), given
    assert given.count(",") == 2, given


REPLACEMENTS = ["task", "plain", "chain", "group", "chord"]
ALONE = ("plain", True)
"""A plain task's result is in the result backend alone."""


@pytest.mark.parametrize(
    ("by", "forgets"), [(by, forgets) for by in REPLACEMENTS for forgets in (False, True) if (by, forgets) != ALONE]
)
def test_a_member_that_something_takes_the_place_of(site: Site, by: str, forgets: bool) -> None:
    name = str(uuid4())
    waiting = parked(site, name)
    result = chord([s(site, "replaced", by, "own"), waiting], s(site, "collect", named=name)).apply_async()
    member = result.parent[0]
    eventually(lambda: site.app.AsyncResult(member.id).state == "SUCCESS", 30, message="the replacement ended")
    settled(site, member.id)
    if forgets:
        forget(site)
    ref = decide(site, waiting)
    own = {"task": "own", "plain": "own", "chain": ["own", "after"], "group": ["own", "other"]}.get(
        by, ["own", "other"]
    )
    over(site, result.parent.id)
    # Before 5.7, Celery gives a group that takes a member's place one index.
    either = [repr([name, [own, ref]]), repr([name, [own[::-1], ref]])] if by == "group" else [repr([name, [own, ref]])]
    eventually(lambda: ran(site, name) in [[one] for one in either], 30, message="the body ran")


ERRBACKS = ["explain", "plain_explain"]


@pytest.mark.parametrize("errback", ERRBACKS)
@pytest.mark.parametrize("of", ["task", "chord", "chain"])
def test_errbacks_that_get_all_that_celery_knows(site: Site, errback: str, of: str) -> None:
    """A SafeTask is a job, which is told the same as a plain one that Celery calls."""
    name = str(uuid4())
    last = s(site, errback, named=name)
    bad = s(site, "part", "bad")
    if of == "task":
        result = bad.apply_async(link_error=last)
        failed, task, text = result.id, "tests.part", "bad"
    elif of == "chain":
        result = chain(s(site, "part", "bad").on_error(last), s(site, "part", "x")).apply_async()
        failed, task, text = result.parent.id, "tests.part", "bad"
    else:
        body = s(site, "collect", named=name).on_error(last)
        result = chord([bad, s(site, "part", 1)], body).apply_async()
        failed, task, text = result.id, "", ""
        over(site, result.parent.id)
    (argument,) = eventually(lambda: ran(site, name), 30, message="the errback ran")
    said = ast.literal_eval(argument)
    assert said[:2] == [name, failed]
    assert said[2].startswith(task)
    assert (said[3], said[4].startswith(text)) == ("Bad" if of != "chord" else "ChordError", True), said
    told = [("succeeded",)] if errback == "explain" else []
    eventually(
        lambda: (
            told
            == [
                (row["status"],)
                for row in site.sql("SELECT status FROM jobs WHERE task = 'tests.explain' AND parent_id = %s", failed)
            ]
        ),
        message="the errback is one job, or none",
    )
