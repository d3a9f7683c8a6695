"""The life cycle that the embedded servers share."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, TypeVar

from celery_safe_effects.testing import _guard, _ports

if hasattr(os, "getuid"):
    import pwd


_Server = TypeVar("_Server", bound="LocalServer")


class ServerNotFound(RuntimeError):
    """No binary of a server was found; the message names what to install."""


class ServerFailed(RuntimeError):
    """A server did not start or did not stop; the message carries the end of its log."""


def private_folder(prefix: str, owner: str | None = None) -> Path:
    """Make a new folder that only its owner reads and that other users can reach.

    Args:
        prefix: how its name begins.
        owner: the user that it is given to, when we are root.

    Returns:
        The folder.
    """
    base = Path(tempfile.gettempdir())
    if owner is not None and not _reachable(base):
        base = next((b for b in (Path("/tmp"), Path("/var/tmp")) if b.is_dir() and _reachable(b)), base)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
    if owner is not None:
        entry = pwd.getpwnam(owner)
        os.chown(folder, entry.pw_uid, entry.pw_gid)
    return folder


def _reachable(folder: Path) -> bool:
    resolved = folder.resolve()
    return all(part.stat().st_mode & 0o001 for part in (resolved, *resolved.parents))


class LocalServer(ABC):
    """A server process of ours, on 127.0.0.1, with its own folder.

    `start`, `stop`, `kill` and `restart` may follow each other freely; port and data stay. As a context
    manager it starts, and at the end stops and removes its folder if it made it.
    """

    name: ClassVar[str]
    _stop_signals: ClassVar[Mapping[str, int]] = {"fast": signal.SIGTERM}
    _end_signal: ClassVar[int] = signal.SIGKILL

    def __init__(self, data_dir: str | os.PathLike[str] | None = None, port: int | None = None) -> None:
        self._given_dir = Path(data_dir) if data_dir is not None else None
        self._given_port = port
        self._folder: Path | None = None
        self._folder_token: int | None = None
        self._port: int | None = port
        self._process: subprocess.Popen[bytes] | None = None
        self._token: int | None = None

    # What a server adds.

    @abstractmethod
    def _prepare(self) -> None:
        """Make data and configuration; called before each start."""

    @abstractmethod
    def _command(self) -> list[str]:
        """The command that runs the server in the foreground."""

    @abstractmethod
    def _answers(self) -> bool:
        """Whether the started server is ready."""

    def _environment(self) -> dict[str, str]:
        return dict(os.environ)

    def _popen_options(self) -> dict[str, Any]:
        return {}

    def _owner(self) -> str | None:
        return None

    # The life cycle.

    @property
    def host(self) -> str:
        """The address that the server listens on."""
        return "127.0.0.1"

    @property
    def port(self) -> int:
        """The TCP port; chosen when first asked for, and kept over restarts."""
        if self._port is None:
            self._port = _ports.free_port()
        return self._port

    @property
    def folder(self) -> Path:
        """Where data, configuration and log are."""
        if self._folder is None:
            if self._given_dir is not None:
                self._given_dir.mkdir(parents=True, exist_ok=True)
                self._folder = self._given_dir.resolve()
                owner = self._owner()
                if owner is not None:
                    entry = pwd.getpwnam(owner)
                    os.chown(self._folder, entry.pw_uid, entry.pw_gid)
            else:
                self._folder = private_folder(f"safe-effects-{self.name}-", self._owner())
                self._folder_token = _guard.hold(None, 0, self._folder)
        return self._folder

    @property
    def log_path(self) -> Path:
        """The file with the server's output."""
        return self.folder / "server.log"

    @property
    def pid(self) -> int | None:
        """The process id of the running server, else None."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    @property
    def running(self) -> bool:
        """Whether the server's process runs."""
        return self.pid is not None

    def log(self) -> str:
        """Read the server's output.

        Returns:
            The output of all starts so far.
        """
        try:
            return self.log_path.read_text(errors="replace")
        except FileNotFoundError:
            return ""

    def start(self, timeout: float = 60.0) -> None:
        """Start the server and wait until it answers.

        Args:
            timeout: seconds until it must answer.

        Raises:
            ServerNotFound: if no binary was found.
            ServerFailed: if it ended or did not answer in time.
        """
        if self.running:
            return
        fresh_port = self._port is None
        for attempt in range(3):
            try:
                self._start_once(timeout)
                return
            except ServerFailed as error:
                # Someone took the port between our look and the server's bind.
                if not fresh_port or attempt == 2 or "in use" not in str(error).lower():
                    raise
                self._port = None

    def _start_once(self, timeout: float) -> None:
        self._prepare()
        with self.log_path.open("ab") as log:
            # The parent's umask and descriptors are of no concern to it; its own session keeps Ctrl-C away.
            self._process = subprocess.Popen(
                self._command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment(),
                cwd=self.folder,
                start_new_session=True,
                **self._popen_options(),
            )
        self._token = _guard.hold(self._process.pid, self._end_signal)
        deadline = time.monotonic() + timeout
        while not self._answers():
            status = self._process.poll()
            if status is not None or time.monotonic() > deadline:
                why = f"ended with status {status}" if status is not None else f"gave no answer in {timeout:g} s"
                self.kill()
                raise ServerFailed(f"{self.name} {why}. The end of its log:\n{self.log()[-3000:]}")
            time.sleep(0.02)

    def stop(self, mode: str = "fast", timeout: float = 30.0) -> None:
        """Stop the server and wait for its end.

        Args:
            mode: how; each server's class tells which modes it has.
            timeout: seconds until it is killed instead.
        """
        if mode not in self._stop_signals:
            raise ValueError(f"mode must be one of {sorted(self._stop_signals)}, not {mode!r}")
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            if self._process.poll() is None:
                self._process.send_signal(self._stop_signals[mode])
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
        self._ended()

    def kill(self) -> None:
        """End the server at once, as a crash would."""
        if self._process is None:
            return
        # A process that has not been waited for keeps its id, so these reach no other.
        for send in (os.killpg, os.kill) if self._process.poll() is None else ():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                send(self._process.pid, signal.SIGKILL)
        self._process.wait(30)
        self._ended()

    def restart(self, mode: str = "fast") -> None:
        """Stop and start again, on the same port and data.

        Args:
            mode: as for `stop`.
        """
        self.stop(mode)
        self.start()

    def remove(self) -> None:
        """Stop the server and remove its folder, if we made it."""
        self.kill()
        if self._folder is not None and self._given_dir is None:
            shutil.rmtree(self._folder, ignore_errors=True)
            if self._folder_token is not None:
                _guard.release(self._folder_token)
            self._folder = self._folder_token = None

    def pause(self) -> None:
        """Freeze the server's process (SIGSTOP): connections stay, nothing answers."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused server continue."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGCONT)

    def _ended(self) -> None:
        if self._token is not None:
            _guard.release(self._token)
            self._token = None
        self._process = None

    def __enter__(self: _Server) -> _Server:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.remove()
