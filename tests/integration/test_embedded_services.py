"""The servers that the tests stand on: they start, die, come back, and keep what they must."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from celery_safe_effects.testing import EmbeddedPostgres, EmbeddedRedis, TcpProxy, eventually
from celery_safe_effects.testing.process import _parents
from tests.support.brokers import Broker
from tests.support.services import Sql


@pytest.fixture(scope="module")
def postgres() -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres() as server:
        yield server


@pytest.mark.parametrize("mode", ["fast", "immediate", "smart", "kill"])
def test_postgres_keeps_what_was_committed(postgres: EmbeddedPostgres, mode: str) -> None:
    with postgres.connect() as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS kept (mode text)")
        connection.execute("INSERT INTO kept VALUES (%s)", (mode,))
    if mode == "kill":
        postgres.kill()
        assert not postgres.running
        postgres.start()
    else:
        postgres.restart(mode)
    with postgres.connect() as connection:
        assert (mode,) in connection.execute("SELECT mode FROM kept").fetchall()


def test_postgres_is_durable_and_local(postgres: EmbeddedPostgres) -> None:
    with postgres.connect() as connection:
        row = connection.execute(
            "SELECT current_setting('fsync'), current_setting('synchronous_commit'),"
            " current_setting('full_page_writes'), current_setting('listen_addresses')"
        ).fetchone()
    assert row == ("on", "on", "on", "127.0.0.1")


def test_postgres_settings_can_change(postgres: EmbeddedPostgres) -> None:
    postgres.configure(statement_timeout="12345ms")
    with postgres.connect() as connection:
        assert eventually(lambda: connection.execute("SHOW statement_timeout").fetchone() == ("12345ms",), 5)
    postgres.configure(statement_timeout=0)


def test_a_database_is_cloned_from_a_template(postgres: EmbeddedPostgres) -> None:
    postgres.create_database("original")
    with postgres.connect("original") as connection:
        connection.execute("CREATE TABLE t AS SELECT 42 AS answer")
    postgres.wait_idle("original")
    assert postgres.create_database("clone", template="original") == postgres.url("clone")
    with postgres.connect("clone") as connection:
        assert connection.execute("SELECT answer FROM t").fetchone() == (42,)
        postgres.drop_database("clone")
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")


def test_a_paused_postgres_gives_no_answer(postgres: EmbeddedPostgres) -> None:
    postgres.pause()
    try:
        with pytest.raises(psycopg.OperationalError):
            psycopg.connect(postgres.dsn(), connect_timeout=2).close()
    finally:
        postgres.resume()
    postgres.connect().close()


@pytest.mark.faults
def test_nothing_outlives_a_killed_parent(tmp_path: Path) -> None:
    script = (
        "import os, signal\n"
        "from celery_safe_effects.testing import EmbeddedPostgres, EmbeddedRedis\n"
        "p, r = EmbeddedPostgres(), EmbeddedRedis()\n"
        "p.start(); r.start()\n"
        "print(p.pid, r.pid, p.folder, r.folder, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    postgres_pid, redis_pid, *folders = done.stdout.split()
    assert done.returncode == -9
    eventually(lambda: not {int(postgres_pid), int(redis_pid)} & set(_parents()), 10)
    eventually(lambda: not any(Path(f).exists() for f in folders), 10)


def test_the_sql_fixture_outlives_a_restart(own_postgres: EmbeddedPostgres, empty_database_url: str) -> None:
    dsn = empty_database_url.replace("+psycopg", "")
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (n int)")
    own_postgres.restart("immediate")
    with psycopg.connect(dsn) as connection:
        assert connection.execute("SELECT count(*) FROM t").fetchone() == (0,)


def test_each_test_has_its_own_database(sql: Sql) -> None:
    (row,) = sql("SELECT current_database() AS name, count(*) AS jobs FROM safe_effects.jobs")
    assert row["name"].startswith("test_")
    assert row["jobs"] == 0
    assert sql("SELECT %s::int + 1 AS two", 1) == [{"two": 2}]


def test_redis_survives_a_kill_and_goes_back_to_a_snapshot(tmp_path: Path) -> None:
    with EmbeddedRedis() as redis:
        redis.command("SET", "state", "old")
        snapshot = redis.snapshot(tmp_path / "snapshot")
        redis.command("SET", "state", "new")
        redis.kill()
        redis.start()
        assert redis.command("GET", "state") == b"$3\r\nnew\r\n"
        redis.restore(snapshot)
        assert redis.command("GET", "state") == b"$3\r\nold\r\n"


@pytest.mark.parametrize("end", ["kill", "restart"])
def test_brokers_keep_durable_messages(broker: Broker, own_broker: object, end: str) -> None:
    from kombu import Connection

    with Connection(broker.url, transport_options={"confirm_publish": True}) as connection:
        queue = connection.SimpleQueue("celery")
        queue.put({"n": 1}, delivery_mode=2)
        queue.close()
    eventually(lambda: broker.depth() == 1, 5)
    assert broker.server is not None
    if end == "kill":
        broker.server.kill()
        broker.server.start()
    else:
        broker.server.restart()
    assert eventually(lambda: broker.depth() == 1, 10)
    broker.purge()
    assert broker.depth() == 0


def test_brokers_share_nothing_between_tests(broker: Broker) -> None:
    assert broker.depth() == 0


def test_the_proxy_breaks_connections_in_every_way(postgres: EmbeddedPostgres) -> None:
    with TcpProxy(postgres.host, postgres.port) as proxy:
        dsn = f"host=127.0.0.1 port={proxy.port} user=postgres dbname=postgres connect_timeout=2"
        connection = psycopg.connect(dsn, autocommit=True)
        assert connection.execute("SELECT 1").fetchone() == (1,)
        assert proxy.connections == 1

        assert proxy.cut() == 1
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")
        connection.close()

        proxy.refuse()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", proxy.port), timeout=2)
        proxy.accept()

        with psycopg.connect(dsn, autocommit=True) as connection:
            proxy.delay(0.2)
            begun = time.monotonic()
            connection.execute("SELECT 1")
            assert time.monotonic() - begun >= 0.4
            proxy.delay(0)

        proxy.blackhole()
        with pytest.raises(psycopg.OperationalError):
            psycopg.connect(dsn).close()
        proxy.resume()
        psycopg.connect(dsn).close()
