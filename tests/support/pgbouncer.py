"""pgbouncer in transaction mode, where it is installed: what many put between an application and PostgreSQL."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

import pytest

from celery_safe_effects.testing._server import LocalServer
from tests.support.loud import skip_loudly
from tests.support.services import PostgresServer

VARIABLE = "SAFE_EFFECTS_TEST_PGBOUNCER"
_UNPRIVILEGED = "nobody"


def find_pgbouncer() -> str | None:
    """Its path, also where Debian puts it, outside of a user's PATH."""
    given = os.environ.get(VARIABLE) or shutil.which("pgbouncer")
    return given or next((path for path in ("/usr/sbin/pgbouncer",) if Path(path).exists()), None)


class PgBouncer(LocalServer):
    """A pooler on a free port: each transaction gets any of a few server connections.

    Args:
        dsn: the server behind it; any of its databases can be asked for.
        size: server connections for each database.
    """

    name = "pgbouncer"
    _stop_signals: ClassVar[Mapping[str, int]] = {"fast": signal.SIGTERM}

    def __init__(self, dsn: str, size: int = 2) -> None:
        super().__init__()
        self._behind = urlsplit(dsn)
        self._size = size

    def through(self, url: str) -> str:
        """The same database, through the pooler.

        Args:
            url: a SQLAlchemy URL of the server behind.

        Returns:
            The pooler's.
        """
        return url.replace(f":{self._behind.port}/", f":{self.port}/")

    def show(self, what: str) -> list[dict[str, Any]]:
        """Ask its console, as `SHOW POOLS`."""
        import psycopg
        from psycopg.rows import dict_row

        with psycopg.connect(
            host=self.host, port=self.port, dbname="pgbouncer", user="postgres", autocommit=True, row_factory=dict_row
        ) as console:
            cursor = console.cursor()
            # It knows the simple protocol alone.
            result = console.pgconn.exec_(f"SHOW {what}".encode())
            cursor.close()
            names = [result.fname(n) for n in range(result.nfields)]
            return [
                {(name or b"").decode(): (result.get_value(row, n) or b"").decode() for n, name in enumerate(names)}
                for row in range(result.ntuples)
            ]

    def _owner(self) -> str | None:
        return _UNPRIVILEGED if os.geteuid() == 0 else None

    def _popen_options(self) -> dict[str, Any]:
        if os.geteuid() != 0:
            return {}
        entry = pwd.getpwnam(_UNPRIVILEGED)
        return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}

    def _prepare(self) -> None:
        behind = self._behind
        password = f" password={behind.password}" if behind.password else ""
        (self.folder / "pgbouncer.ini").write_text(
            f"""[databases]
* = host={behind.hostname} port={behind.port} user={behind.username}{password}
[pgbouncer]
listen_addr = {self.host}
listen_port = {self.port}
unix_socket_dir =
auth_type = any
admin_users = postgres
pool_mode = transaction
default_pool_size = {self._size}
max_client_conn = 500
server_round_robin = 1
"""
        )

    def _command(self) -> list[str]:
        found = find_pgbouncer()
        assert found is not None
        return [found, str(self.folder / "pgbouncer.ini")]

    def _answers(self) -> bool:
        try:
            socket.create_connection((self.host, self.port), 1).close()
        except OSError:
            return False
        return True


@pytest.fixture
def pooler(request: pytest.FixtureRequest, database_server: PostgresServer) -> Iterator[PgBouncer]:
    """A transaction-mode pooler before the test's database server; skips loudly where there is none."""
    if find_pgbouncer() is None:
        skip_loudly(
            request, f"needs pgbouncer: install it (Debian: apt-get install pgbouncer), or name it in {VARIABLE}"
        )
    with PgBouncer(database_server.dsn("postgres")) as server:
        yield server
