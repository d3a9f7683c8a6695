"""Each check of the doctor fires, and a healthy set-up has no finding."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from celery import Celery
from kombu import Queue

from celery_safe_effects import Happened, SafeEffects, SafeTask, doctor, effect
from celery_safe_effects.config import RISKS
from celery_safe_effects.doctor import broker as broker_checks
from celery_safe_effects.doctor import database, tasks, upkeep
from celery_safe_effects.doctor.finding import Patient
from celery_safe_effects.errors import ConfigurationError
from celery_safe_effects.glue import worker
from celery_safe_effects.store.connection import Opener
from celery_safe_effects.testing import EmbeddedPostgres
from tests.support.brokers import Broker
from tests.support.lab import Lab
from tests.support.services import Sql

ROOT = Path(__file__).resolve().parents[2]


@effect(name="doctor.pay", idempotent_for=3600)
def pay(op: Any, what: str) -> str:
    return what


@effect(name="doctor.mail")
def mail(op: Any, what: str) -> str:
    return what


@mail.lookup
def find_mail(op: Any) -> Happened:
    return Happened("found")


def codes(found: Any) -> list[str]:
    return [finding.code for finding in found]


@pytest.fixture
def clinic(database_url: str, sql: Sql, redis_broker: Broker) -> Iterator[Lab]:
    """An app as it should be: a worker and beat at work, a declared task."""
    lab = Lab(database_url, sql)
    lab.app.conf.update(
        broker_url=redis_broker.url,
        result_backend="cache+memory://",
        safe_effects_sweep_interval=5,
        safe_effects_reconcile_interval=10,
    )
    lab.safe._config = None
    lab.task(lambda self: None, effects=[pay, mail], name="doctor.bill")
    lab.safe.store.rows("LEARN_TASKS", names=["doctor.bill"])
    lab.safe.store.rows("WORKER_SEEN", **WORKER)
    for activity in ("sweep", "reconcile"):
        lab.safe.store.row("MAINTENANCE_BEGIN", name=activity, by=f"a@x/1/1/{activity}", idle_for=None)
        lab.safe.store.row("MAINTENANCE_END", name=activity)
    yield lab
    lab.safe.close()
    lab.app.close()


WORKER = {
    "node": "a@x",
    "pid": 1,
    "version": "0.1.0",
    "pool": "prefork",
    "concurrency": 2,
    "connections": 6,
    "queues": ["celery", "safe_effects"],
}


def look(lab: Lab, check: Callable[..., Any]) -> list[Any]:
    return list(check(Patient(lab.safe)))


def one(lab: Lab, check: Callable[..., Any], severity: str, code: str) -> Any:
    """The check's one finding."""
    (found,) = look(lab, check)
    assert (found.severity, found.code) == (severity, code)
    assert found.what
    assert found.mend
    return found


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A database server that says other things of itself."""

    def says(lab: Lab, **changes: Any) -> None:
        original = lab.safe.store.rows

        def rows(statement: str, /, **params: Any) -> Any:
            found = original(statement, **params)
            return [found[0]._replace(**changes)] if statement == "DOCTOR_DATABASE" else found

        monkeypatch.setattr(lab.safe.store, "rows", rows)

    return says


def test_a_healthy_set_up_has_no_finding(clinic: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    # Other tests' effects, of this process, are not this app's.
    monkeypatch.setattr(tasks, "all_effects", lambda: [pay, mail])
    monkeypatch.setattr(upkeep, "all_effects", lambda: [pay, mail])
    assert clinic.safe.doctor() == []


# -- the database ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "check", "severity", "code"),
    [
        ({"fsync": "off"}, database.fsync, "problem", "fsync_off"),
        ({"synchronous_commit": "off"}, database.synchronous_commit, "problem", "synchronous_commit_off"),
        (
            {"synchronous_commit": "local", "standby_names": "*"},
            database.synchronous_commit,
            "warning",
            "synchronous_commit_local",
        ),
        ({"full_page_writes": "off"}, database.full_page_writes, "warning", "full_page_writes_off"),
        ({"isolation": "repeatable read"}, database.isolation, "problem", "isolation_level"),
        ({"read_only": "on"}, database.read_only, "problem", "read_only"),
        ({"encoding": "LATIN1"}, database.encoding, "problem", "encoding"),
        ({"version": 130004}, database.version, "warning", "old_postgresql"),
        ({"autovacuum": "off"}, database.autovacuum, "warning", "autovacuum_off"),
        ({"connections": 100, "connected": 98, "ours": 1}, database.connections, "problem", "connections"),
        ({"connections": 100, "connected": 94, "ours": 1}, database.connections, "warning", "connections_tight"),
        ({"clock": -20.0}, database.clock, "warning", "clock"),
        ({"clock": 3600.0}, database.clock, "problem", "clock"),
    ],
)
def test_the_database(clinic: Lab, server: Any, changes: dict[str, Any], check: Any, severity: str, code: str) -> None:
    assert look(clinic, check) == []
    if code == "clock":
        changes = {"clock": time.time() + changes["clock"]}
    server(clinic, **changes)
    found = one(clinic, check, severity, code)
    assert found.refuses == (check in database.CERTAIN and severity == "problem")


def test_the_servers_own_words_are_what_is_read(clinic: Lab, dsn: str, sql: Sql) -> None:
    """The same with real settings of the role's database."""
    name = dsn.rpartition("/")[2].partition("?")[0]
    sql(f'ALTER DATABASE "{name}" SET synchronous_commit = off')
    sql(f'ALTER DATABASE "{name}" SET default_transaction_isolation = serializable')
    sql(f'ALTER DATABASE "{name}" SET default_transaction_read_only = on')
    clinic.safe.close()
    found = (
        look(clinic, database.synchronous_commit) + look(clinic, database.isolation) + look(clinic, database.read_only)
    )
    assert codes(found) == ["synchronous_commit_off", "isolation_level", "read_only"]


def test_poolers(clinic: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    assert look(clinic, database.pooler) == []
    original = Opener.open

    def pooled(self: Any, natively: bool = False) -> Any:
        conn = original(self, natively)
        conn.pooled = True
        return conn

    monkeypatch.setattr(Opener, "open", pooled)
    clinic.safe.close()
    assert look(clinic, database.pooler) == []
    clinic.app.conf.safe_effects_prepare = "on"
    monkeypatch.setattr(clinic.safe, "_config", None)
    one(clinic, database.pooler, "warning", "pooler_prepared")
    clinic.app.conf.safe_effects_prepare = "detected"
    monkeypatch.setattr(clinic.safe, "_config", None)

    def transaction(self: Any) -> Any:
        raise psycopg.errors.ProtocolViolation("transaction blocks not allowed in statement pooling mode")

    monkeypatch.setattr(psycopg.Connection, "transaction", transaction)
    one(clinic, database.pooler, "problem", "pooler_statement_mode")


# -- upkeep ------------------------------------------------------------------------------------------------------------


def test_nobody_sweeps_and_an_effect_happened_twice(clinic: Lab, sql: Sql) -> None:
    clinic.app.tasks["doctor.bill"].apply_async()
    assert look(clinic, upkeep.maintenance) == []
    sql("UPDATE maintenance SET last_finished_at = now() - interval '1 hour', last_started_at = now() - interval '1 h'")
    one(clinic, upkeep.maintenance, "problem", "sweep_stale")
    clinic.behaviour["x"] = TimeoutError()
    x = clinic.effect("x")
    clinic.run(clinic.task(lambda self: x().ref, effects=[x]))
    sql("UPDATE operation SET double_at = now()")
    assert codes(look(clinic, upkeep.maintenance)) == ["sweep_stale", "double_effect", "reconcile_stale"]


def test_beat(clinic: Lab, sql: Sql) -> None:
    assert look(clinic, upkeep.beat_entries) == []
    assert look(clinic, upkeep.beat_absent) == []
    clinic.app.conf.beat_schedule = {"mine": {"task": "mine", "schedule": 1}}
    assert "celery_safe_effects.sweep" in one(clinic, upkeep.beat_entries, "warning", "beat_entries").what
    sql("UPDATE maintenance SET last_by = 'a@x/stand-in' WHERE name = 'sweep'")
    one(clinic, upkeep.beat_absent, "warning", "beat_absent")
    assert look(clinic, upkeep.queue_unconsumed) == []
    sql("UPDATE worker SET queues = '{celery}'")
    one(clinic, upkeep.queue_unconsumed, "warning", "queue_unconsumed")


def test_leases_shorter_than_the_pauses_that_were_seen(clinic: Lab) -> None:
    assert look(clinic, upkeep.lease_too_short) == []
    clinic.safe.store.rows("WORKER_PAUSED", owner="a@x/1/1", seconds=12.0)  # 22 s between two renewals
    one(clinic, upkeep.lease_too_short, "warning", "lease_too_short")
    clinic.safe.store.rows("WORKER_PAUSED", owner="a@x/1/1", seconds=25.0)
    assert "above 70 s" in one(clinic, upkeep.lease_too_short, "problem", "lease_too_short").mend


def test_what_is_kept_for_too_short(clinic: Lab, sql: Sql, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "all_effects", lambda: [pay])
    assert look(clinic, upkeep.retention) == []
    clinic.app.conf.safe_effects_retention = {"succeeded": 60}
    clinic.app.conf.safe_effects_tombstone_retention = 60
    monkeypatch.setattr(clinic.safe, "_config", None)
    assert codes(look(clinic, upkeep.retention)) == ["retention_short", "tombstones_short"]
    clinic.behaviour["x"] = TimeoutError()
    x = clinic.effect("x")
    job = clinic.run(clinic.task(lambda self: x().ref, effects=[x]))
    assert look(clinic, upkeep.result_expires) == []
    sql("UPDATE job SET created_at = now() - interval '3 days' WHERE id = %s", job)
    one(clinic, upkeep.result_expires, "warning", "result_expires")
    clinic.app.conf.result_expires = None
    assert look(clinic, upkeep.result_expires) == []
    assert look(clinic, upkeep.effects_not_imported) == []
    sql("ALTER TABLE operation DISABLE TRIGGER USER")
    sql("UPDATE operation SET effect = 'renamed.away'")
    assert "renamed.away" in one(clinic, upkeep.effects_not_imported, "problem", "effect_not_imported").what


def test_workers_of_another_version(clinic: Lab, sql: Sql) -> None:
    assert look(clinic, upkeep.versions) == []
    sql("UPDATE worker SET version = '0.0.9'")
    assert "0.0.9" in one(clinic, upkeep.versions, "warning", "worker_version").what
    sql("UPDATE worker SET seen_at = now() - interval '2 min'")
    assert look(clinic, upkeep.versions) == []


# -- tasks -------------------------------------------------------------------------------------------------------------


def test_plain_tasks_with_effects(clinic: Lab) -> None:
    assert look(clinic, tasks.plain_with_effects) == []

    @clinic.app.task(shared=False, name="doctor.declares", effects=[pay])
    def declares() -> None: ...

    assert "doctor.declares" in one(clinic, tasks.plain_with_effects, "problem", "plain_task_with_effects").what
    del clinic.app.tasks["doctor.declares"]

    @clinic.app.task(shared=False, name="doctor.calls", autoretry_for=(ValueError,))
    def calls() -> Any:
        return [pay(str(n)) for n in range(2)]

    assert "doctor.pay" in one(clinic, tasks.plain_with_effects, "problem", "plain_task_calls_effect").what
    del clinic.app.tasks["doctor.calls"]
    inner = clinic.effect("inner")

    @clinic.app.task(shared=False, name="doctor.closure")
    def closure() -> Any:
        return inner()

    one(clinic, tasks.plain_with_effects, "problem", "plain_task_calls_effect")


def test_bases_that_bypass_what_safe_task_does(clinic: Lab) -> None:
    class Good(SafeTask):
        abstract = True

        def apply_async(self, *args: Any, **kwargs: Any) -> Any:
            return super().apply_async(*args, **kwargs)

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self.run(*args, **kwargs)

    class Bad(SafeTask):
        abstract = True

        def apply_async(self, *args: Any, **kwargs: Any) -> Any:
            return self.app.send_task(self.name, args, kwargs)

    clinic.task(lambda self: None, effects=[], base=Good)
    assert look(clinic, tasks.bypassed_hooks) == []
    clinic.task(lambda self: None, effects=[], base=Bad)
    assert "Bad overrides apply_async" in one(clinic, tasks.bypassed_hooks, "problem", "hook_bypassed").what


def test_effects_that_nothing_can_resolve(clinic: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    asks = clinic.effect("asks", repeatable=True)
    sends = clinic.effect("sends", if_unknown="send_again")
    monkeypatch.setattr(tasks, "all_effects", lambda: [pay, mail, asks, sends])
    assert look(clinic, tasks.unresolvable_effects) == []
    bare = clinic.effect("bare")
    monkeypatch.setattr(tasks, "all_effects", lambda: [pay, bare])
    assert bare.name in one(clinic, tasks.unresolvable_effects, "warning", "effect_unresolvable").what
    monkeypatch.setattr(tasks, "all_effects", list)
    clinic.task(lambda self: None, name="doctor.whole_body")
    assert "doctor.whole_body" in one(clinic, tasks.unresolvable_effects, "warning", "effect_unresolvable").what


def test_producers_before_workers(clinic: Lab) -> None:
    assert look(clinic, tasks.unknown_to_workers) == []
    clinic.task(lambda self: None, effects=[], name="doctor.new")
    assert "doctor.new" in one(clinic, tasks.unknown_to_workers, "warning", "task_unknown_to_workers").what


def test_settings_of_celery(clinic: Lab) -> None:
    assert look(clinic, tasks.settings) == []
    clinic.app.conf.task_always_eager = True
    one(clinic, tasks.settings, "warning", "always_eager")
    clinic.app.conf.task_always_eager = False
    clinic.task(lambda self: None, effects=[], name="doctor.rejects", reject_on_worker_lost=True)
    assert "doctor.rejects" in one(clinic, tasks.settings, "warning", "reject_on_worker_lost").what


# -- broker ------------------------------------------------------------------------------------------------------------


class Client:
    """A Redis server with settings of the test's."""

    def __init__(self, **settings: str) -> None:
        self.settings = {name.replace("_", "-"): value for name, value in settings.items()}

    def config_get(self, pattern: str) -> dict[str, str]:
        if "refuses" in self.settings:
            raise ConnectionError("unknown command CONFIG")
        return {pattern: self.settings[pattern]} if pattern in self.settings else {}


def test_redis(clinic: Lab, monkeypatch: pytest.MonkeyPatch, sql: Sql) -> None:
    assert look(clinic, broker_checks.broker) == []

    def ask(client: Client) -> list[Any]:
        return list(broker_checks._redis(Patient(clinic.safe), client))

    assert ask(Client(maxmemory_policy="noeviction")) == []
    assert ask(Client(refuses="yes")) == []
    assert codes(ask(Client(maxmemory_policy="allkeys-lru"))) == ["broker_evicts"]
    job = clinic.run(clinic.task(lambda self: None, effects=[]))
    clinic.app.conf.broker_transport_options = {"visibility_timeout": 60}
    assert ask(Client()) == []
    sql("ALTER TABLE job DISABLE TRIGGER USER")
    sql("UPDATE job SET leased_at = finished_at - interval '2 min' WHERE id = %s", job)
    assert codes(ask(Client())) == ["visibility_timeout"]
    clinic.app.conf.broker_transport_options = {}
    assert ask(Client()) == []


def test_rabbitmq(clinic: Lab, sql: Sql) -> None:
    def ask() -> list[str]:
        return codes(broker_checks._rabbitmq(Patient(clinic.safe)))

    job = clinic.run(clinic.task(lambda self: None, effects=[]))
    sql("ALTER TABLE job DISABLE TRIGGER USER")
    sql("UPDATE job SET leased_at = finished_at - interval '20 min' WHERE id = %s", job)
    assert ask() == []
    clinic.app.amqp.queues.add(Queue("slow", queue_arguments={"x-consumer-timeout": 600_000}))
    assert ask() == ["consumer_timeout"]
    clinic.app.amqp.queues["slow"].queue_arguments["x-consumer-timeout"] = 3_600_000
    assert ask() == []
    sql("UPDATE job SET leased_at = finished_at - interval '40 min' WHERE id = %s", job)
    del clinic.app.amqp.queues["slow"]
    assert ask() == ["consumer_timeout"]


@pytest.mark.parametrize("broker", [pytest.param("rabbitmq", marks=pytest.mark.rabbitmq)], indirect=True)
def test_a_real_rabbitmq(clinic: Lab, broker: Broker) -> None:
    clinic.app.conf.broker_url = broker.url
    assert look(clinic, broker_checks.broker) == []


def test_a_broker_that_is_down(clinic: Lab) -> None:
    clinic.app.conf.broker_url = "redis://:hidden-word@127.0.0.1:1/0"
    found = one(clinic, broker_checks.broker, "problem", "broker_unavailable")
    assert "hidden-word" not in found.message


def test_the_result_backend(clinic: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    assert look(clinic, broker_checks.result_backend) == []

    def backend(**settings: str) -> list[str]:
        # The backend is the thread's own and a property of the app.
        clinic.app._local.backend = SimpleNamespace(client=Client(**settings))
        monkeypatch.setattr(type(clinic.app), "backend", property(lambda self: self._local.backend), raising=False)
        return codes(look(clinic, broker_checks.result_backend))

    kept = {"maxmemory_policy": "noeviction"}
    assert backend(save="", appendonly="yes", **kept) == []
    assert backend(save="3600 1", appendonly="no", **kept) == []
    assert backend(save="", appendonly="no", **kept) == ["backend_not_persistent"]
    assert backend(save="60 1", appendonly="no", maxmemory_policy="allkeys-lru") == ["backend_evicts"]
    assert backend(save="60 1", appendonly="no", maxmemory_policy="volatile-ttl") == []


def test_workers_that_only_the_broker_knows(clinic: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"a@x": ["doctor.bill"], "other@y": ["elsewhere"]}
    inspect = SimpleNamespace(registered=lambda: answers)
    monkeypatch.setattr(clinic.app.control, "inspect", lambda **_: inspect)
    assert look(clinic, broker_checks.strangers) == []
    answers["old@z"] = ["doctor.bill [rate_limit=1/s]"]
    assert "old@z" in one(clinic, broker_checks.strangers, "problem", "worker_without_library").what


# -- the doctor himself ------------------------------------------------------------------------------------------------


def test_without_a_database_or_a_schema_the_rest_is_still_looked_at(clinic: Lab, empty_database_url: str) -> None:
    app = Celery("doctor", broker="memory://", set_as_current=False)
    app.conf.safe_effects_database_url = "postgresql+psycopg://127.0.0.1:1/nowhere"
    safe = SafeEffects(app)

    @app.task(shared=False, name="doctor.plain", effects=[pay])
    def plain() -> None: ...

    found = safe.doctor()
    assert {"store_unavailable", "plain_task_with_effects"} <= set(codes(found)), found
    safe._config = safe._store = None
    app.conf.safe_effects_database_url = empty_database_url
    (missing,) = [finding for finding in safe.doctor() if finding.code == "schema_mismatch"]
    assert "safe-effects upgrade" in missing.message
    safe.close()
    app.close()


def test_a_check_that_fails_is_told_and_stops_no_other(clinic: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(p: Any) -> Any:
        raise RuntimeError("a bug")

    def finds(p: Any) -> Any:
        yield doctor.Finding("x", "problem", "what", "mend")

    monkeypatch.setattr(doctor, "CHECKS", (broken, finds))
    found = clinic.safe.doctor()
    assert codes(found) == ["x", "not_checked"]
    assert "broken could not be checked: RuntimeError: a bug" in found[1].what


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"fsync": "off"}, "fsync_off"),
        ({"synchronous_commit": "off"}, "synchronous_commit_off"),
        ({"isolation": "serializable"}, "isolation_level"),
    ],
)
def test_a_worker_does_not_start_on_what_is_certain_to_break_safety(
    clinic: Lab, server: Any, monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], code: str
) -> None:
    worker.prepare(clinic.safe, clinic.app, "a@x")
    server(clinic, **changes)
    (finding,) = [f for f in clinic.safe.doctor() if f.refuses]
    with pytest.raises(SystemExit) as refused:
        worker.prepare(clinic.safe, clinic.app, "a@x")
    assert finding.code == code in RISKS
    assert finding.message in str(refused.value)
    clinic.app.conf.safe_effects_accept_risks = [code]
    monkeypatch.setattr(clinic.safe, "_config", None)
    worker.prepare(clinic.safe, clinic.app, "a@x")


def test_what_costs_only_something_refuses_no_start(clinic: Lab, server: Any) -> None:
    server(clinic, full_page_writes="off", version=130000, encoding="LATIN1", clock=0.0)
    worker.prepare(clinic.safe, clinic.app, "a@x")


def test_risks_that_nobody_can_accept(clinic: Lab, server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for risks in (["read_only"], "fsync_off", ["fsync"]):
        clinic.app.conf.safe_effects_accept_risks = risks
        monkeypatch.setattr(clinic.safe, "_config", None)
        with pytest.raises(ConfigurationError, match="safe_effects_accept_risks"):
            _ = clinic.safe.config
    clinic.app.conf.safe_effects_accept_risks = ()
    server(clinic, read_only="on")
    with pytest.raises(SystemExit, match="read_only"):
        worker.prepare(clinic.safe, clinic.app, "a@x")


def test_a_server_of_ones_own_keeps_what_it_was_told() -> None:
    """The embedded server is one on which a worker starts."""
    settings = EmbeddedPostgres()._settings
    assert not {"fsync", "full_page_writes", "synchronous_commit"} & set(settings)


def test_the_docs_have_every_code() -> None:
    sources = [path.read_text() for path in (ROOT / "celery_safe_effects" / "doctor").glob("*.py")]
    known = {code for text in sources for code in re.findall(r'(?:problem|warning|make)\(\s*"(\w+)"', text)}
    assert len(known) > 35
    section = (ROOT / "docs" / "cli.md").read_text().partition("\n## doctor\n")[2].partition("\n## ")[0]
    told = {
        code for cell in re.findall(r"^\| ([^|]+) \|", section, re.MULTILINE) for code in re.findall(r"`(\w+)`", cell)
    }
    assert told == known


def test_findings_are_json(clinic: Lab) -> None:
    from dataclasses import asdict

    clinic.app.conf.task_always_eager = True
    assert json.dumps([asdict(finding) for finding in clinic.safe.doctor()])
