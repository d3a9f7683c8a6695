"""Spans of a test worker, as lines of JSON in a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from celery import Celery


def write_spans(app: Celery, path: str) -> None:
    """Trace an app's jobs into a file.

    Args:
        app: the app.
        path: the file; processes add to it.
    """
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor

    from celery_safe_effects.contrib.otel import SafeEffectsInstrumentor

    out = Path(path).open("a", buffering=1)  # noqa: SIM115
    exporter = ConsoleSpanExporter(out=out, formatter=lambda span: span.to_json(indent=None) + "\n")
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    SafeEffectsInstrumentor().instrument_app(app, tracer_provider=provider)


def read_spans(path: Path) -> list[dict[str, Any]]:
    """What has been written so far, in whole lines."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]
