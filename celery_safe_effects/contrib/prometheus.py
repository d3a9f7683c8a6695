"""Metrics for Prometheus: a collector for a registry of your own, and a small server. Needs the extra ``metrics``.

The numbers are read from PostgreSQL at each scrape, so one exporter is enough for any number of workers, and it does
not matter which process counted what, or died.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import psycopg
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from ..engine.metrics import CATALOG, Metric
from ..errors import SafeEffectsError

if TYPE_CHECKING:
    from ..app import SafeEffects

logger = logging.getLogger(__name__)

Family = CounterMetricFamily | GaugeMetricFamily


class SafeEffectsCollector(Collector):
    """Gives a registry the metrics of one app's database: ``REGISTRY.register(SafeEffectsCollector(safe))``.

    Arguments:
        safe: the app's :class:`~celery_safe_effects.SafeEffects`.
    """

    def __init__(self, safe: SafeEffects) -> None:
        self.safe = safe

    def collect(self) -> Iterator[Family]:
        """One family a metric, read now."""
        for metric in self.safe.metrics():
            yield _family(metric, metric.samples)

    def describe(self) -> Iterator[Family]:
        """The names alone; the database is not asked when a registry is made."""
        for family in CATALOG:
            yield _family(Metric(family.name, family.kind, family.help, ()), ())


def _family(metric: Metric, samples: Any) -> Family:
    labels = list(samples[0].labels) if samples else []
    made: Family
    if metric.kind == "counter":
        made = CounterMetricFamily(metric.name.removesuffix("_total"), metric.help, labels=labels)
    else:
        made = GaugeMetricFamily(metric.name, metric.help, labels=labels)
    for sample in samples:
        made.add_metric(list(sample.labels.values()), sample.value)
    return made


def text(safe: SafeEffects, accept: str = "") -> tuple[bytes, str]:
    """The metrics as a scrape answers them.

    Arguments:
        safe: the app's SafeEffects.
        accept: the scraper's ``Accept`` header; decides between Prometheus' own format and OpenMetrics.

    Returns:
        the text and its content type.

    Raises:
        StoreUnavailable: when the database cannot be reached.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(SafeEffectsCollector(safe))
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


class Exporter(ThreadingHTTPServer):
    """Serves ``/metrics`` and ``/healthz``.

    Arguments:
        safe: the app's SafeEffects.
        host, port: where to listen; port 0 takes a free one.
    """

    daemon_threads = True

    def __init__(self, safe: SafeEffects, host: str = "127.0.0.1", port: int = 9540) -> None:
        self.safe = safe
        self.reading = threading.Lock()
        if ":" in host:
            import socket

            self.address_family = socket.AF_INET6
        super().__init__((host, port), _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: Exporter
    server_version = "safe-effects"
    timeout = 30

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            self._answer(self._metrics)
        elif path == "/healthz":
            self._answer(self._health)
        else:
            self._send(404, "text/plain; charset=utf-8", b"there are /metrics and /healthz\n")

    do_HEAD = do_GET  # noqa: N815

    def _metrics(self) -> tuple[bytes, str]:
        with self.server.reading:  # however many ask: the database has one scrape at a time
            return text(self.server.safe, self.headers.get("Accept") or "")

    def _health(self) -> tuple[bytes, str]:
        self.server.safe.store.check_schema()
        return b"ok\n", "text/plain; charset=utf-8"

    def _answer(self, make: Any) -> None:
        try:
            body, content_type = make()
        except (SafeEffectsError, psycopg.Error) as exc:
            logger.warning("%s cannot be answered: %s", self.path, exc)
            code = getattr(exc, "code", "database")
            self._send(503, "text/plain; charset=utf-8", f"[{code}] the database cannot be asked\n".encode())
        else:
            self._send(200, content_type, body)

    def _send(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        logger.debug(format, *args)


__all__ = ["Exporter", "SafeEffectsCollector", "text"]
