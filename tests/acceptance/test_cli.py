"""The command line: what it shows, what it changes, how it ends."""

from __future__ import annotations

import contextlib
import importlib.metadata
import inspect
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from uuid import uuid4

import psycopg
import pytest
from celery import Celery
from celery.bin.base import CLIContext
from click.testing import CliRunner
from psycopg.rows import dict_row

from celery_safe_effects import (
    Happened,
    NotHappened,
    Operation,
    Outcome,
    SafeEffects,
    SafeTask,
    Unresolved,
    effect,
)
from celery_safe_effects.cli import looking, output, safe_effects
from celery_safe_effects.states import JobStatus, OperationStatus
from tests.support.services import PostgresServer, Sql

ROOT = Path(__file__).resolve().parents[2]
CONF = {
    "broker_url": "memory://",
    "result_backend": "cache+memory://",
    "safe_effects_sweep_interval": 5,
    "safe_effects_reconcile_interval": 1,
}


class Declined(Exception):
    """The provider said no."""


class Lost(Exception):
    """The answer was lost."""


@effect(name="cli.pay", refused_on=(Declined,), deadline=30)
def pay(op: Operation, what: str) -> Outcome[Any]:
    if what.startswith("lost"):
        raise Lost(f"no answer about {op.key}")
    if what == "declined":
        raise Declined("the card is expired")
    return Outcome(ref=f"pay_{what}", result={"what": what})


@pay.lookup
def find_pay(op: Operation) -> Happened | NotHappened | Unresolved:
    what = op.arguments["what"]
    return Happened("pay_found", {"what": what}) if what == "lost" else Unresolved("the provider is closed")


class Result(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Standard output as the one JSON document that it is."""
        return json.loads(self.out)


class Shop:
    """An application, jobs in every state, and its command line, all in this process."""

    def __init__(self, conf: Mapping[str, Any]) -> None:
        self.app = Celery("shop", set_as_current=False)
        self.app.conf.update(conf)
        self.safe = SafeEffects(self.app)

        @self.app.task(base=SafeTask, shared=False, name="shop.buy", effects=[pay])
        def buy(what: str) -> Any:
            return pay(what).ref

        @self.app.task(base=SafeTask, shared=False, name="shop.think", effects=[])
        def think(value: Any) -> Any:
            if value == "fail":
                raise ValueError("cannot think \x1b[31mred")
            return value

    def queued(self, name: str, value: str, **options: Any) -> str:
        """Enqueue a job."""
        return str(self.app.tasks[name].apply_async((value,), **options).id)

    def ran(self, name: str, value: str, **options: Any) -> str:
        """Enqueue a job and run it, as a worker's child would."""
        job = self.queued(name, value, **options)
        self.app.tasks[name].apply((value,), task_id=job)
        return job

    def claimed(self, ttl: float) -> str:
        """Enqueue a job and claim it for a worker that does nothing."""
        job = self.queued("shop.think", "slowly")
        claim = {
            "token": uuid4(),
            "owner": "worker@here/1/1",
            "ttl": ttl,
            "generation": 0,
            "digest": None,
            "task": None,
            "seq": None,
            "tenant": None,
            "limits": None,
        }
        (row,) = self.safe.store.rows("CLAIM", id=job, **claim)
        assert row.status == JobStatus.RUNNING
        return job

    def __call__(self, *args: str, columns: int = 80) -> Result:
        """Run `safe-effects ARGS`."""
        # click 8.2 always keeps the two streams apart.
        mixes = "mix_stderr" in inspect.signature(CliRunner).parameters
        options: dict[str, Any] = {"mix_stderr": False} if mixes else {}
        runner = CliRunner(env={"COLUMNS": str(columns)}, **options)
        context = CLIContext(app=self.app, no_color=True, workdir=None)
        done = runner.invoke(safe_effects, list(args), obj=context, catch_exceptions=False)
        assert "Traceback" not in done.stderr
        return Result(done.exit_code, done.stdout, done.stderr)


def status(cli: Shop, job: str) -> str:
    return cli.safe.job(job).status


@pytest.fixture(scope="module")
def shared_url(postgres_server: PostgresServer) -> Iterator[str]:
    """One database for this module, where each test has a schema of its own: that is cheap."""
    name = f"test_cli_{uuid4().hex[:12]}"
    yield postgres_server.create_database(name)
    postgres_server.drop_database(name)


@pytest.fixture
def place(shared_url: str, database_server: PostgresServer) -> dict[str, Any]:
    """The settings that name the test's database and schema; the schema does not exist yet."""
    return {"safe_effects_database_url": shared_url, "safe_effects_schema": f"cli_{uuid4().hex[:12]}"}


@pytest.fixture
def make_cli() -> Iterator[Callable[..., Shop]]:
    made: list[Shop] = []

    def make(**conf: Any) -> Shop:
        made.append(Shop({**CONF, **conf}))
        return made[-1]

    yield make
    for shop in made:
        if shop.app.conf.get("safe_effects_database_url"):
            shop.safe.close()
        shop.app.close()


@pytest.fixture
def cli(make_cli: Callable[..., Shop], place: dict[str, Any]) -> Shop:
    made = make_cli(**place)
    made.safe.upgrade()
    return made


@pytest.fixture
def sql(place: dict[str, Any]) -> Iterator[Sql]:
    """Queries on the test's schema."""
    url = place["safe_effects_database_url"].replace("+psycopg", "", 1)
    with psycopg.connect(url, autocommit=True, row_factory=dict_row) as connection:
        connection.execute(f"SET search_path = {place['safe_effects_schema']}".encode())

        def run(query: str, *params: Any) -> list[dict[str, Any]]:
            cursor = connection.execute(query.encode(), params or None)
            return cursor.fetchall() if cursor.description else []

        yield run


# -- looking -------------------------------------------------------------------------------------------------------


def test_jobs_are_listed_newest_first_and_filtered(cli: Shop) -> None:
    done = cli.ran("shop.think", "a", tenant="acme")
    failed = cli.ran("shop.think", "fail")
    parked = cli.ran("shop.buy", "lost")
    queued = cli.queued("shop.buy", "b")
    found = cli("jobs", "--json").json
    assert [job["id"] for job in found["jobs"]] == [queued, parked, failed, done]
    assert [job["status"] for job in found["jobs"]] == ["queued", "unknown", "failed", "succeeded"]
    assert found["more"] is False
    assert datetime.fromisoformat(found["jobs"][0]["created_at"]).utcoffset() is not None
    for filters, wanted in (
        (("--status", "unknown"), [parked]),
        (("--tenant", "acme"), [done]),
        (("--task", "shop.buy"), [queued, parked]),
        (("--task", "shop.buy", "--status", "queued"), [queued]),
        (("--tenant", "nobody"), []),
        (("--limit", "1"), [queued]),
    ):
        assert [job["id"] for job in cli("jobs", *filters, "--json").json["jobs"]] == wanted
    text = cli("jobs", "--limit", "3")
    assert [text.code, text.err] == [0, ""]
    assert queued in text.out
    assert done not in text.out
    assert "--limit" in text.out
    assert cli("jobs", "--tenant", "nobody") == Result(0, "no jobs\n", "")


def test_a_search_looks_so_far_and_says_so(cli: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each status the newest few; but parked jobs all, and a tenant's queued ones behind the many of others."""
    monkeypatch.setattr("celery_safe_effects.app.LOOKED", 2)
    parked = cli.ran("shop.buy", "lost", tenant="acme")
    waits = cli.queued("shop.think", "a", tenant="acme")
    ended = cli.ran("shop.think", "a", tenant="acme")
    for _ in range(3):
        cli.ran("shop.buy", "lost", tenant="big")
        cli.queued("shop.think", "b", tenant="big")
        cli.ran("shop.think", "b", tenant="big")

    def jobs(*options: str) -> tuple[list[str], bool, int | None]:
        found = cli("jobs", *options, "--json").json
        return [row["id"] for row in found["jobs"]], found["more"], found["searched"]

    one, acme = ("--limit", "1"), ("--tenant", "acme")
    assert jobs(*acme, *one) == ([waits], True, None)
    assert jobs(*acme, *one, "--status", "queued") == ([waits], False, 2)
    assert jobs(*acme, *one, "--status", "unknown") == ([parked], False, None)
    assert jobs(*acme, *one, "--status", "succeeded") == ([], False, 2)
    assert "searched: the newest 2 of each status" in cli("jobs", *acme, *one, "--status", "succeeded").out
    assert jobs(*acme) == ([ended, waits, parked], False, None)
    # Nobody asked for a tenant: the newest are the newest, however far back.
    assert jobs(*one, "--status", "succeeded")[1:] == (True, None)
    assert len(jobs()[0]) == 12
    assert [row.job_id for row in cli.safe.operations(status="unknown", tenant="acme")] == [parked]
    assert len(cli.safe.operations(status="unknown")) == 4
    assert len(cli.safe.operations()) == 4


@pytest.mark.parametrize("columns", [40, 80, 132])
def test_tables_fit_the_terminal_and_recorded_words_do_not_move_its_cursor(cli: Shop, columns: int) -> None:
    cli.ran("shop.think", "fail", tenant="料金" * 30)
    job = cli.ran("shop.buy", "lost" + "x" * 300)
    for args in (("jobs",), ("operations",), ("show", job), ("log", job), ("status",)):
        text = cli(*args, columns=columns)
        assert max(map(output.width, text.out.splitlines())) <= columns, args
        assert "\x1b" not in text.out


def test_a_wrong_status_is_wrong_usage_that_lists_the_right_ones(cli: Shop) -> None:
    for args, states in ((("jobs",), JobStatus), (("operations",), OperationStatus)):
        found = cli(*args, "--status", "nope")
        assert found.code == 2
        assert all(f"'{s.value}'" in found.err for s in states)
        assert all(cli(*args, "--status", s.value).code == 0 for s in states)


def test_operations_are_listed_and_filtered(cli: Shop) -> None:
    paid, lost = cli.ran("shop.buy", "book"), cli.ran("shop.buy", "lost")
    cli.ran("shop.buy", "declined")
    found = cli("operations", "--json").json["operations"]
    assert [o["status"] for o in found] == ["outcome_confirmed", "unknown", "refused"]
    assert [o["key"] for o in cli("operations", "--status", "unknown", "--json").json["operations"]] == [f"{lost}:1"]
    (row,) = cli("operations", "--job", paid, "--json").json["operations"]
    assert (row["provider_ref"], row["result"], row["args"]) == ("pay_book", {"what": "book"}, {"what": "book"})
    assert f"{lost}:1" in cli("operations").out
    assert cli("operations", "--job", "nobody").code == 1


def test_show_tells_what_a_parked_job_waits_for(cli: Shop) -> None:
    job = cli.ran("shop.buy", "lost", idempotency_key="order-1")
    found = cli("show", job, "--json").json
    assert found["job"]["idempotency_key"] == "order-1"
    assert [o["key"] for o in found["operations"]] == [f"{job}:1"]
    assert [t["to_status"] for t in found["transitions"]][:3] == ["queued", "leased", "running"]
    assert found["transitions_total"] == len(found["transitions"])
    assert f"resolve '{job}:1'" in found["waits_for"][0]
    text = cli("show", job, columns=200).out
    for words in (job, "order-1", "unknown (outcome_unknown)", "intent_recorded", f"resolve '{job}:1'", "pay"):
        assert words in text
    done = cli.ran("shop.buy", "book")
    assert "waits for" not in cli("show", done).out
    assert cli("show", done, "--json").json["job"]["outcome_ref"] == "pay_book"


def test_log_is_a_time_line(cli: Shop) -> None:
    job = cli.ran("shop.buy", "book")
    found = cli("log", job, "--json").json
    steps = [(t["operation_key"], t["to_status"]) for t in found["transitions"]]
    assert steps == [
        (None, "queued"),
        (None, "leased"),
        (None, "running"),
        (f"{job}:1", "intent_recorded"),
        (f"{job}:1", "outcome_confirmed"),
        (None, "succeeded"),
    ]
    assert found["status"] == "succeeded"
    day, *lines = cli("log", job).out.splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \(UTC\)", day)
    assert len(lines) == len(steps)
    assert re.match(r"\d\d:\d\d:\d\d\.\d{3} +\+0\.000s  job +→ queued", lines[0])
    assert "step 1" in lines[3]
    assert "intent_recorded → outcome_confirmed" in cli("log", job, columns=140).out


def test_log_follows_a_parked_job_until_it_ends(cli: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    job = cli.ran("shop.buy", "lost")
    polls: list[float] = []

    def happens_meanwhile(seconds: float) -> None:
        polls.append(seconds)
        if len(polls) == 2:
            cli.safe.resolve(f"{job}:1", Happened("pay_1"), "ann", "seen")
        elif len(polls) == 3:
            cli.app.tasks["shop.buy"].apply(("lost",), task_id=job)
        assert len(polls) < 10

    monkeypatch.setattr(looking, "time", SimpleNamespace(sleep=happens_meanwhile, monotonic=lambda: 0.0))
    found = cli("log", job, "--follow", "--json")
    assert found.code == 0
    rows = [json.loads(line) for line in found.out.splitlines()]
    assert len({row["id"] for row in rows}) == len(rows)
    assert rows == cli("log", job, "--json").json["transitions"]
    assert [row["to_status"] for row in rows][-1] == "succeeded"
    assert found.err.count("parked") == 1
    assert cli("log", job, "--follow").out == cli("log", job).out


def test_log_gives_up_at_its_timeout(cli: Shop) -> None:
    job = cli.queued("shop.think", "a")
    found = cli("log", job, "--follow", "--timeout", "0.1")
    assert found.code == 1
    assert "queued" in found.out
    assert f"job {job} is queued still" in found.err
    assert cli("log", job, "--timeout", "1").code == 2


@pytest.mark.parametrize("args", [("show",), ("log",), ("log", "--follow"), ("republish",)])
def test_a_job_that_does_not_exist(cli: Shop, args: tuple[str, ...]) -> None:
    found = cli(*args, "nobody")
    assert found == Result(1, "", "error: [not_found] there is no job 'nobody'\n")
    found = cli(*args, "nobody", "--json")
    assert (found.code, found.err) == (1, "")
    assert found.json == {"error": {"code": "not_found", "message": "there is no job 'nobody'"}}


# -- status --------------------------------------------------------------------------------------------------------


def test_status_counts_and_is_healthy_where_somebody_sweeps(cli: Shop) -> None:
    assert cli("status").code == 0
    cli.queued("shop.think", "a")
    cli.queued("shop.think", "later", countdown=3600)
    cli.ran("shop.buy", "lost-closed")
    cli.ran("shop.buy", "book")
    unswept = cli("status", "--json")
    assert unswept.code == 1
    assert [p["code"] for p in unswept.json["problems"]] == ["sweep_stale"]
    assert "sweep_stale" in cli("status").out
    assert cli("sweep").code == 0
    assert cli("reconcile").code == 0
    found = cli("status", "--json")
    assert found.code == 0
    document = found.json
    assert document["healthy"] is True
    assert document["jobs"] == {
        **dict.fromkeys([s.value for s in JobStatus], 0),
        "queued": 2,
        "unknown": 1,
        "succeeded": 1,
    }
    wanted = {**dict.fromkeys([s.value for s in OperationStatus], 0), "unknown": 1, "outcome_confirmed": 1}
    assert document["operations"] == wanted
    assert 0 <= document["oldest_queued_s"] < 60
    assert 0 <= document["oldest_unknown_s"] < 60
    assert document["sweep"]["age_s"] < 60
    assert document["reconcile"]["runs"] == 1
    assert document["schema"] == {"name": cli.safe.config.schema, "version": 1}
    assert document["double_effects"] == 0
    text = cli("status").out
    assert text.startswith("healthy\n")
    assert "2 queued" in text
    assert "by operator:sweep" in text


def test_status_is_unhealthy_when_sweeps_stop_and_when_an_effect_happened_twice(cli: Shop, sql: Sql) -> None:
    cli("sweep")
    job = cli.ran("shop.buy", "book")
    sql("UPDATE maintenance SET last_finished_at = clock_timestamp() - interval '31 seconds'")
    assert cli("status").code == 0, "nothing waits for a sweep"
    cli.queued("shop.think", "a")
    found = cli("status")
    assert found.code == 1
    assert re.search(r"the last sweep finished 3\ds ago", " ".join(found.out.split()))
    cli("sweep")
    assert cli("status").code == 0
    sql("UPDATE operation SET double_at = clock_timestamp() WHERE job_id = %s", job)
    document = cli("status", "--json")
    assert document.code == 1
    assert [p["code"] for p in document.json["problems"]] == ["double_effect"]
    assert document.json["double_effect_keys"] == [f"{job}:1"]


# -- acting --------------------------------------------------------------------------------------------------------


def test_resolve_happened(cli: Shop) -> None:
    job = cli.ran("shop.buy", "lost")
    key = f"{job}:1"
    verdict = ("--happened", "--ref", "pay_9", "--result", '{"n": 1}')
    found = cli("resolve", key, *verdict, "--reason", "seen in the dashboard", "--actor", "ann")
    assert (found.code, found.err) == (0, "")
    before, _, after = found.out.partition("done: ")
    for words in (key, "unknown", "pay_9", '{"n": 1}', "ann", "seen in the dashboard"):
        assert words in before
    assert "outcome_confirmed" in after
    row = cli.safe.operation(key)
    assert (row.status, row.provider_ref, row.result) == ("outcome_confirmed", "pay_9", {"n": 1})
    assert row.resolved_by == "operator:ann"
    assert status(cli, job) == "queued"
    assert cli("log", job, "--json").json["transitions"][-2]["reason"] == "seen in the dashboard"
    again = cli("resolve", key, "--not-happened", "--reason", "no", "--json")
    assert (again.code, again.json["error"]["code"]) == (1, "not_allowed")


def test_resolve_not_happened_and_refused(cli: Shop) -> None:
    one, two = cli.ran("shop.buy", "lost"), cli.ran("shop.buy", "lost")
    found = cli("resolve", f"{one}:1", "--not-happened", "--reason", "asked by phone", "--json")
    assert found.code == 0
    assert found.json["operation"]["status"] == "not_happened"
    assert found.json["job"]["status"] == "queued"
    assert found.json["actor"]
    assert cli("resolve", f"{two}:1", "--refused", "card expired", "--reason", "their mail").code == 0
    assert cli.safe.operation(f"{two}:1").status == "refused"


@pytest.mark.parametrize(
    "args",
    [
        ("--happened", "--ref", "r"),
        ("--happened", "--ref", "r", "--reason", ""),
        ("--happened", "--ref", "r", "--reason", "  "),
        ("--happened", "--reason", "x"),
        ("--happened", "--ref", "", "--reason", "x"),
        ("--happened", "--ref", "r", "--result", "{", "--reason", "x"),
        ("--happened", "--not-happened", "--ref", "r", "--reason", "x"),
        ("--not-happened", "--ref", "r", "--reason", "x"),
        ("--not-happened", "--result", "1", "--reason", "x"),
        ("--not-happened", "--refused", "no", "--reason", "x"),
        ("--refused", " ", "--reason", "x"),
        ("--not-happened", "--reason", "x", "--actor", " "),
        ("--reason", "x"),
    ],
)
def test_a_verdict_without_all_its_parts_is_wrong_usage(make_cli: Callable[..., Shop], args: tuple[str, ...]) -> None:
    # Nobody is asked: there is no such database.
    found = make_cli(safe_effects_database_url="postgresql://127.0.0.1:1/none")("resolve", "job:1", *args)
    assert found.code == 2
    assert found.out == ""
    assert "Usage:" in found.err


def test_resolve_several(cli: Shop) -> None:
    """Shown first; done with --yes; of one effect, one tenant, or of some age."""
    lost = [cli.ran("shop.buy", "lost", tenant=tenant) for tenant in ("acme", "acme", "other")]
    keys = [f"{job}:1" for job in lost]
    said = ("--not-happened", "--reason", "the bank was closed", "--actor", "ann")
    shown = cli("resolve", "--effect", "cli.pay", "--tenant", "acme", *said, columns=120)
    assert (shown.code, shown.err) == (0, "")
    for words in (*keys[:2], "it did not happen", "the bank was closed", "--yes resolves these 2 operations"):
        assert words in shown.out
    assert keys[2] not in shown.out
    assert {status(cli, job) for job in lost} == {"unknown"}
    assert "no such operation" in cli("resolve", "--older-than", "3600", *said).out
    assert cli("resolve", "--effect", "nobody's", *said, "--json").json["found"] == 0

    done = cli("resolve", "--tenant", "acme", *said, "--yes", "--json")
    assert (done.code, done.json["resolved"], done.json["missed"], done.json["keys"]) == (0, 2, [], keys[:2])
    assert [cli.safe.operation(key).resolved_by for key in keys] == ["operator:ann", "operator:ann", None]
    assert [status(cli, job) for job in lost] == ["queued", "queued", "unknown"]
    last = cli("resolve", "--older-than", "0", "--refused", "no", "--reason", "their mail", "--yes")
    assert (last.code, "1 operation resolved" in last.out, status(cli, lost[2])) == (0, True, "queued")


@pytest.mark.parametrize(
    "args",
    [
        ("--not-happened", "--reason", "x"),
        ("job:1", "--effect", "e", "--not-happened", "--reason", "x"),
        ("job:1", "--yes", "--not-happened", "--reason", "x"),
        ("--effect", "e", "--happened", "--ref", "r", "--reason", "x"),
        ("--effect", "e", "--not-happened"),
        ("--older-than", "-1", "--not-happened", "--reason", "x"),
    ],
)
def test_what_resolve_cannot_mean(make_cli: Callable[..., Shop], args: tuple[str, ...]) -> None:
    found = make_cli(safe_effects_database_url="postgresql://127.0.0.1:1/none")("resolve", *args)
    assert (found.code, found.out) == (2, "")


def test_retry_with_a_new_key(cli: Shop) -> None:
    job = cli.ran("shop.buy", "declined")
    assert cli.safe.operation(f"{job}:1").status == "refused"
    wrong = cli("retry", job, "--new-key", "2", "--reason", "x")
    assert (wrong.code, "step '2' of job" in wrong.err) == (1, True)
    found = cli("retry", job, "--new-key", "1", "--reason", "a new card", "--json")
    assert (found.code, found.json["job"]["status"]) == (0, "queued")
    cli.app.tasks["shop.buy"].apply(("declined",), task_id=job)
    assert [row.key for row in cli.safe.operations(job_id=job)] == [f"{job}:1", f"{job}:1#2"]


def test_jobs_in_flight_are_followed(cli: Shop) -> None:
    assert cli("jobs", "--follow", "--status", "queued").code == 2
    assert cli("jobs", "--timeout", "1").code == 2
    first = cli.claimed(60)
    later: list[str] = []
    polls: list[float] = []

    def goes_on(seconds: float) -> None:
        polls.append(seconds)
        if len(polls) != 2:
            return
        later.append(cli.claimed(60))
        cli.safe.cancel(first, "seen")
        with cli.safe.store.connections.connection() as connection:
            connection.execute(f"UPDATE {cli.safe.config.schema}.job SET lease_until = now() WHERE id = %s", (first,))
        cli.safe.sweep()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli.safe, "close", lambda: None)  # this process has one SafeEffects for both
        patch.setattr(looking, "time", SimpleNamespace(sleep=goes_on, monotonic=lambda: float(len(polls))))
        found = cli("jobs", "--follow", "--timeout", "5", "--json")
    events = [json.loads(line) for line in found.out.splitlines()]
    told = [(event["event"], event["in_flight"]["id"]) for event in events]
    assert sorted(told) == sorted([("began", first), ("began", later[0]), ("ended", first)])
    assert told[0] == ("began", first)
    (ended,) = [event for event in events if event["event"] == "ended"]
    assert (ended["job"]["status"], ended["in_flight"]["worker"]) == ("cancelled", "worker@here/1/1")
    lines = cli("jobs", "--follow", "--timeout", "0", columns=120).out
    assert "+ " + later[0] in lines
    assert "on worker@here/1/1" in lines


def test_resolve_a_key_that_does_not_exist(cli: Shop) -> None:
    found = cli("resolve", "nobody:1", "--not-happened", "--reason", "x")
    assert found == Result(1, "", "error: [not_found] there is no operation 'nobody:1'\n")


def test_cancel_and_retry(cli: Shop) -> None:
    job = cli.queued("shop.think", "a")
    assert cli("cancel", job).code == 2
    found = cli("cancel", job, "--reason", "not needed", "--actor", "ann")
    assert (found.code, status(cli, job)) == (0, "cancelled")
    assert cli("log", job, "--json").json["transitions"][-1]["actor"] == "operator:ann"
    assert "cancelled (not needed)" in found.out
    assert cli("cancel", job, "--reason", "again", "--json").json["error"]["code"] == "not_allowed"
    assert cli("retry", job).code == 2
    found = cli("retry", job, "--reason", "needed after all", "--json")
    assert (found.code, found.json["job"]["status"]) == (0, "queued")
    found = cli("retry", job, "--reason", "twice")
    assert (found.code, found.out) == (1, "")
    assert found.err.startswith("error: [not_allowed] ")
    for name in ("cancel", "retry"):
        assert cli(name, "nobody", "--reason", "x").err.startswith("error: [not_found] ")


def test_cancel_of_what_cannot_end_at_once(cli: Shop) -> None:
    running, parked = cli.claimed(ttl=60), cli.ran("shop.buy", "lost")
    found = cli("cancel", running, "--reason", "x")
    assert (found.code, status(cli, running)) == (0, "running")
    assert "next checkpoint" in found.out
    found = cli("cancel", parked, "--reason", "x", "--json")
    assert (found.code, found.json["job"]["status"]) == (0, "unknown")
    cli("resolve", f"{parked}:1", "--not-happened", "--reason", "x")
    assert status(cli, parked) == "cancelled"


def test_sweep_ends_leases_that_ran_out(cli: Shop, sql: Sql) -> None:
    job, live = cli.claimed(ttl=-1), cli.claimed(ttl=60)
    found = cli("sweep", "--json")
    assert found.code == 0
    assert (found.json["released"], found.json["parked"], found.json["jobs"]) == (1, 0, [job])
    assert status(cli, live) == "running"
    assert cli("log", job, "--json").json["transitions"][-1]["actor"] == "operator:sweep"
    sql("UPDATE job SET next_publish_at = clock_timestamp() WHERE id = %s", job)
    assert "messages published: 1" in cli("sweep").out


def test_republish_what_is_due(cli: Shop, sql: Sql) -> None:
    job, other, done = cli.queued("shop.think", "a"), cli.queued("shop.think", "b"), cli.ran("shop.think", "c")
    assert cli("republish", "--json").json == {"published": 0, "missed": 0}
    found = cli("republish", job, job)  # not due, but asked for
    assert (found.code, found.out) == (0, "published 1 message\n")
    sql("UPDATE job SET next_publish_at = clock_timestamp() WHERE id = %s", other)
    sql("UPDATE job SET settled_at = clock_timestamp(), next_publish_at = NULL WHERE id = %s", done)
    found = cli("republish", done)
    assert found.code == 1
    assert f"{done} is succeeded" in found.out
    assert cli("republish", "--json").json == {"published": 1, "missed": 0}
    assert status(cli, other) == "queued"


def test_republish_everything_after_a_restore(cli: Shop, sql: Sql) -> None:
    thinking, buying, done = cli.queued("shop.think", "a"), cli.queued("shop.buy", "b"), cli.ran("shop.think", "c")
    found = cli("republish", "--all")
    assert (found.code, found.out) == (0, "published 2 messages\n")
    assert cli("republish", "--all", "--json").json == {"published": 2, "missed": 0, "epoch": None, "parked": 0}
    sql("UPDATE job SET settled_at = clock_timestamp(), next_publish_at = NULL WHERE id = %s", done)
    found = cli("republish", "--all", "--new-epoch", "--park", "--actor", "ops", "--json")
    (epoch,) = sql("SELECT first_seq, actor FROM epoch")
    assert found.json == {"published": 1, "missed": 0, "epoch": epoch["first_seq"], "parked": 1}
    assert epoch["actor"] == "operator:ops"
    assert (status(cli, thinking), status(cli, buying), status(cli, done)) == ("queued", "unknown", "succeeded")
    assert "parked 0 jobs" in cli("republish", "--all", "--new-epoch", "--park", "--spare", "shop.buy").out


@pytest.mark.parametrize(
    "args", [("--all", "job"), ("--new-epoch",), ("--all", "--park"), ("--all", "--new-epoch", "--spare", "t")]
)
def test_what_republish_cannot_mean(cli: Shop, sql: Sql, args: tuple[str, ...]) -> None:
    assert cli("republish", *args).code == 2
    assert sql("SELECT * FROM epoch") == []


def test_reconcile_asks_the_provider(cli: Shop, sql: Sql) -> None:
    found_job, closed = cli.ran("shop.buy", "lost"), cli.ran("shop.buy", "lost-closed")
    found = cli("reconcile", f"{found_job}:1", "--json")
    assert found.code == 0
    assert found.json["asked"] == 1
    assert found.json["results"] == {"outcome_confirmed": 1}
    assert [o["status"] for o in found.json["operations"]] == ["outcome_confirmed"]
    assert status(cli, found_job) == "queued"
    assert status(cli, closed) == "unknown"
    text = cli("reconcile")
    assert (text.code, text.out) == (0, "asked about 1 operation: 1 unresolved\n")
    sql("UPDATE operation SET next_reconcile_at = clock_timestamp() + interval '1 hour' WHERE status = 'unknown'")
    assert cli("reconcile").out == "asked about 0 operations\n"
    assert "1 unresolved" in cli("reconcile", f"{closed}:1").out  # not due, but asked for
    found = cli("reconcile", f"{found_job}:1")
    assert found.code == 1, "it is resolved already"
    assert "outcome_confirmed" in found.out
    assert cli("reconcile", "nobody:1").err.startswith("error: [not_found] ")


# -- the database --------------------------------------------------------------------------------------------------


def test_upgrade_makes_the_schema_once(make_cli: Callable[..., Shop], place: dict[str, Any]) -> None:
    cli = make_cli(**place)
    for args in (("jobs",), ("status",), ("sweep",), ("retry", "x", "--reason", "x")):
        found = cli(*args)
        assert (found.code, found.out) == (1, "")
        assert "celery -A yourproject safe-effects upgrade" in found.err
        assert found.err.count("\n") == 1
    document = cli("status", "--json")
    assert (document.code, document.json["healthy"]) == (1, False)
    assert document.json["error"]["code"] == "schema_mismatch"
    first = cli("upgrade", "--json")
    assert first.code == 0
    assert first.json["applied"][0] == {"version": 1, "name": "initial"}
    assert cli("upgrade", "--json").json["applied"] == []
    assert "nothing to do" in cli("upgrade").out
    assert cli("status").code == 0


def test_an_older_and_a_newer_schema(cli: Shop, sql: Sql) -> None:
    sql("UPDATE schema_version SET version = 0")
    found = cli("jobs")
    assert found.code == 1
    assert "is at version 0, older" in found.err
    assert "celery -A yourproject safe-effects upgrade" in found.err
    sql("UPDATE schema_version SET version = 9999, oldest_code = 9999")
    for name in ("jobs", "upgrade", "status"):
        found = cli(name)
        assert (found.code, found.out) == (1, "")
        assert found.err.startswith("error: [schema_mismatch] ")
        assert "9999" in found.err


def test_limits_are_shown_and_changed(cli: Shop) -> None:
    shown = cli("limits", "--json").json["limits"]
    assert {(row["scope"], row["limit"]): row["source"] for row in shown} == {
        ("*", "max_age"): "settings", ("*", "max_attempts"): "settings",
    }  # fmt: skip
    assert cli("limits", "--tenant", "acme", "--set", "tenant_queued=1", "--set", "max_age=60").code == 0
    assert cli("limits", "--tenant", "acme", "--set", "tenant_queued=2").code == 0
    assert cli("limits", "--pool", "gpu", "--set", "pool_running=3").code == 0
    cli.queued("shop.think", "x", tenant="acme")
    rows = {(row["scope"], row["limit"]): row for row in cli("limits", "--json").json["limits"]}
    assert (
        rows["tenant:acme", "tenant_queued"] | {"value": 2, "current": 1, "source": "stored"}
        == rows["tenant:acme", "tenant_queued"]
    )
    assert rows["tenant:acme", "max_age"]["value"] == 60
    assert rows["pool:gpu", "pool_running"] | {"value": 3, "current": 0} == rows["pool:gpu", "pool_running"]
    found = cli("limits", "--tenant", "acme")
    assert "tenant:acme  tenant_queued  2" in found.out
    assert cli("limits", "--pool", "gpu", "--clear") == Result(0, "no limits are set for pool:gpu\n", "")
    assert len(cli.safe.stored_limits()) == 1
    assert cli("limits", "--clear").code == 0
    assert cli.safe.stored_limits() == []


@pytest.mark.parametrize(
    "args",
    [
        ("--set", "tenant_queued"),
        ("--set", "tenant_queued=many"),
        ("--set", "nonsense=1"),
        ("--set", "pool_running=1"),
        ("--pool", "gpu", "--set", "tenant_queued=1"),
        ("--tenant", "a", "--task", "b"),
        ("--set", "tenant_queued=1", "--clear"),
    ],
)
def test_a_limit_that_means_nothing_is_wrong_usage(cli: Shop, args: tuple[str, ...]) -> None:
    assert cli("limits", *args).code == 2
    assert cli.safe.stored_limits() == []


@pytest.mark.parametrize(
    ("url", "code"),
    [
        (None, "configuration"),
        ("mysql://localhost/shop", "configuration"),
        ("shop", "configuration"),
        ("postgresql://127.0.0.1:1/shop", "store_unavailable"),
        ("postgresql://127.0.0.1:port/shop", "store_unavailable"),
    ],
)
def test_a_database_that_is_not_there(make_cli: Callable[..., Shop], url: str | None, code: str) -> None:
    cli = make_cli(**({} if url is None else {"safe_effects_database_url": url}))
    for name in ("jobs", "upgrade", "reconcile"):
        found = cli(name)
        assert (found.code, found.out) == (1, "")
        assert found.err.startswith(f"error: [{code}] ")
        assert found.err.count("\n") == 1
        assert "safe_effects_database_url" in found.err
    document = cli("status", "--json")
    assert document.code == 1
    assert document.json["healthy"] is False
    assert document.json["error"]["code"] == code


def test_a_role_that_may_not_write(make_cli: Callable[..., Shop], cli: Shop, place: dict[str, Any], sql: Sql) -> None:
    job = cli.queued("shop.think", "a")
    schema = cli.safe.config.schema
    role = f"reader_{uuid4().hex[:8]}"
    sql(f"CREATE ROLE {role} LOGIN PASSWORD 'secret-word'")
    sql(f"GRANT USAGE ON SCHEMA {schema} TO {role}")
    sql(f"GRANT SELECT ON ALL TABLES IN SCHEMA {schema} TO {role}")
    try:
        url = re.sub(r"://[^@/]*@", f"://{role}:secret-word@", place["safe_effects_database_url"])
        reader = make_cli(safe_effects_database_url=url, safe_effects_schema=schema)
        assert job in reader("jobs").out
        found = reader("cancel", job, "--reason", "x")
        assert (found.code, found.out) == (1, "")
        assert found.err.startswith("error: [permission_missing] PostgreSQL refuses (permission denied for table job)")
        assert f"safe-effects upgrade --grant worker={role}`" in found.err
        assert "secret-word" not in found.err
    finally:
        sql(f"DROP OWNED BY {role}")
        sql(f"DROP ROLE {role}")


def test_roles_are_granted_and_revoked(cli: Shop, sql: Sql) -> None:
    web, eyes = (f"{name}_{uuid4().hex[:8]}" for name in ("web", "eyes"))
    schema = cli.safe.config.schema
    for role in (web, eyes):
        sql(f"CREATE ROLE {role} LOGIN")
    try:
        done = cli("upgrade", "--grant", f"producer={web}", "--grant", f"observer={eyes}", "--grant", f"observer={web}")
        assert done.code == 0
        assert f"role '{web}' has the rights of observer and producer\n" in done.out
        assert f"role '{eyes}' has the rights of observer\n" in done.out
        sees = f"SELECT has_table_privilege('{eyes}', '{schema}.jobs', 'SELECT') AS sees"
        assert sql(sees) == [{"sees": True}]
        again = json.loads(cli("upgrade", "--json").out)["roles"]
        assert {row["role"]: row["kinds"] for row in again} == {web: ["observer", "producer"], eyes: ["observer"]}
        done = cli("upgrade", "--revoke", eyes)
        assert f"role '{eyes}' has lost what it had\n" in done.out
        assert sql(sees) == [{"sees": False}]
        for wrong in ("observer", "reader=web", "observer= "):
            assert cli("upgrade", "--grant", wrong).code == 2
        done = cli("upgrade", "--grant", "observer=nobody-at-all")
        assert (done.code, done.out) == (1, "")
        assert done.err.startswith("error: [configuration] there is no role 'nobody-at-all' to grant anything to")
    finally:
        for role in (web, eyes):
            sql(f"DROP OWNED BY {role}")
            sql(f"DROP ROLE {role}")


def test_a_broker_that_is_down_is_a_warning_of_one_line(
    make_cli: Callable[..., Shop], cli: Shop, place: dict[str, Any]
) -> None:
    job = cli.ran("shop.buy", "lost")
    fast = {"max_retries": 1, "interval_start": 0}
    away = make_cli(
        **place, broker_url="redis://127.0.0.1:1/0", task_publish_retry=False, broker_transport_options=fast
    )
    found = away("resolve", f"{job}:1", "--happened", "--ref", "pay_1", "--reason", "seen")
    assert found.code == 0
    assert "outcome_confirmed" in found.out
    assert found.err.startswith("warning: publishing 1 messages is put off")
    assert found.err.count("\n") == 1


def test_an_app_without_safe_effects(make_cli: Callable[..., Shop], cli: Shop) -> None:
    cli.app = Celery("bare", set_as_current=False, broker="memory://")
    found = cli("jobs")
    assert (found.code, found.out) == (1, "")
    assert "add `SafeEffects(app)`" in found.err


# -- as users start it ---------------------------------------------------------------------------------------------


PROJECT = """
from celery import Celery
from celery_safe_effects import Happened, SafeEffects, SafeTask, effect

app = Celery("shop")
app.conf.update({conf})
SafeEffects(app)


@effect(name="cli.pay", deadline=30)
def pay(op, what):
    return what


@pay.lookup
def find_pay(op):
    return Happened("pay_found", op.arguments)


@app.task(base=SafeTask, name="shop.buy", effects=[pay])
def buy(what):
    return pay(what).ref
"""


class Program:
    """`celery -A cli_project safe-effects ARGS` as a process."""

    def __init__(self, env: dict[str, str]) -> None:
        self.start = [sys.executable, "-m", "celery", "-A", "cli_project", "safe-effects"]
        self.env = env

    def __call__(self, *args: str) -> Result:
        done = subprocess.run(
            [*self.start, *args], capture_output=True, text=True, check=False, timeout=60, env=self.env
        )
        assert "Traceback" not in done.stderr, done.stderr
        return Result(done.returncode, done.stdout, done.stderr)

    def on_a_terminal(self, *args: str) -> Result:
        """The same with a terminal as standard error."""
        import pty

        terminal, theirs = pty.openpty()
        with subprocess.Popen(
            [*self.start, *args], stdout=subprocess.PIPE, stderr=theirs, text=True, env=self.env
        ) as process:
            os.close(theirs)
            shown = b""
            with contextlib.suppress(OSError):  # Linux's way to say that nobody writes there any more
                while part := os.read(terminal, 10_000):
                    shown += part
            os.close(terminal)
            assert process.stdout is not None
            return Result(process.wait(60), process.stdout.read(), shown.decode())


@pytest.fixture
def celery(tmp_path: Path, place: dict[str, Any]) -> Program:
    (tmp_path / "cli_project.py").write_text(PROJECT.replace("{conf}", repr({**CONF, **place})))
    if not any(e.name == "safe-effects" for e in importlib.metadata.entry_points(group="celery.commands")):
        # From a checkout that is not installed: the metadata that an installation would write.
        found = re.search(r'^safe-effects = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
        assert found
        made = tmp_path / "celery_safe_effects-0.dist-info"
        made.mkdir()
        (made / "METADATA").write_text("Metadata-Version: 2.1\nName: celery-safe-effects\nVersion: 0\n")
        (made / "entry_points.txt").write_text(f"[celery.commands]\nsafe-effects = {found[1]}\n")
    path = [str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path)), "COLUMNS": "80"}
    return Program(env)


def test_every_command_through_celery(celery: Program, make_cli: Callable[..., Shop], place: dict[str, Any]) -> None:
    made = celery("upgrade")
    schema = place["safe_effects_schema"]
    assert made == Result(0, f"applied migration 0001_initial\nschema {schema!r} is at version 1\n", "")
    shop = make_cli(**place)
    failed, parked, other = shop.ran("shop.think", "fail"), shop.ran("shop.buy", "lost"), shop.ran("shop.buy", "lost")
    queued = [shop.queued("shop.think", str(n)) for n in range(2)]

    def at_once(*commands: tuple[str, ...]) -> list[Result]:
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(lambda args: celery(*args), commands))

    looks = at_once(
        ("status",),
        ("jobs", "--json"),
        ("show", parked),
        ("log", failed, "--follow"),
        ("operations", "--status", "unknown"),
    )
    assert [found.code for found in looks] == [1, 0, 0, 0, 0]
    assert "sweep_stale" in looks[0].out
    assert {job["id"] for job in looks[1].json["jobs"]} == {failed, parked, other, *queued}
    assert f"{parked}:1" in looks[2].out
    assert "→ failed" in looks[3].out
    assert f"{other}:1" in looks[4].out
    acts = at_once(
        ("resolve", f"{parked}:1", "--happened", "--ref", "pay_1", "--reason", "seen"),
        ("retry", failed, "--reason", "fixed"),
        ("cancel", queued[0], "--reason", "not needed"),
        ("reconcile", f"{other}:1", "--json"),
        ("sweep", "--json"),
        ("republish",),
    )
    assert [found.code for found in acts] == [0] * len(acts), acts
    assert acts[3].json["results"] == {"outcome_confirmed": 1}
    assert set(acts[4].json) >= {"released", "parked", "ended", "published", "gone"}
    ends = ["queued", "queued", "cancelled", "queued", "queued"]
    assert [status(shop, job) for job in (parked, failed, queued[0], queued[1], other)] == ends
    refs = [shop.safe.operation(f"{job}:1").provider_ref for job in (parked, other)]
    assert refs == ["pay_1", "pay_found"]


@pytest.mark.parametrize("args", [("log", "JOB", "--follow"), ("jobs", "--follow")])
def test_ctrl_c_ends_what_follows_on(celery: Program, cli: Shop, args: tuple[str, ...]) -> None:
    job = cli.claimed(ttl=600)
    start = [*celery.start, *(job if word == "JOB" else word for word in args)]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a child inherits that it is ignored
    try:
        process = subprocess.Popen(start, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=celery.env)
    finally:
        signal.signal(signal.SIGINT, before)
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert any(job in line or "running" in line for line in process.stdout)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 1
        assert "Traceback" not in process.stderr.read()


def test_bash_completes_what_stands_in_the_command_line(celery: Program, tmp_path: Path) -> None:
    """As docs/cli.md has it, by Celery's own program in a real bash; the app is not asked for it."""
    bash, program = shutil.which("bash"), shutil.which("celery", path=str(Path(sys.executable).parent))
    assert bash is not None
    assert program is not None
    (setup,) = re.findall(r'eval "\$\(_CELERY_COMPLETE=bash_source celery\)"', (ROOT / "docs" / "cli.md").read_text())
    env = {**celery.env, "PATH": f"{Path(program).parent}{os.pathsep}{os.environ['PATH']}"}

    def completed(*words: str) -> list[str]:
        script = (
            f"{setup}; complete -p celery; COMP_WORDS=({' '.join(map(shlex.quote, words))}); "
            f'COMP_CWORD={len(words) - 1}; _celery_completion celery; printf "%s\\n" "${{COMPREPLY[@]}}"'
        )
        command = [bash or "", "--norc", "-c", script]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=env, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        first, *answers = done.stdout.splitlines()
        assert "_celery_completion celery" in first
        return answers

    assert set(completed("celery", "-A", "shop", "safe-effects", "")) == set(safe_effects.commands)
    assert completed("celery", "-A", "shop", "safe-effects", "jobs", "--status", "unk") == ["unknown"]
    assert completed("celery", "-A", "shop", "safe-effects", "resolve", "--not") == ["--not-happened"]


@pytest.mark.parametrize(("shell", "at"), [("zsh", "4"), ("fish", "op")])
def test_other_shells_are_told_the_same(celery: Program, shell: str, at: str) -> None:
    assert f"_CELERY_COMPLETE={shell}_source celery" in (ROOT / "docs" / "cli.md").read_text()
    program = [sys.executable, "-c", "import sys; sys.argv[0] = 'celery'; from celery.__main__ import main; main()"]

    def said(what: str) -> str:
        words = {
            "COMP_WORDS": "celery -A shop safe-effects op",
            "COMP_CWORD": at,
            "_CELERY_COMPLETE": f"{shell}_{what}",
        }
        env = {**celery.env, **words}
        return subprocess.run(program, capture_output=True, text=True, check=True, timeout=60, env=env).stdout

    assert f"_CELERY_COMPLETE={shell}_complete" in said("source")
    assert "operations" in said("complete")


def test_long_work_has_a_bar_on_a_terminal_and_nowhere_else(celery: Program, cli: Shop, sql: Sql) -> None:
    lost = [cli.ran("shop.buy", "lost") for _ in range(3)]
    verdict = ("resolve", "--effect", "cli.pay", "--not-happened", "--reason", "asked", "--yes")
    done = celery.on_a_terminal(*verdict)
    assert (done.code, "done: 3 operations resolved" in done.out) == (0, True)
    assert re.search(r"resolving.*#{36}.*3/3", done.err)
    assert {status(cli, job) for job in lost} == {"queued"}

    done = celery.on_a_terminal("republish", "--all")
    assert (done.code, done.out) == (0, "published 3 messages\n")
    assert re.search(r"publishing.*#{36}.*3/3", done.err)
    assert celery("republish", "--all") == Result(0, "published 3 messages\n", "")

    ended = [cli.ran("shop.think", "a") for _ in range(4)]
    sql("ALTER TABLE job DISABLE TRIGGER USER")
    for jobs, shows in ((ended[:2], True), (ended[2:], False)):
        sql("UPDATE job SET finished_at = finished_at - interval '1 year' WHERE id = ANY (%s)", jobs)
        done = celery.on_a_terminal("prune", *(() if shows else ("--json",)))
        assert (done.code, bool(re.search(r"pruning.*#{36}.*2/2", done.err))) == (0, shows)
        assert done.err == "" or shows
    assert json.loads(done.out) == {"jobs": 2, "tombstones": 0}


# -- metrics -------------------------------------------------------------------------------------------------------


def test_metrics_are_printed_once(cli: Shop) -> None:
    cli.ran("shop.think", "a")
    found = cli("metrics")
    assert (found.code, found.err) == (0, "")
    assert 'safe_effects_jobs_finished_total{status="succeeded"} 1.0' in found.out.splitlines()
    (metric,) = [m for m in cli("metrics", "--json").json["metrics"] if m["name"] == "safe_effects_jobs_finished_total"]
    assert metric["kind"] == "counter"
    assert {"labels": {"status": "succeeded"}, "value": 1} in metric["samples"]


def test_rules_and_dashboard_are_printed_without_a_database(make_cli: Callable[..., Shop]) -> None:
    cli = make_cli(safe_effects_database_url="postgresql+psycopg://127.0.0.1:1/nowhere")
    assert cli("metrics", "--rules").out.startswith("# Alerting rules")
    assert json.loads(cli("metrics", "--dashboard").out)["panels"]
    assert cli("metrics", "--rules", "--dashboard").code == 2
    assert cli("metrics", "--host", "::1").code == 2
    found = cli("metrics", "--json")
    assert (found.code, found.json["error"]["code"]) == (1, "store_unavailable")


def test_metrics_without_prometheus_client(cli: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("prometheus_client")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "celery_safe_effects.contrib.prometheus", raising=False)
    monkeypatch.delattr("celery_safe_effects.contrib.prometheus", raising=False)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    found = cli("metrics")
    assert found.code == 1
    assert "celery-safe-effects[metrics]" in found.err
    assert cli("metrics", "--json").code == 0


def test_metrics_are_served_until_the_process_is_ended(place: dict[str, Any], cli: Shop, tmp_path: Path) -> None:
    import urllib.request

    (tmp_path / "served.py").write_text(
        "from celery import Celery\nfrom celery_safe_effects import SafeEffects\n"
        f"app = Celery('served', broker='memory://')\napp.conf.update({place!r})\nSafeEffects(app)\n"
    )
    command = [sys.executable, "-m", "celery", "-A", "served:app", "safe-effects", "metrics", "--port", "0", "--json"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=tmp_path) as process:
        try:
            assert process.stdout is not None
            url = json.loads(process.stdout.readline())["url"]
            assert url.startswith("http://127.0.0.1:")
            with urllib.request.urlopen(url, timeout=20) as answer:
                assert b"safe_effects_jobs_finished_total" in answer.read()
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
        finally:
            process.kill()


# -- doctor --------------------------------------------------------------------------------------------------------


def test_the_doctor_tells_problems_from_warnings_by_its_exit_status(cli: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    from celery_safe_effects import doctor

    found = [doctor.Finding("odd", "warning", "something is odd", "look at it")]
    monkeypatch.setattr(doctor, "examine", lambda safe: found)
    text = cli("doctor")
    assert (text.code, text.err) == (0, "")
    assert "[odd] something is odd" in text.out
    assert "look at it" in text.out
    assert text.out.splitlines()[-1] == "0 problems, 1 warning"
    found.insert(0, doctor.Finding("bad", "problem", "something is broken", "mend it", refuses=True))
    assert cli("doctor").code == 1
    document = cli("doctor", "--json").json
    assert document["healthy"] is False
    assert document["findings"][0] == {
        "code": "bad",
        "severity": "problem",
        "what": "something is broken",
        "mend": "mend it",
        "refuses": True,
    }
    found.clear()
    assert cli("doctor") == Result(0, "0 problems, 0 warnings\n", "")


def test_the_doctor_without_a_database(make_cli: Callable[..., Shop]) -> None:
    cli = make_cli(safe_effects_database_url="postgresql+psycopg://127.0.0.1:1/nowhere")
    found = cli("doctor", "--json")
    assert found.code == 1
    assert "store_unavailable" in [finding["code"] for finding in found.json["findings"]]
