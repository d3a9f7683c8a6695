"""``metrics``: what the database says about itself, for Prometheus and for people, with rules and a dashboard."""

from __future__ import annotations

import signal
from importlib import resources
from typing import TYPE_CHECKING, Any, Final

import click

from ..errors import ConfigurationError
from ..words import address
from .command import Answer, Console, command, extra

if TYPE_CHECKING:
    from ..app import SafeEffects

SHIPPED: Final = {"rules": "alerts.yml", "dashboard": "dashboard.json"}


def _check(port: int | None, host: str | None, rules: bool, dashboard: bool, **_: Any) -> None:
    if host is not None and port is None:
        raise click.UsageError("--host goes with --port")
    if sum((port is not None, rules, dashboard)) > 1:
        raise click.UsageError("choose one of --port, --rules and --dashboard")


@command(schema=False, check=_check)
@click.option("--port", type=click.IntRange(0, 65535), help="Serve /metrics and /healthz there, until ended.")
@click.option("--host", help="With --port: the address to listen on.  [default: 127.0.0.1]")
@click.option("--rules", is_flag=True, help="Print the alerting rules for Prometheus.")
@click.option("--dashboard", is_flag=True, help="Print the dashboard for Grafana.")
def metrics(
    console: Console, safe: SafeEffects, port: int | None, host: str | None, rules: bool, dashboard: bool
) -> Answer:
    """Print the metrics once, or serve them to Prometheus.

    They are read from PostgreSQL at each scrape, whatever process they tell of: one exporter is enough.
    """
    if rules or dashboard:
        shipped = SHIPPED["rules" if rules else "dashboard"]
        text = resources.files("celery_safe_effects.contrib.monitoring").joinpath(shipped).read_text("utf-8")
        click.echo(text, nl=False)
        return Answer(streamed=True)
    if port is not None:
        return _serve(console, safe, host or "127.0.0.1", port)
    safe.store.check_schema()
    found = safe.metrics()
    if console.as_json:
        return Answer({"metrics": found})
    return Answer(lines=_prometheus().text(safe)[0].decode().splitlines())


def _serve(console: Console, safe: SafeEffects, host: str, port: int) -> Answer:
    prometheus = _prometheus()
    try:
        exporter = prometheus.Exporter(safe, host, port)
    except OSError as exc:
        raise ConfigurationError(f"cannot listen on {host}:{port}: {exc.strerror or exc}") from None

    def end(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        with exporter:
            where = f"{address(host, exporter.server_address[1])}/metrics"
            console.note(f"metrics are at {where}")
            if console.as_json:
                console.emit({"url": where})
            exporter.serve_forever()
    except KeyboardInterrupt:
        return Answer(streamed=True)
    finally:
        signal.signal(signal.SIGTERM, before)
    return Answer(streamed=True)


def _prometheus() -> Any:
    with extra("metrics", "prometheus-client", "Prometheus' text, but not --json,"):
        from ..contrib import prometheus
    return prometheus


__all__ = ["metrics"]
