"""A real worker's spans, in a file: the sender's trace through broker, retry, and a run after a killed child."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from opentelemetry.sdk.trace import TracerProvider

from celery_safe_effects.contrib.otel import SafeEffectsInstrumentor
from celery_safe_effects.testing import eventually
from tests.support.checks import wait_status
from tests.support.processes import Workers
from tests.support.services import Sql
from tests.support.spans import read_spans

pytestmark = pytest.mark.faults


@pytest.mark.slow
def test_spans_of_a_worker(app: Celery, workers: Workers, sql: Sql, tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    provider = TracerProvider()
    SafeEffectsInstrumentor().instrument_app(app, tracer_provider=provider)
    worker = workers("a", env={"SAFE_EFFECTS_TEST_SPANS": str(path)})
    with provider.get_tracer("web").start_as_current_span("POST /orders") as sender:
        paid = app.tasks["tests.charge"].delay("ann", 500).id
        slow = app.tasks["tests.sleep"].delay(3).id
    trace = f"0x{sender.get_span_context().trace_id:032x}"
    parent = f"0x{sender.get_span_context().span_id:016x}"

    def spans(job: str) -> list[dict[str, Any]]:
        return [s for s in read_spans(path) if job in s["attributes"].values()]

    wait_status(sql, paid, "succeeded")
    wait_status(sql, slow, "running")
    worker.kill_child()  # its span is gone with it; the next attempt's is in the same trace
    wait_status(sql, slow, "succeeded")
    eventually(lambda: len(spans(paid)) == 2 and len(spans(slow)) == 1, 10, message="the spans are written")
    effect, job = spans(paid)
    assert (job["name"], job["kind"], job["parent_id"]) == ("process tests.charge", "SpanKind.CONSUMER", parent)
    assert job["attributes"]["messaging.destination.name"] == "celery"
    assert job["attributes"]["safe_effects.job.status"] == "succeeded"
    assert (effect["name"], effect["parent_id"]) == ("effect charge", job["context"]["span_id"])
    (again,) = spans(slow)
    assert again["attributes"]["safe_effects.job.attempt"] == 2
    assert again["parent_id"] == parent
    assert {s["context"]["trace_id"] for s in [*spans(paid), *spans(slow)]} == {trace}
    assert "ann" not in path.read_text()
