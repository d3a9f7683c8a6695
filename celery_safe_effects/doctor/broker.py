"""Broker, result backend, and workers that only the broker knows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final

from ..words import age
from .finding import Finding, Patient, names, problem, warning

PATIENCE: Final = 3.0
"""Seconds for which the broker is waited for."""
REDIS_VISIBILITY: Final = 3600.0
"""kombu's default."""
RABBITMQ_CONSUMER: Final = 1800.0
"""RabbitMQ's default."""


def _asked(client: Any, pattern: str) -> str | None:
    """A setting of a Redis server; ``None`` where it does not tell (managed ones do not)."""
    with contextlib.suppress(Exception):
        found = client.config_get(pattern)
        for key, value in found.items():
            text = value.decode() if isinstance(value, bytes) else str(value)
            if (key.decode() if isinstance(key, bytes) else key) == pattern:
                return text
    return None


def broker(p: Patient) -> Iterator[Finding]:
    """A broker that answers, keeps its messages, and leaves them with the worker that works on them."""
    connection = p.app.connection_for_read()
    try:
        connection.ensure_connection(max_retries=1, timeout=PATIENCE)
        kind = connection.transport.driver_type
        if kind == "redis":
            yield from _redis(p, connection.default_channel.client)
        elif kind == "amqp":
            yield from _rabbitmq(p)
    except Exception as exc:
        yield problem(
            "broker_unavailable",
            f"the broker does not answer ({type(exc).__name__})",
            "start it, or mend broker_url; accepted jobs wait in PostgreSQL",
        )
    finally:
        connection.release()


def _redis(p: Patient, client: Any) -> Iterator[Finding]:
    policy = _asked(client, "maxmemory-policy")
    if policy is not None and policy != "noeviction":
        yield warning(
            "broker_evicts",
            f"the broker may drop messages when it is full (maxmemory-policy {policy}): each waits until the sweep "
            "publishes it again",
            "set maxmemory-policy noeviction",
        )
    options = p.conf.broker_transport_options or {}
    timeout = float(options.get("visibility_timeout") or REDIS_VISIBILITY)
    if p.longest > timeout:
        yield warning(
            "visibility_timeout",
            f"a job ran for {age(p.longest)}, longer than the broker's visibility timeout ({age(timeout)}): messages "
            "are "
            "delivered again meanwhile, and counted as stale",
            "raise broker_transport_options['visibility_timeout'] above the longest run",
        )


def _rabbitmq(p: Patient) -> Iterator[Finding]:
    stated = [
        float(queue.queue_arguments["x-consumer-timeout"]) / 1000
        for queue in p.app.amqp.queues.values()
        if (queue.queue_arguments or {}).get("x-consumer-timeout")
    ]
    timeout = min([RABBITMQ_CONSUMER, *stated]) if not stated else min(stated)
    if p.longest > timeout:
        yield warning(
            "consumer_timeout",
            f"a job ran for {age(p.longest)}, longer than RabbitMQ's consumer timeout ({age(timeout)}, unless its "
            "configuration says otherwise): it closes the channel of a worker whose messages wait or run that long",
            "raise consumer_timeout in rabbitmq.conf, or x-consumer-timeout of the queue; with early acknowledgement, "
            "worker_prefetch_multiplier = 1 keeps messages from waiting behind a long job",
        )


def result_backend(p: Patient) -> Iterator[Finding]:
    """Results are Celery's; the row is the truth, but ``get()`` reads them."""
    client = getattr(p.app.backend, "client", None)
    if client is None or not hasattr(client, "config_get"):
        return
    save, appendonly = _asked(client, "save"), _asked(client, "appendonly")
    if save == "" and appendonly == "no":
        yield warning(
            "backend_not_persistent",
            "the result backend keeps nothing over a restart (save and appendonly are off): results of finished jobs "
            "read "
            "PENDING then",
            "turn appendonly on; an enqueue with the same idempotency key stores a lost result again",
        )
    policy = _asked(client, "maxmemory-policy")
    if policy not in (None, "noeviction") and not str(policy).startswith("volatile"):
        yield warning(
            "backend_evicts",
            f"the result backend may drop results and chords' counters when it is full (maxmemory-policy {policy})",
            "set maxmemory-policy noeviction or volatile-ttl",
        )


def strangers(p: Patient) -> Iterator[Finding]:
    """A worker that knows our tasks and has not told PostgreSQL of itself: it has no SafeEffects, or older code."""
    wanted = {task.name for task in p.safe_tasks}
    if not wanted:
        return
    known = {row.node for row in p.workers}
    answers: dict[str, Any] = {}
    with contextlib.suppress(Exception):  # that the broker does not answer is another finding
        answers = p.app.control.inspect(timeout=1.0).registered() or {}
    found = {
        node
        for node, registered in answers.items()
        if node not in known and wanted & {str(task).partition(" ")[0] for task in registered or ()}
    }
    if found:
        yield problem(
            "worker_without_library",
            f"{names(found)} know SafeTasks of this app and write nothing into its database: with older code they run "
            "them unclaimed",
            "deploy workers before producers, and end the old ones; or mend safe_effects_database_url there",
        )


CHECKS: Final = (broker, result_backend, strangers)
