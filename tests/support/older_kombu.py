"""What kombu before 5.7 has no settings for.

There, messages that a dead worker held come back at most once in 100 s on Redis. `unacked_restore_interval` and
`unacked_restore_throttle`, which the tests set, say otherwise since 5.7.
"""

from __future__ import annotations

from typing import Any

from kombu.transport import redis


def restore_as_told() -> None:
    """Make an older kombu heed the two settings, as far as the tests use them: one second, and every time."""
    if hasattr(redis.Channel, "unacked_restore_interval"):
        return
    restore_visible = redis.QoS.restore_visible
    register = redis.Transport.register_with_event_loop

    def impatient(connection: Any) -> bool:
        return "unacked_restore_interval" in (connection.client.transport_options or {})

    def restore(self: Any, start: int = 0, num: int = 10, interval: int = 10) -> Any:
        at_once = impatient(self.channel.connection)
        return restore_visible(self, start, num, 1 if at_once else interval)

    def register_and_restore(self: Any, connection: Any, loop: Any) -> Any:
        found = register(self, connection, loop)
        if impatient(connection):
            loop.call_repeatedly(1, self.cycle.maybe_restore_messages)
        return found

    redis.QoS.restore_visible = restore
    redis.Transport.register_with_event_loop = register_and_restore
