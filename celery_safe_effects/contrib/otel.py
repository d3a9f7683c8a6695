"""Traces for OpenTelemetry: spans of jobs, effects and lookups, in the trace of who sent the job; the extra ``otel``.

::

    from celery_safe_effects.contrib.otel import SafeEffectsInstrumentor

    SafeEffectsInstrumentor().instrument_app(app)

The context of the sender travels in the message's headers (W3C Trace Context, or whatever propagator is set) and is
stored with the job: a message that is published again, a job that runs again and a lookup hours later are found in the
same trace. No argument, result, reference, error text or key of the user's becomes an attribute.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

from opentelemetry import context as otel_context
from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, SpanKind, StatusCode, Tracer, TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from ..app import SafeEffects
from ..engine.tracing import Span, Tracing
from ..errors import ConfigurationError

if TYPE_CHECKING:
    from ..effects import Effect
    from ..engine.job import ActiveJob
    from ..store.hot import Intent, Row

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

SCOPE: Final = "celery_safe_effects"
SYSTEM: Final = "celery"
BAD: Final = frozenset({"failed", "unknown", "refused"})
"""Ends that a trace shows as errors."""
_W3C: Final = TraceContextTextMapPropagator()


def _quietly(default: Any) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Whatever goes wrong in tracing disturbs no job."""

    def decorate(fn: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(fn)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return fn(*args, **kwargs)
            except Exception:
                logger.warning("tracing failed; the job goes on without", exc_info=True)
                return default() if callable(default) else default  # type: ignore[no-any-return]

        return run

    return decorate


class SafeEffectsInstrumentor:
    """Switches tracing on and off for one app after another."""

    def instrument_app(self, app: Any, tracer_provider: TracerProvider | None = None) -> None:
        """Trace an app's jobs, effects and lookups.

        Arguments:
            app: the Celery app, or its :class:`~celery_safe_effects.SafeEffects`.
            tracer_provider: instead of the global one.

        Raises:
            ConfigurationError: when the app has no SafeEffects.
        """
        safe = _safe(app)
        tracer = trace.get_tracer(SCOPE, _version(), tracer_provider=tracer_provider)
        safe.hooks = dataclasses.replace(safe.hooks, tracing=OpenTelemetry(tracer))

    def uninstrument_app(self, app: Any) -> None:
        """Trace it no more; what runs already is traced to its end.

        Arguments:
            app: as before.
        """
        safe = _safe(app)
        safe.hooks = dataclasses.replace(safe.hooks, tracing=Tracing())


def _safe(app: Any) -> SafeEffects:
    found = app if isinstance(app, SafeEffects) else app.__dict__.get("_safe_effects")
    if found is None:
        raise ConfigurationError(f"the app {app.main!r} has no SafeEffects; add `SafeEffects(app)` before")
    return found


def _version() -> str:
    import importlib.metadata

    return importlib.metadata.version("celery-safe-effects")


class OpenTelemetry(Tracing):
    """Makes spans of what it is told.

    Arguments:
        tracer: whose spans they are.
    """

    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer

    @_quietly(None)
    def sends(self, headers: dict[str, Any], again_of: Any) -> None:
        """Put the sender's context into the headers; a retry keeps that of the first sender."""
        if again_of is not None:
            fields = propagate.get_global_textmap().fields
            headers.update({name: value for name in fields if isinstance(value := getattr(again_of, name, None), str)})
            return
        propagate.inject(headers)

    @_quietly(None)
    def sent_by(self, request: Any) -> str | None:
        """The sender's context as a ``traceparent``."""
        return _written(_extracted(request))

    @_quietly(Span)
    def job(self, task: Any, request: Any, job: ActiveJob) -> Span:
        """A consumer's span, child of the sender's and linked to it."""
        sender = _extracted(request)
        delivery = getattr(request, "delivery_info", None) or {}
        attributes = {
            "messaging.system": SYSTEM,
            "messaging.operation.type": "process",
            "messaging.operation.name": "process",
            "messaging.destination.name": delivery.get("routing_key") or "",
            "messaging.message.id": job.id,
            "messaging.client.id": getattr(request, "hostname", None) or "",
            "celery.task_name": task.name,
            "safe_effects.job.attempt": job.attempt,
            "safe_effects.job.fence": job.fence,
        }
        return self._span(f"process {task.name}", SpanKind.CONSUMER, sender, attributes, "safe_effects.job.status")

    @_quietly(Span)
    def effect(self, job: ActiveJob, effect: Effect[Any, Any], intent: Intent) -> Span:
        """A client's span, child of what is current: the job's, or one of the body's own."""
        attributes = {
            **_operation(job.id, effect.name, intent.step, intent.keyed),
            "safe_effects.effect.repeatable": effect.options.repeatable,
        }
        return self._span(f"effect {effect.name}", SpanKind.CLIENT, None, attributes, "safe_effects.operation.status")

    @_quietly(Span)
    def lookup(self, row: Row) -> Span:
        """A client's span, child of the call whose outcome is looked up, or of who sent the job."""
        attributes = {
            **_operation(row.job_id, row.effect, row.step, row.keyed),
            "safe_effects.operation.attempt": row.attempt,
            "safe_effects.reconcile.attempt": row.reconcile_attempts,
        }
        caller = _W3C.extract({"traceparent": row.trace}, Context()) if row.trace else None
        return self._span(f"lookup {row.effect}", SpanKind.CLIENT, caller, attributes, "safe_effects.lookup.verdict")

    def _span(
        self, name: str, kind: SpanKind, parent: Context | None, attributes: Mapping[str, Any], status: str
    ) -> Span:
        links = []
        if parent is not None:
            context = trace.get_current_span(parent).get_span_context()
            links = [Link(context)] if context.is_valid else []
        kept = {key: value for key, value in attributes.items() if value != ""}
        made = self.tracer.start_span(name, context=parent, kind=kind, attributes=kept, links=links)
        return _Watched(made, status)


def _operation(job_id: str, effect: str, step: str, keyed: bool) -> dict[str, Any]:
    """What identifies an operation; a business key may be anybody's name, and stays out."""
    found = {"safe_effects.job.id": job_id, "safe_effects.effect.name": effect, "safe_effects.operation.keyed": keyed}
    return found if keyed else {**found, "safe_effects.operation.step": step}


def _extracted(request: Any) -> Context:
    """The context that a delivery carries; an empty one where it carries none."""
    fields = propagate.get_global_textmap().fields
    carrier = {name: value for name in fields if isinstance(value := getattr(request, name, None), str)}
    return propagate.extract(carrier, context=Context())


def _written(context: Context) -> str | None:
    carrier: dict[str, str] = {}
    _W3C.inject(carrier, context)
    return carrier.get("traceparent")


class _Watched(Span):
    """A span of a job, an effect or a lookup."""

    def __init__(self, span: trace.Span, status: str) -> None:
        self.span = span
        self._status = status
        self.trace = _written(trace.set_span_in_context(span, Context()))

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Whatever is called belongs to the span; what it raises is told by :meth:`end`, without its text."""
        token = otel_context.attach(trace.set_span_in_context(self.span))
        try:
            yield
        finally:
            otel_context.detach(token)

    async def carry(self, awaitable: Awaitable[Any]) -> Any:
        """The same for something that is awaited."""
        with self.current():
            return await awaitable

    @_quietly(None)
    def end(self, status: str | None, exc: BaseException | None = None) -> None:
        """Tell how it ended."""
        if status is not None:
            self.span.set_attribute(self._status, str(status))
        if exc is not None and (status is None or str(status) in BAD):
            self.span.set_attribute("error.type", type(exc).__qualname__)
        if str(status) in BAD:
            self.span.set_status(StatusCode.ERROR)
        self.span.end()


__all__ = ["SafeEffectsInstrumentor"]
