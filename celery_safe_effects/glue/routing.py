"""Where a message goes: kept so that any process of the app can send it again, to the same place."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from kombu import Exchange, Queue
from kombu.common import Broadcast

if TYPE_CHECKING:
    from celery import Celery

_DROPPED: Final = frozenset(
    {"producer", "retry", "retry_policy", "event_dispatcher", "timeout", "confirm_timeout", "declare", "expiration"}
)
_DIRECT: Final = "direct"
UNDECLARED: Final = "undeclared"
"""Kept beside a queue that was made on the spot: how it is declared, only its maker knows."""


def kept(app: Celery, options: Mapping[str, Any]) -> dict[str, Any]:
    """The publishing options worth keeping: names instead of objects, nothing that belongs to one connection."""
    found = {name: value for name, value in options.items() if name not in _DROPPED and value is not None}
    exchange = found.get("exchange")
    if exchange and found.get("routing_key"):
        kind = getattr(exchange, "type", None) or _type_of(app, str(exchange))
        if kind and kind != _DIRECT:
            found["exchange_type"] = kind  # a broker of kombu's own knows it in the process alone that declared it
    if isinstance(exchange, Exchange):
        found["exchange"] = exchange.name
    queue = found.get("queue")
    if isinstance(queue, Queue):
        found["queue"] = queue.name
        if isinstance(queue, Broadcast) or dict.get(app.amqp.queues, queue.name) is not queue:
            _spell_out(queue, found)
    return found


def _spell_out(queue: Queue, found: dict[str, Any]) -> None:
    """Another process has no queue of this name, or another one: say what Celery would make of it."""
    exchange_type = found.get("exchange_type") or getattr(queue.exchange, "type", None) or _DIRECT
    if exchange_type == _DIRECT and not (found.get("exchange") and found.get("routing_key")):
        found[UNDECLARED] = True
        return
    del found["queue"]
    found["exchange_type"] = exchange_type
    if not found.get("exchange"):
        found["exchange"] = queue.exchange.name
    if not found.get("routing_key"):
        found["routing_key"] = queue.routing_key or ""


def of_delivery(delivery: Mapping[str, Any]) -> dict[str, Any]:
    """The same, of a message that a worker received."""
    found = {"priority": delivery.get("priority")}
    if delivery.get("exchange"):
        return {**found, "exchange": delivery["exchange"], "routing_key": delivery.get("routing_key") or ""}
    return {**found, "queue": delivery.get("routing_key") or None}


def to_send(app: Celery, options: Mapping[str, Any]) -> dict[str, Any]:
    """Kept options, as Celery's sender takes them."""
    found = dict(options)
    found.pop(UNDECLARED, None)
    if not found.get("exchange"):
        found.pop("exchange", None)
    queue = found.get("queue")
    if "exchange" in found:
        found["declare"] = leads_to(app, options)
    elif queue and not may_declare(app, options):
        found |= as_it_is(queue)
    return found


def leads_to(app: Celery, options: Mapping[str, Any]) -> list[Any]:
    """What to declare for a message to an exchange, as far as that is known.

    A broker that lost everything has lost that, too, and a producer may never have declared it.
    """
    exchange, lands = options.get("exchange"), lands_in(app, options)
    if not exchange:
        return []
    if lands:
        return [app.amqp.queues[lands]]
    known = [one.exchange for one in app.amqp.queues.values() if getattr(one.exchange, "name", "") == exchange]
    kind = options.get("exchange_type", _DIRECT)
    return known[:1] or ([Exchange(exchange, type=kind)] if kind != _DIRECT else [])


def _type_of(app: Celery, exchange: str) -> str | None:
    found = [one.exchange.type for one in app.amqp.queues.values() if getattr(one.exchange, "name", "") == exchange]
    return str(found[0]) if found else None


def as_it_is(queue: str) -> dict[str, Any]:
    """To a queue by its name, however it was declared."""
    return {"queue": Queue(queue, Exchange(""), routing_key=queue), "declare": []}


def lands_in(app: Celery, options: Mapping[str, Any]) -> str | None:
    """The queue of the broker in which a message with these kept options waits; ``None``: not known, or several."""
    exchange, routing_key = options.get("exchange"), options.get("routing_key")
    queue = options.get("queue")
    if exchange and (routing_key or options.get("exchange_type", _DIRECT) != _DIRECT):
        bound = [
            one.name
            for one in app.amqp.queues.values()
            if one.exchange is not None
            and not isinstance(one, Broadcast)
            and one.exchange.name == exchange
            and _takes(one, routing_key)
        ]
        return str(bound[0]) if len(bound) == 1 else None
    if queue is None:
        queue = app.conf.task_default_queue
    alias = app.amqp.queues.aliases.get(queue)
    return str(alias.name if alias is not None else queue)


def _takes(queue: Queue, routing_key: str | None) -> bool:
    """Whether a binding takes a routing key; of a topic, `*` stands for one word and `#` for any number of them."""
    if queue.exchange.type != "topic" or not routing_key or not queue.routing_key:
        return bool(queue.routing_key == routing_key)
    words = {"*": r"\.[^.]+", "#": r"(\.[^.]+)*"}
    pattern = "".join(words.get(word, re.escape(f".{word}")) for word in queue.routing_key.split("."))
    return re.fullmatch(pattern, f".{routing_key}") is not None


def is_by_name(app: Celery, options: Mapping[str, Any]) -> bool:
    """Whether the message goes to a queue that workers consume by its name."""
    name = options.get("queue") or (None if options.get("exchange") else app.conf.task_default_queue)
    return bool(name) and not isinstance(dict.get(app.amqp.queues, str(name)), Broadcast)


def priority(options: Mapping[str, Any]) -> int:
    """The priority, within what a broker can tell apart."""
    try:
        return max(0, min(255, int(options.get("priority") or 0)))
    except (TypeError, ValueError):
        return 0


def may_declare(app: Celery, options: Mapping[str, Any]) -> bool:
    """Whether this process knows how the queue is declared, or may make it as Celery makes missing ones."""
    if options.get(UNDECLARED):
        return False
    queues, queue = app.amqp.queues, options.get("queue") or app.conf.task_default_queue
    return bool(queues.create_missing) or dict.__contains__(queues, queue) or queue in queues.aliases
