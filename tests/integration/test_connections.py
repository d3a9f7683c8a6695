"""The connections of a process: one that ended while nobody used it is found before a statement is sent on it."""

from __future__ import annotations

import contextlib
import select
import socket
import socketserver
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from celery_safe_effects.store.connection import Connections, DeadlineConnection, OwnConnection
from tests.support.pgbouncer import PgBouncer
from tests.support.services import Sql

HOW: dict[str, Any] = {"statement_timeout": 5.0, "prepare": "detected"}


@pytest.fixture(params=["pooled", "own"])
def connections(request: pytest.FixtureRequest, dsn: str) -> Iterator[Connections | OwnConnection]:
    made = OwnConnection(dsn, **HOW) if request.param == "own" else Connections(dsn, limit=lambda: 3, **HOW)
    yield made
    made.close()


def number_of(connection: DeadlineConnection) -> int:
    (pid,) = connection.execute("SELECT pg_backend_pid()").fetchone() or (0,)
    return int(pid)


def used(connections: Connections | OwnConnection) -> list[int]:
    """Have as many as there may be, all of them used and given back."""
    with contextlib.ExitStack() as stack:
        return [
            number_of(stack.enter_context(connections.connection()))
            for _ in range(connections.limit if isinstance(connections, Connections) else 1)
        ]


def test_a_server_that_ended_idle_connections_costs_no_statement(
    connections: Connections | OwnConnection, sql: Sql
) -> None:
    """A restart of the server, a fail-over, an administrator: whoever comes next does not hear of it."""
    before = used(connections)
    idle = connections._idle if isinstance(connections, Connections) else [connections._conn]
    for pid in before:
        sql("SELECT pg_terminate_backend(%s)", pid)
    for one in idle:
        assert one is not None
        assert select.select([one.fileno()], [], [], 10)[0], "the farewell did not come"
    assert not set(used(connections)) & set(before)


def test_a_farewell_counts_before_the_end(sql: Sql, dsn: str) -> None:
    """The server says that it ends the connection, and closes it when it gets to that."""
    with held_open(dsn) as through:
        connections = Connections(through, limit=lambda: 1, **HOW)
        with connections.connection() as connection:
            before = number_of(connection)
            idle = connection.fileno()
        sql("SELECT pg_terminate_backend(%s)", before)
        assert select.select([idle], [], [], 10)[0], "nothing came"
        with connections.connection() as connection:
            assert number_of(connection) != before
        connections.close()


@contextlib.contextmanager
def held_open(dsn: str) -> Iterator[str]:
    """The same server, by a way on which its closing of a connection does not arrive."""
    address = conninfo_to_dict(dsn)
    over = threading.Event()
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), socketserver.BaseRequestHandler) as server:
        server.daemon_threads = True

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with socket.create_connection((str(address["host"]), int(address["port"] or 0))) as behind:
                    ends = [self.request, behind]
                    while ends and not over.is_set():
                        for end in select.select(ends, [], [], 0.1)[0]:
                            data = end.recv(65536)
                            if data:
                                (behind if end is self.request else self.request).sendall(data)
                            else:
                                ends.remove(end)

        server.RequestHandlerClass = Handler
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield make_conninfo(dsn, host="127.0.0.1", port=server.server_address[1], sslmode="disable")
        finally:
            over.set()
            server.shutdown()


def test_what_a_server_says_by_the_way_ends_no_connection(connections: Connections | OwnConnection, sql: Sql) -> None:
    """There is something to read then, and the connection is as good as before."""
    used(connections)
    with connections.connection() as connection:
        before = number_of(connection)
        connection.execute("LISTEN word")
        idle = connection.fileno()
    sql("NOTIFY word, 'by the way'")
    assert select.select([idle], [], [], 10)[0], "nothing came"
    with connections.connection() as connection:
        assert number_of(connection) == before


def test_a_system_without_poll_asks_by_select(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Windows."""
    monkeypatch.delattr("select.poll")
    connections = Connections(dsn, limit=lambda: 1, **HOW)
    assert used(connections) == used(connections)
    connections.close()


def test_sessions_behind_a_pooler_are_left_as_they_are(dsn: str, pooler: PgBouncer) -> None:
    """Whoever gets the session next would find our settings in it."""
    connections = Connections(pooler.through(dsn), limit=lambda: 1, **HOW)
    with connections.connection() as connection:
        assert connection.execute("SHOW plan_cache_mode", prepare=False).fetchone() == ("auto",)
        assert connection.pooled
    connections.close()
