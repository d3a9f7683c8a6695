"""Traces: spans of jobs, effects and lookups in the sender's trace, without anything that is nobody's business."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from celery_safe_effects import EffectRefused, Happened, Operation, Outcome, SafeEffects, Unresolved
from celery_safe_effects.contrib import otel
from celery_safe_effects.contrib.otel import SafeEffectsInstrumentor
from celery_safe_effects.errors import ConfigurationError
from celery_safe_effects.glue.envelope import Envelope
from tests.support.lab import Declined, Lab


class Traced:
    """A lab under trace, and a sender with a span of its own."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        SafeEffectsInstrumentor().instrument_app(lab.app, tracer_provider=self.provider)
        self.tracer = self.provider.get_tracer("sender")

    def send(self, task: Any, *args: Any, **options: Any) -> tuple[str, Any]:
        """Enqueue a job within a span; its id and the span's context."""
        with self.tracer.start_as_current_span("order") as span:
            job = task.apply_async(args, **options).id
        return str(job), span.get_span_context()

    def deliver(self, job: str) -> None:
        """Deliver a job's stored message once, as the sweep publishes it."""
        (row,) = self.lab.sql("SELECT task, envelope FROM job WHERE id = %s", job)
        stored = Envelope.decode(row["envelope"])
        task = self.lab.app.tasks[row["task"]]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.lab.safe.publisher, "deliver_now", lambda *ids: 0)
            headers = {name: value for name, value in stored.headers.items() if name in ("traceparent", "tracestate")}
            # apply() makes its request of options; a worker has a message's headers there.
            task.apply(stored.body[0], stored.body[1], task_id=job, headers=headers)

    def spans(self, prefix: str) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name.startswith(prefix)]


@pytest.fixture
def traced(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Iterator[Traced]:
    made = Traced(lab)
    original = otel._extracted

    def extracted(request: Any) -> Any:
        # A worker's request has a message's headers as attributes; the one of apply() has them apart.
        return original(SimpleNamespace(**(request.headers or {})))

    monkeypatch.setattr(otel, "_extracted", extracted)
    yield made
    made.provider.shutdown()


def test_a_job_and_its_effects_are_in_the_trace_of_who_sent_it(traced: Traced) -> None:
    pay, mail = traced.lab.effect("pay", idempotent_for=3600), traced.lab.effect("mail")
    inner: list[Any] = []

    def pays(op: Operation, *args: Any) -> Outcome[Any]:
        inner.append(trace.get_current_span().get_span_context().span_id)
        return Outcome("ref-secret", "result-secret")

    traced.lab.behaviour["pay"] = pays
    task = traced.lab.task(lambda self, card: [pay(card), mail.step("receipt")()][0].ref, effects=[pay, mail])
    job, sender = traced.send(task, "4111-secret", tenant="acme-secret", idempotency_key="key-secret")
    traced.deliver(job)
    (span,) = traced.spans("process")
    assert (span.name, span.kind) == (f"process {task.name}", SpanKind.CONSUMER)
    assert span.parent is not None
    assert (span.context.trace_id, span.parent.span_id) == (sender.trace_id, sender.span_id)
    assert [link.context.span_id for link in span.links] == [sender.span_id]
    attributes = dict(span.attributes or {})
    assert attributes.pop("messaging.client.id")
    attributes.pop("messaging.destination.name", None)  # apply() has none
    assert attributes == {
        "messaging.system": "celery",
        "messaging.operation.type": "process",
        "messaging.operation.name": "process",
        "messaging.message.id": job,
        "celery.task_name": task.name,
        "safe_effects.job.attempt": 1,
        "safe_effects.job.fence": 1,
        "safe_effects.job.status": "succeeded",
    }
    effects = traced.spans("effect")
    assert [(s.name, s.kind) for s in effects] == [
        (f"effect {pay.name}", SpanKind.CLIENT),
        (f"effect {mail.name}", SpanKind.CLIENT),
    ]
    assert all(s.parent is not None and s.parent.span_id == span.context.span_id for s in effects)
    assert inner == [effects[0].context.span_id]
    assert dict(effects[1].attributes or {}) == {
        "safe_effects.job.id": job,
        "safe_effects.effect.name": mail.name,
        "safe_effects.operation.keyed": False,
        "safe_effects.operation.step": "receipt",
        "safe_effects.effect.repeatable": False,
        "safe_effects.operation.status": "outcome_confirmed",
    }
    assert span.status.status_code is StatusCode.UNSET


def test_a_job_that_runs_again_is_in_the_same_trace_and_replays_make_no_span(traced: Traced) -> None:
    lab = traced.lab
    first, second = lab.effect("first", idempotent_for=3600), lab.effect("second", idempotent_for=3600)
    attempts: list[int] = []

    def body(self: Any) -> Any:
        attempts.append(self.job.attempt)
        first()
        if len(attempts) == 1:
            lab.crash(self)
        return second().ref

    task = lab.task(body, effects=[first, second])
    job, sender = traced.send(task)
    traced.deliver(job)
    traced.deliver(job)
    spans = traced.spans("process")
    assert [dict(s.attributes or {})["safe_effects.job.attempt"] for s in spans] == [1, 2]
    assert {s.context.trace_id for s in spans} == {sender.trace_id}
    assert all(s.parent is not None and s.parent.span_id == sender.span_id for s in spans)
    assert [s.name for s in traced.spans("effect")] == [f"effect {first.name}", f"effect {second.name}"]


def test_a_retry_keeps_the_context_of_the_first_sender(traced: Traced) -> None:
    headers: dict[str, Any] = {}
    tracing = traced.lab.safe.hooks.tracing
    request = type("Request", (), {"traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-01", "tracestate": "a=b"})()
    with traced.tracer.start_as_current_span("process of the attempt"):
        tracing.sends(headers, request)
        assert headers == {"traceparent": request.traceparent, "tracestate": "a=b"}
        headers.clear()
        tracing.sends(headers, None)
        assert headers["traceparent"] != request.traceparent


def test_a_lookup_is_in_the_trace_of_the_call_that_it_asks_about(traced: Traced) -> None:
    lab = traced.lab
    pay = lab.effect("pay", lookup=True)
    lab.behaviour["pay"] = TimeoutError("token=hunter2-secret")
    task = lab.task(lambda self: pay().ref, effects=[pay])
    job, sender = traced.send(task)
    traced.deliver(job)
    (span,), (call,) = traced.spans("process"), traced.spans("effect")
    assert dict(span.attributes or {})["safe_effects.job.status"] == "unknown"
    assert dict(call.attributes or {})["safe_effects.operation.status"] == "unknown"
    assert dict(call.attributes or {})["error.type"] == "OutcomeUnknown"
    assert call.status.status_code is span.status.status_code is StatusCode.ERROR
    lab.verdict = Unresolved("secret reason")
    lab.reconcile()
    inside: list[Any] = []

    def verdict(op: Operation) -> Happened:
        inside.append(trace.get_current_span().get_span_context().span_id)
        return Happened("ref-secret")

    lab.verdict = verdict
    lab.reconcile()
    lookups = traced.spans("lookup")
    assert [dict(s.attributes or {})["safe_effects.lookup.verdict"] for s in lookups] == [
        "unresolved",
        "outcome_confirmed",
    ]
    for lookup in lookups:
        assert lookup.context.trace_id == sender.trace_id
        assert lookup.parent is not None
        assert lookup.parent.span_id == call.context.span_id
        assert [link.context.span_id for link in lookup.links] == [call.context.span_id]
    assert inside == [lookups[1].context.span_id]
    assert "secret" not in repr([s.to_json() for s in traced.exporter.get_finished_spans()])


def test_a_whole_body_and_its_lookup(traced: Traced) -> None:
    verdicts: list[Any] = [Happened("found")]
    task = traced.lab.task(
        lambda self, how: {"lost": lambda: int("lost")}.get(how, str)() or how,
        effect_options={"lookup": lambda op: verdicts.pop()},
    )
    done, _ = traced.send(task, "fine")
    traced.deliver(done)
    lost, sender = traced.send(task, "lost")
    traced.deliver(lost)
    traced.lab.reconcile()
    spans = traced.spans("process")
    assert [dict(s.attributes or {})["safe_effects.job.status"] for s in spans] == ["succeeded", "unknown"]
    (lookup,) = traced.spans("lookup")
    assert lookup.context.trace_id == sender.trace_id


def test_nothing_secret_becomes_an_attribute(traced: Traced) -> None:
    lab = traced.lab
    pay = lab.effect("pay", refused_on=(Declined,))
    lab.behaviour["pay"] = Declined("the card 4111-secret was declined")

    def body(self: Any, card: str) -> Any:
        try:
            pay.keyed("invoice-of-ann-secret")(card)
        except EffectRefused:
            raise ValueError("secret in an error") from None

    task = lab.task(body, effects=[pay])
    job, _ = traced.send(task, "card-secret", tenant="tenant-secret", idempotency_key="key-secret")
    traced.deliver(job)
    (span,), (call,) = traced.spans("process"), traced.spans("effect")
    assert dict(span.attributes or {})["safe_effects.job.status"] == "failed"
    assert dict(span.attributes or {})["error.type"] == "ValueError"
    assert dict(call.attributes or {})["safe_effects.operation.status"] == "refused"
    assert "secret" not in repr([s.to_json() for s in traced.exporter.get_finished_spans()])


def test_an_async_effect_is_current_in_what_it_awaits(traced: Traced) -> None:
    import asyncio

    from celery_safe_effects import effect

    inside: list[Any] = []

    @effect(name=f"otel.{uuid4().hex}")
    async def fetch(op: Operation) -> str:
        await asyncio.sleep(0)
        inside.append(trace.get_current_span().get_span_context().span_id)
        return "fetched"

    async def body(self: Any) -> Any:
        return (await fetch()).ref

    task = traced.lab.task(body, effects=[fetch])
    job, sender = traced.send(task)
    traced.deliver(job)
    (call,), (span,) = traced.spans("effect"), traced.spans("process")
    assert inside == [call.context.span_id]
    assert call.parent is not None
    assert call.parent.span_id == span.context.span_id
    assert span.context.trace_id == sender.trace_id


def test_off_unless_switched_on(lab: Lab) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    task = lab.task(lambda self: None, effects=[])
    with provider.get_tracer("sender").start_as_current_span("order"):
        job = task.apply_async().id
    (row,) = lab.sql("SELECT envelope FROM job WHERE id = %s", job)
    assert b"traceparent" not in bytes(row["envelope"])
    SafeEffectsInstrumentor().instrument_app(lab.safe, tracer_provider=provider)
    lab.run(task)
    assert len([s for s in exporter.get_finished_spans() if s.name.startswith("process")]) == 1
    SafeEffectsInstrumentor().uninstrument_app(lab.app)
    lab.run(task)
    assert len([s for s in exporter.get_finished_spans() if s.name.startswith("process")]) == 1


def test_an_app_without_safe_effects_is_told(lab: Lab) -> None:
    from celery import Celery

    with pytest.raises(ConfigurationError, match="SafeEffects"):
        SafeEffectsInstrumentor().instrument_app(Celery("bare", set_as_current=False))
    assert isinstance(lab.safe, SafeEffects)


def test_a_tracer_that_fails_disturbs_no_job(traced: Traced, caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def start_span(self, *args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("no span today")

    tracing: Any = traced.lab.safe.hooks.tracing
    tracing.tracer = Broken()
    pay = traced.lab.effect("pay")
    job = traced.lab.run(traced.lab.task(lambda self: pay().ref, effects=[pay]))
    assert traced.lab.status(job) == "succeeded"
    assert "tracing failed" in caplog.text
    assert dataclasses.is_dataclass(traced.lab.safe.hooks)
