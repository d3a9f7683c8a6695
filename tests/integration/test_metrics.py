"""The metrics: right whatever process died, bounded in labels and in rows, read by indexes."""

from __future__ import annotations

import re
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from celery_safe_effects import AdmissionRejected, Happened, Limits, Unresolved
from celery_safe_effects.contrib import prometheus
from celery_safe_effects.engine import metrics as engine_metrics
from celery_safe_effects.store import statements
from tests.support.lab import Lab
from tests.support.protocol import Protocol, make_store
from tests.support.services import Sql

P = "safe_effects_"


def values(lab: Lab, name: str) -> dict[Any, float]:
    """A metric's samples by their labels' values; a single label is its value alone."""
    (metric,) = [m for m in lab.safe.metrics() if m.name == P + name]
    found: dict[Any, float] = {}
    for sample in metric.samples:
        labels = tuple(sample.labels.values())
        found[labels[0] if len(labels) == 1 else labels] = sample.value
    return found


@pytest.fixture
def protocol(database_url: str, lab: Lab) -> Iterator[Protocol]:
    store = make_store(database_url)
    yield Protocol(store)
    store.connections.close()


# -- what they say -----------------------------------------------------------------------------------------------------


def test_queues_tell_their_depth_and_the_age_of_their_oldest_by_tenant(lab: Lab, protocol: Protocol, sql: Sql) -> None:
    first = protocol.accept(queue="celery", tenant="acme")
    protocol.accept(queue="celery", tenant="acme")
    protocol.accept(queue="celery", tenant="trial")
    later = protocol.accept(queue="mail", tenant="acme")
    bare = protocol.accept(queue=None, tenant="acme")
    sql("UPDATE job SET created_at = now() - interval '300 s' WHERE id IN (%s, %s)", first, bare)
    sql("UPDATE job SET run_after = now() + interval '1 hour', eta = now() + interval '1 hour' WHERE id = %s", later)
    ages = values(lab, "queue_oldest_age_seconds")
    assert set(ages) == {("celery", "acme"), ("celery", "trial"), ("", "acme")}
    assert 299 < ages["celery", "acme"] < 400
    assert 299 < ages["", "acme"] < 400
    assert 0 <= ages["celery", "trial"] < 100
    assert values(lab, "queued_jobs") == {"celery": 3, "mail": 1}
    # Delayed jobs are not late, and a job that was put back has started before.
    never = values(lab, "never_started_jobs")
    assert never == {"celery": 1, "mail": 0, "": 1}
    assert values(lab, "never_started_oldest_age_seconds")["celery"] > 299
    sql("UPDATE job SET started_at = now() WHERE id = %s", first)
    assert values(lab, "never_started_jobs")["celery"] == 0
    assert values(lab, "never_started_oldest_age_seconds")["celery"] < 100


def test_live_jobs_tell_the_age_of_the_present_attempt(lab: Lab, protocol: Protocol, sql: Sql) -> None:
    job = protocol.accept()
    assert protocol.claim(job)
    assert values(lab, "live_jobs") == {"leased": 0, "running": 1}
    sql("UPDATE job SET leased_at = now() - interval '90 s', started_at = now() - interval '9 days' WHERE id = %s", job)
    assert 89 < values(lab, "live_oldest_age_seconds")["running"] < 200
    assert values(lab, "overdue_leases") == {(): 0}
    sql("UPDATE job SET lease_until = now() - interval '1 s' WHERE id = %s", job)
    assert values(lab, "overdue_leases") == {(): 1}


def test_an_expired_lease_says_whether_its_worker_was_alive(lab: Lab, protocol: Protocol, sql: Sql) -> None:
    """The worker of `gone` was seen before its next renewal was due, the one of `active` after it."""

    def expire(node: str, seen: str) -> None:
        protocol.owner = f"{node}/1/1"
        job = protocol.accept()
        assert protocol.claim(job, ttl=30)
        protocol.store.rows(
            "WORKER_SEEN", node=node, pid=1, version="1", pool="prefork", concurrency=1, connections=1, queues=["q"]
        )
        sql("UPDATE job SET lease_until = now() - interval '1 s' WHERE id = %s", job)
        sql(f"UPDATE worker SET seen_at = now() + interval '{seen}' WHERE node = %s", node)

    expire("gone@a", "-26 s")  # within 10 s after the last renewal, which was 31 s ago
    expire("active@b", "-5 s")
    expire("odd/name@c", "0 s")
    assert len(protocol.sweep()) == 3
    assert values(lab, "lease_expirations_total") == {"active": 2, "gone": 1}
    assert values(lab, "retries_total")["lease_expired"] == 3
    # An owner that comes back too late and is not swept yet is alive itself.
    protocol.owner = "unseen@d/1/1"
    claimed = protocol.claim(protocol.accept(), ttl=30)
    assert claimed is not None
    sql("UPDATE job SET lease_until = now() - interval '1 s' WHERE id = %s", claimed.lease.job)
    assert protocol.leave(claimed) is not None
    assert values(lab, "lease_expirations_total") == {"active": 3, "gone": 1}
    # One that ends in time is none.
    claimed = protocol.claim(protocol.accept(), ttl=30)
    assert claimed is not None
    assert protocol.leave(claimed) is not None
    assert values(lab, "lease_expirations_total") == {"active": 3, "gone": 1}


def test_ends_retries_and_parks_are_counted_by_the_database_itself(lab: Lab, sql: Sql) -> None:
    pay = lab.effect("pay", lookup=True, not_happened_on=(ConnectionRefusedError,))
    task = lab.task(lambda self: pay().ref, effects=[pay])
    lab.run(task)
    lab.behaviour["pay"] = TimeoutError("no answer")
    parked = lab.run(task)
    lab.behaviour["pay"] = ConnectionRefusedError("closed")
    lab.run(lab.task(lambda self: pay().ref, effects=[pay], max_attempts=1))
    lab.run(lab.task(lambda self: self.retry(exc=ValueError("a secret: 4711"), countdown=9), effects=[]))
    assert values(lab, "jobs_finished_total") == {"succeeded": 1, "failed": 2, "cancelled": 0}
    assert values(lab, "jobs_parked_total")["outcome_unknown"] == 1
    assert values(lab, "retries_total")["retry"] == 3  # apply() runs them at once
    assert values(lab, "unknown_operations") == {pay.name: 1}
    assert values(lab, "parked_jobs") == {"outcome_unknown": 1}
    sql("UPDATE operation SET intent_at = now() - interval '1 hour', next_reconcile_at = now() - interval '60 s'")
    assert 3599 < values(lab, "unknown_oldest_age_seconds")[pay.name] < 3700
    assert values(lab, "reconcile_lag_seconds")[()] > 59
    lab.verdict = Unresolved("closed")
    lab.reconcile()
    lab.verdict = Happened("pay-1")
    lab.reconcile()
    assert lab.status(parked) != "unknown"
    assert values(lab, "reconcile_attempts_total") == {(): 2}
    assert values(lab, "reconcile_results_total") == {"outcome_confirmed": 1, "unresolved": 1, "not_happened": 0}
    assert values(lab, "unknown_operations") == {}
    assert values(lab, "retries_total")["resolved"] == 1
    # No word of a reason or an error becomes a label.
    assert "4711" not in repr(lab.safe.metrics())


def test_hand_written_ends_count_and_rolled_back_ones_do_not(lab: Lab, protocol: Protocol, sql: Sql, dsn: str) -> None:
    job, other = protocol.accept(), protocol.accept()
    sql("UPDATE job SET status = 'cancelled', reason = 'by hand' WHERE id = %s", job)
    with psycopg.connect(dsn, options="-c search_path=safe_effects") as connection:
        connection.execute("UPDATE job SET status = 'cancelled' WHERE id = %s", (other,))
        connection.rollback()
    assert values(lab, "jobs_finished_total")["cancelled"] == 1


def test_counting_waits_for_nobody_and_folding_loses_nothing(lab: Lab, protocol: Protocol, sql: Sql, dsn: str) -> None:
    with psycopg.connect(dsn, options="-c search_path=safe_effects") as held:
        # A transaction of a caller that has counted and is not over.
        held.execute("INSERT INTO tally (name, label) VALUES ('retries', 'retry')")
        lab.safe.count("retries", "retry")
        assert protocol.store.rows("FOLD", limit=100)[0].rows == 1
        assert values(lab, "retries_total")["retry"] == 1
        held.commit()
    assert values(lab, "retries_total")["retry"] == 2
    lab.safe.sweep()
    assert sql("SELECT count(*) AS n FROM tally") == [{"n": 0}]
    assert values(lab, "retries_total")["retry"] == 2

    def count() -> None:
        for _ in range(20):
            lab.safe.count("retries", "retry")

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        lab.safe.sweeper.fold_counters()
    assert values(lab, "retries_total")["retry"] == 82
    lab.safe.sweeper.fold_counters()
    assert values(lab, "retries_total")["retry"] == 82


def test_a_double_effect_is_counted_with_its_evidence(lab: Lab, protocol: Protocol, sql: Sql) -> None:
    claimed = protocol.claim(protocol.accept())
    assert claimed is not None
    nonce = protocol.intent(claimed)
    assert nonce is not None
    protocol.outcome(claimed, nonce)
    assert values(lab, "double_effects_total") == {(): 0}
    late = {"ref": "again", "nonce": uuid4(), "fence": 1, "owner": "late@a/1/1"}
    for _ in range(2):
        protocol.store.rows("LATE_OUTCOME", key=f"{claimed.lease.job}:1", **late)
    assert values(lab, "double_effects_total") == {(): 1}
    assert values(lab, "double_effect_operations") == {(): 1}


def test_limits_tell_what_stands_against_them(lab: Lab, protocol: Protocol) -> None:
    lab.safe.set_limits(Limits(tenant_queued=5, tenant_running=2, pool_running={"gpu": 1}))
    lab.safe.set_limits(Limits(tenant_queued=2), tenant="acme")
    task = lab.task(lambda self: None, effects=[])
    for _ in range(2):
        task.apply_async(tenant="acme")
    with pytest.raises(AdmissionRejected):
        task.apply_async(tenant="acme")
    job = protocol.accept(tenant="trial", pool="gpu")
    assert protocol.claim(job)
    assert values(lab, "limit_value") == {
        ("*", "tenant_queued"): 5,
        ("*", "tenant_running"): 2,
        ("pool:gpu", "pool_running"): 1,
        ("tenant:acme", "tenant_queued"): 2,
    }
    assert values(lab, "limit_in_use") == {
        ("*", "tenant_queued"): 2,
        ("*", "tenant_running"): 1,
        ("pool:gpu", "pool_running"): 1,
        ("tenant:acme", "tenant_queued"): 2,
    }
    assert values(lab, "tenant_jobs") == {
        ("acme", "queued"): 2,
        ("acme", "running"): 0,
        ("trial", "queued"): 0,
        ("trial", "running"): 1,
    }
    assert values(lab, "admission_refusals_total") == {"tenant_queue_limit": 1}
    assert [(x.scope, x.limit) for x in lab.safe.limits() if x.current is not None] == list(values(lab, "limit_value"))


def test_deliveries_that_may_not_run_are_counted_by_class(lab: Lab) -> None:
    pay = lab.effect("pay")
    lab.behaviour["pay"] = TimeoutError("no answer")

    def body(self: Any) -> Any:
        return pay.keyed("invoice 7 of ann@example.org")().ref

    task = lab.task(body, effects=[pay])
    lab.run(task)
    waits = lab.run(task)
    lab.sql("UPDATE job SET run_after = now() + interval '1 hour' WHERE id = %s", waits)
    lab.run(task, job=waits)  # too early to be claimed
    assert values(lab, "deferrals_total") == {"waiting_for": 2}
    assert values(lab, "waiting_jobs") == {"waiting_for": 1}
    assert "ann@example.org" not in repr(lab.safe.metrics())
    done = lab.run(lab.task(lambda self: None, effects=[], name="metrics.done"))
    lab.sql("UPDATE job SET settled_at = now(), next_publish_at = NULL WHERE id = %s", done)
    lab.deliver(lab.app.tasks["metrics.done"], done)
    assert values(lab, "stale_deliveries_total") == {"finished": 1}


def test_sweeps_workers_and_pauses(lab: Lab, protocol: Protocol, sql: Sql) -> None:
    assert values(lab, "last_finished_timestamp_seconds") == {}
    lab.safe.sweep()
    (now,) = sql("SELECT extract(epoch FROM now())::float8 AS now")
    assert abs(values(lab, "last_finished_timestamp_seconds")["sweep"] - now["now"]) < 60
    assert values(lab, "maintenance_runs_total")["sweep"] == 1
    worker = {"pid": 1, "version": "0.1.0", "pool": "prefork", "concurrency": 2, "connections": 6, "queues": ["q"]}
    for node in ("a@x", "b@x"):
        protocol.store.rows("WORKER_SEEN", node=node, **worker)
    protocol.store.rows("WORKER_PAUSED", owner="a@x/77/1", seconds=4.5)
    protocol.store.rows("WORKER_PAUSED", owner="a@x/78/1", seconds=2.0)
    assert values(lab, "workers") == {"0.1.0": 2}
    assert values(lab, "longest_pause_seconds") == {(): 4.5}
    protocol.store.rows("WORKER_STOPPED", node="a@x", pid=1)
    assert values(lab, "workers") == {"0.1.0": 1}
    sql("UPDATE worker SET paused_at = now() - interval '2 days' WHERE node = 'a@x'")
    protocol.store.rows("WORKER_PAUSED", owner="a@x/78/1", seconds=2.0)
    assert values(lab, "longest_pause_seconds") == {(): 2.0}


def test_a_process_that_comes_back_late_to_its_leases_says_so(lab: Lab, sql: Sql) -> None:
    worker = {"pid": 1, "version": "1", "pool": "solo", "concurrency": 1, "connections": 1, "queues": ["q"]}

    def body(self: Any) -> None:
        (held,) = lab.safe.keeper.held()
        lab.safe.store.rows("WORKER_SEEN", node=held.lease.owner.split("/")[0], **worker)
        held.renewed -= 25  # as after a pause
        lab.safe.keeper.renew()
        lab.safe.keeper.speak()

    lab.run(lab.task(body, effects=[]))
    (row,) = sql("SELECT longest_pause FROM worker")
    assert 14 < row["longest_pause"] < 25


# -- how much of it ----------------------------------------------------------------------------------------------------

FILL = """
SET search_path = safe_effects;
SET session_replication_role = replica;
INSERT INTO job (id, task, status, reason, tenant, pool, queue, args_digest, envelope, outcome_ref, created_at,
                 finished_at, settled_at, lease_token, lease_owner, lease_until, leased_at, waiting_for,
                 next_publish_at, gives_up_at)
SELECT g::text || '-{tag}', 'tests.task', '{status}', 'outcome_unknown', 'tenant-' || g %% {tenants},
       CASE WHEN g %% 5 = 0 THEN 'gpu' END, 'queue-' || g %% 3, 'd', '{{}}', 'ref', now() - g * interval '1 ms',
       CASE WHEN '{status}' IN ('succeeded', 'failed') THEN now() - g * interval '1 ms' END, now(),
       CASE WHEN '{status}' = 'running' THEN gen_random_uuid() END,
       CASE WHEN '{status}' = 'running' THEN 'w@h/1/1' END,
       CASE WHEN '{status}' = 'running' THEN now() + interval '1 hour' END, now(),
       CASE WHEN '{status}' = 'queued' AND g %% 50 = 0 THEN 'slot/pool/gpu' END,
       CASE WHEN '{status}' = 'queued' THEN now() + g * interval '1 ms' END, now() + interval '1 day'
  FROM generate_series(1, {n}) g;
"""
OPERATIONS = """
INSERT INTO operation (key, job_id, step, ordinal, effect, status, fence, nonce, args_digest, provider_ref, intent_at,
                       next_reconcile_at, double_at)
SELECT g || '-{status}', g::text, '1', 1, 'effect-' || g %% {effects}, '{status}', 1, gen_random_uuid(), 'd', 'ref',
       now() - g * interval '1 ms', now() + g * interval '1 ms', CASE WHEN g %% 5000 = 0 THEN now() END
  FROM generate_series(1, {n}) g;
"""


def fill(dsn: str, *, finished: int, queued: int, running: int, unknown: int, tenants: int = 40) -> None:
    """Rows as they are after long operation, without a trigger, and the planner's knowledge of them."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        for status, n in (("succeeded", finished), ("queued", queued), ("running", running), ("unknown", unknown)):
            text = FILL.format(status=status, n=n, tenants=tenants, tag=status)
            connection.execute(text.replace("%%", "%").encode())
        for status, n in (("outcome_confirmed", finished), ("unknown", unknown)):
            text = OPERATIONS.format(status=status, n=n, effects=100)
            connection.execute(text.replace("%%", "%").encode())
        connection.execute(
            b"INSERT INTO tally (name, label) SELECT 'retries', 'retry' FROM generate_series(1, 3000);"
            b"INSERT INTO folded (name, label, value) SELECT 'retries', 'r' || g, 1 FROM generate_series(1, 3000) g"
        )
        connection.execute(b"VACUUM (ANALYZE) safe_effects.job")
        connection.execute(b"VACUUM (ANALYZE) safe_effects.operation")
        connection.execute(b"ANALYZE safe_effects.tally, safe_effects.folded")


class Explained:
    """What the database did for each statement of one scrape."""

    def __init__(self, lab: Lab, dsn: str, analyze: bool) -> None:
        self.lab = lab
        self.plans: dict[str, Any] = {}
        store = lab.safe.store
        original = store._execute
        option = "ANALYZE, TIMING OFF, FORMAT JSON" if analyze else "FORMAT JSON"

        def execute(conn: Any, statement: str, params: dict[str, Any]) -> Any:
            with psycopg.connect(dsn, autocommit=True) as connection:
                text = f"EXPLAIN ({option}) " + store.sql[statement]
                found = connection.execute(text.encode(), params).fetchone()
                assert found is not None
                self.plans[statement] = found[0][0]
            return original(conn, statement, params)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(store, "_execute", execute)
            self.metrics = lab.safe.metrics()

    def nodes(self, statement: str) -> Iterator[dict[str, Any]]:
        def walk(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
            yield node
            for child in node.get("Plans", ()):
                yield from walk(child)

        yield from walk(self.plans[statement]["Plan"])


INDEXES = {"METRICS_QUEUES": {"job_ready"}}
"""Where another index would do for a small table only."""
TABLES = {"job", "operation", "transition", "tally", "folded"}


def test_every_statement_of_a_scrape_reads_a_bounded_part_of_a_table_by_an_index(lab: Lab, dsn: str) -> None:
    fill(dsn, finished=40_000, queued=6_000, running=300, unknown=1_500)
    lab.safe.set_limits(Limits(tenant_queued=10, tenant_running=10, pool_running={"gpu": 100}))
    explained = Explained(lab, dsn, analyze=True)
    wanted = {name for name in vars(statements) if name.startswith("METRICS_")}
    assert wanted <= set(explained.plans)
    assert set(explained.plans) - wanted == {"LIMITS"}
    for statement in wanted:
        for node in explained.nodes(statement):
            if node.get("Relation Name") in TABLES:
                scan = (statement, node["Node Type"], node.get("Index Name"))
                assert node["Node Type"] in {"Index Scan", "Index Only Scan", "Bitmap Heap Scan"}, scan
                index = node.get("Index Name") or node["Plans"][0].get("Index Name")
                assert index in INDEXES.get(statement, {index}), (scan, index)
                read = node["Actual Rows"] + node.get("Rows Removed by Filter", 0)
                assert read <= 10_000, (scan, read)


@pytest.mark.parametrize("bound", ["SAMPLE", "COUNTED", "MOST"])
def test_no_table_is_read_beyond_the_bounds(lab: Lab, dsn: str, monkeypatch: pytest.MonkeyPatch, bound: str) -> None:
    fill(dsn, finished=2_000, queued=3_000, running=200, unknown=300, tenants=4)
    for name in ("SAMPLE", "COUNTED", "OF_TENANTS", "MOST"):
        monkeypatch.setattr(engine_metrics, name, 50 if bound in {name, "COUNTED"} else 100_000)
    if bound == "COUNTED":
        monkeypatch.setattr(engine_metrics, "MOST", 100_000)
    explained = Explained(lab, dsn, analyze=True)
    governed = {
        "SAMPLE": {"METRICS_QUEUES"},
        "COUNTED": {"METRICS_DEPTHS", "METRICS_USE"},
        "MOST": {"METRICS_LIVE", "METRICS_UNKNOWN", "METRICS_PARKED", "METRICS_WAITING", "METRICS_COUNTERS"},
    }[bound]
    for statement in governed:
        for node in explained.nodes(statement):
            if node.get("Relation Name") in TABLES:
                assert node["Actual Rows"] <= 50, (statement, node["Node Type"], node["Actual Rows"])


def test_labels_are_bounded_however_many_tenants_queues_and_effects_there_are(
    lab: Lab, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(dsn, finished=10, queued=900, running=400, unknown=300, tenants=300)
    for n in range(300):
        lab.safe.count("admission_refusals", f"reason-{n}")
        lab.safe.count(f"something-{n % 7}", f"label-{n}")
    top = engine_metrics.TOP
    ages = values(lab, "queue_oldest_age_seconds")
    assert len({tenant for _, tenant in ages}) == top + 1
    assert ("queue-0", "other") in ages
    assert len(values(lab, "unknown_operations")) == top + 1
    assert sum(values(lab, "unknown_operations").values()) == 300
    assert len({tenant for tenant, _ in values(lab, "tenant_jobs")}) <= 3 * top
    refused = values(lab, "admission_refusals_total")
    assert len(refused) == engine_metrics.LIMITS + 1
    assert sum(refused.values()) == 300
    assert sum(values(lab, "events_total").values()) == 300
    assert len(values(lab, "events_total")) == 7
    monkeypatch.setattr(engine_metrics, "QUEUES", 2)
    assert len(values(lab, "queued_jobs")) == 2


# -- how it is told ----------------------------------------------------------------------------------------------------


def test_names_labels_and_units_follow_the_conventions() -> None:
    for family in engine_metrics.CATALOG:
        assert re.fullmatch(r"safe_effects_[a-z][a-z_]*[a-z]", family.name)
        assert (family.kind == "counter") == family.name.endswith("_total")
        assert family.help.endswith(".")
        assert all(re.fullmatch(r"[a-z][a-z_]*", label) for label in family.labels)
        if any(word in family.name for word in ("_age", "_lag", "_pause", "timestamp")):
            assert family.name.endswith("_seconds")
    assert len({family.name for family in engine_metrics.CATALOG}) == len(engine_metrics.CATALOG)


def test_prometheus_reads_the_text(lab: Lab, protocol: Protocol, request: pytest.FixtureRequest) -> None:
    from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
    from prometheus_client.parser import text_string_to_metric_families as classic

    protocol.accept(tenant='odd "tenant"\n\\ 料', queue="celery")
    plain, content_type = prometheus.text(lab.safe)
    assert content_type.startswith("text/plain")
    families = {family.name: family for family in classic(plain.decode())}
    assert len(families) == len(engine_metrics.CATALOG)
    (sample,) = families[P + "queue_oldest_age_seconds"].samples
    assert sample.labels == {"queue": "celery", "tenant": 'odd "tenant"\n\\ 料'}
    modern, content_type = prometheus.text(lab.safe, "application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    read = list(openmetrics(modern.decode()))  # type: ignore[no-untyped-call]
    assert len(read) == len(engine_metrics.CATALOG)
    from tests.support.promtool import promtool

    done = subprocess.run([promtool(request), "check", "metrics"], input=plain, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


def test_a_registry_of_the_users_own_takes_the_collector(lab: Lab) -> None:
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry(auto_describe=True)
    registry.register(prometheus.SafeEffectsCollector(lab.safe))
    assert b"safe_effects_jobs_finished_total" in generate_latest(registry)


def _get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as exc:
        return exc.code, exc.read().decode()


def test_the_exporter_answers_scrapes_and_health(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    with prometheus.Exporter(lab.safe, port=0) as exporter:
        thread = threading.Thread(target=exporter.serve_forever, args=(0.05,))
        thread.start()
        try:
            url = f"http://127.0.0.1:{exporter.server_address[1]}"
            assert exporter.server_address[0] == "127.0.0.1"
            status, text = _get(f"{url}/metrics?x=1")
            assert (status, "safe_effects_jobs_finished_total" in text) == (200, True)
            assert _get(f"{url}/healthz") == (200, "ok\n")
            assert _get(f"{url}/")[0] == 404
            secret = lab.safe.config.database_url
            lab.safe.close()
            lab.safe._store = None
            monkeypatch.setattr(lab.safe, "_config", None)
            lab.app.conf.safe_effects_database_url = "postgresql+psycopg://user:secret-word@127.0.0.1:1/nowhere"
            for path in ("/metrics", "/healthz"):
                status, text = _get(f"{url}{path}")
                assert status == 503
                assert "[store_unavailable]" in text
                assert "secret-word" not in text
            lab.safe._store, lab.app.conf.safe_effects_database_url = None, secret
            monkeypatch.setattr(lab.safe, "_config", None)
            assert _get(f"{url}/healthz")[0] == 200
        finally:
            exporter.shutdown()
            thread.join()


def test_reading_writes_nothing(lab: Lab, dsn: str, sql: Sql) -> None:
    """An observer's role is enough for an exporter."""
    reader = f"reader_{uuid4().hex[:12]}"
    sql(f"CREATE ROLE {reader}")
    lab.safe.upgrade(grants={"observer": [reader]})
    store = lab.safe.store
    original = store._execute

    def execute(conn: Any, statement: str, params: dict[str, Any]) -> Any:
        conn.execute(f"SET ROLE {reader}".encode())
        try:
            return original(conn, statement, params)
        finally:
            conn.execute("RESET ROLE")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "_execute", execute)
        assert lab.safe.metrics()
    sql(f"DROP OWNED BY {reader}")
    sql(f"DROP ROLE {reader}")


def test_a_scrape_is_planned_for_its_bounds_each_time(lab: Lab) -> None:
    """A prepared statement's generic plan, from the sixth run on, knows nothing of them."""
    for _ in range(8):
        lab.safe.metrics()
    with lab.safe.store.connections.connection() as conn:
        found = conn.execute("SELECT statement, generic_plans, custom_plans FROM pg_prepared_statements").fetchall()
    ours = [(generic, custom) for statement, generic, custom in found if "%" not in statement and "$1" in statement]
    bounded = [row for row in ours if row[1] + row[0] == 8]
    assert len(bounded) >= 7
    assert all(generic == 0 for generic, _ in bounded)
