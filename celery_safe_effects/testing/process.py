"""Celery workers and beat as processes that can be killed and paused, whole or in part."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal, TypeVar

from celery_safe_effects.testing import _guard

_T = TypeVar("_T")
_Process = TypeVar("_Process", bound="CeleryProcess")
Part = Literal["child", "parent", "both"]

PATIENCE_VARIABLE = "SAFE_EFFECTS_TEST_PATIENCE"
"""Of the environment: how many times as long as usual a wait may take, for a machine that is busy."""

_FAKETIME = (
    "/usr/lib/*/faketime/libfaketimeMT.so.1",
    "/usr/lib/faketime/libfaketimeMT.so.1",
    "/usr/lib64/faketime/libfaketimeMT.so.1",
    "/usr/local/lib/faketime/libfaketimeMT.so.1",
)

# libfaketime (0.9.10) answers the absolute sleeps of Python 3.11 and later with EINVAL.
_UNDER_FAKETIME = """
import runpy, select, time
time.sleep = lambda seconds: select.select([], [], [], seconds) and None
runpy.run_module("celery", run_name="__main__", alter_sys=True)
"""


class FaketimeNotFound(RuntimeError):
    """libfaketime is not installed; the message names what to install."""


def find_faketime() -> Path | None:
    """Find the library that lets one process live at another time.

    Returns:
        Its path, else None.
    """
    for pattern in _FAKETIME:
        found = sorted(Path("/").glob(pattern.lstrip("/")))
        if found:
            return found[-1]
    return None


def patience() -> float:
    """How many times as long as usual the tests wait: the environment's `SAFE_EFFECTS_TEST_PATIENCE`, else 1.

    Raises:
        ValueError: it is no number.
    """
    return float(os.environ.get(PATIENCE_VARIABLE) or 1)


def eventually(
    predicate: Callable[[], _T],
    timeout: float = 10.0,
    interval: float = 0.05,
    message: str = "",
) -> _T:
    """Wait until something is true.

    Args:
        predicate: asked again and again; an AssertionError of it counts as "not yet".
        timeout: seconds, on a machine that has nothing else to do; `SAFE_EFFECTS_TEST_PATIENCE` multiplies it.
        interval: seconds between two questions.
        message: what is waited for.

    Returns:
        The first truthy value.

    Raises:
        AssertionError: after the timeout, with the last value.
    """
    timeout *= patience()
    deadline = time.monotonic() + timeout
    while True:
        last: object
        try:
            value = predicate()
            if value:
                return value
            last = value
        except AssertionError as error:
            last = error
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout:g} s: {message or predicate!r}; last seen: {last!r}")
        time.sleep(interval)


def _parents() -> dict[int, tuple[int, str]]:
    """Parent and state letter of every process."""
    table: dict[int, tuple[int, str]] = {}
    proc = Path("/proc/self/stat")
    if proc.exists():
        for entry in os.listdir("/proc"):  # noqa: PTH208 - names alone
            if entry.isdigit():
                with contextlib.suppress(OSError, IndexError):
                    fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
                    table[int(entry)] = (int(fields[1]), fields[0])
        return table
    listing = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,stat="], capture_output=True, text=True, check=True)
    for line in listing.stdout.splitlines():
        pid, parent, state = line.split()[:3]
        table[int(pid)] = (int(parent), state[0])
    return table


def descendants(pid: int) -> list[int]:
    """List the processes below one, zombies left out.

    Args:
        pid: the process.

    Returns:
        Children first, then theirs.
    """
    table = _parents()
    found: list[int] = []
    level = [pid]
    while level:
        level = [p for p, (parent, state) in table.items() if parent in level and state != "Z"]
        found.extend(sorted(level))
    return found


class CeleryProcess:
    """A `celery` command in a process group of its own; use `WorkerProcess` and `BeatProcess`."""

    _ready_text = ""

    def __init__(
        self,
        app: str,
        arguments: Sequence[str],
        *,
        name: str,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        log_path: str | os.PathLike[str] | None = None,
        clock_offset: float | None = None,
    ) -> None:
        self.app = app
        self.name = name
        self._arguments = list(arguments)
        self._env = dict(env or {})
        self._cwd = Path(cwd) if cwd is not None else Path.cwd()
        self._clock_offset = clock_offset
        if log_path is None:
            descriptor, made = tempfile.mkstemp(prefix=f"{name}-", suffix=".log")
            os.close(descriptor)
            log_path = made
        self.log_path = Path(log_path)
        self._process: subprocess.Popen[bytes] | None = None
        self._token: int | None = None
        self._scratch: Path | None = None
        self._scratch_token = 0
        self._log_start = 0

    def start(self: _Process, ready: bool = True, timeout: float = 30.0) -> _Process:
        """Start the process.

        Args:
            ready: whether to wait until it is ready.
            timeout: seconds to wait for that.

        Returns:
            Itself.

        Raises:
            RuntimeError: if it runs already.
            AssertionError: if it ended or did not become ready in time; the log is in the message.
            FaketimeNotFound: if a clock offset was asked for without libfaketime.
        """
        if self.running:
            raise RuntimeError(f"{self.name} runs already")
        self.kill()  # what an earlier start may have left
        if self._scratch is None:
            # A killed worker leaves its temporary files: they must not fill the machine's folder.
            self._scratch = Path(tempfile.mkdtemp(prefix="safe-effects-"))
            self._scratch_token = _guard.hold(None, 0, self._scratch)
        env = {
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            "TMPDIR": str(self._scratch),
            **self._env,
            **self._clock(),
        }
        start = ["-m", "celery"] if self._clock_offset is None else ["-c", _UNDER_FAKETIME]
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                [sys.executable, *start, "-A", self.app, *self._arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                cwd=self._cwd,
                start_new_session=True,
            )
        self._token = _guard.hold(self._process.pid, signal.SIGKILL)
        if ready:
            try:
                self.wait_ready(timeout)
            except BaseException:
                self.kill()
                raise
        return self

    def _clock(self) -> dict[str, str]:
        if self._clock_offset is None:
            return {}
        library = find_faketime()
        if library is None:
            raise FaketimeNotFound("libfaketime not found: install it (Debian: apt-get install faketime)")
        return {
            "LD_PRELOAD": str(library),
            "FAKETIME": f"{self._clock_offset:+g}",
            # Only the wall clock is wrong: waits and monotonic clocks go on as they are.
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "DONT_FAKE_MONOTONIC": "1",
        }

    def wait_ready(self, timeout: float = 30.0) -> None:
        """Wait until the log says that the process is ready.

        Args:
            timeout: seconds, as in `eventually`.

        Raises:
            AssertionError: if it ended or did not become ready in time; the log is in the message.
        """
        timeout *= patience()
        deadline = time.monotonic() + timeout
        while self._ready_text not in self._fresh_log():
            # Asked again, since it may have said so and ended between the two looks.
            if not self.running and self._ready_text not in self._fresh_log():
                raise AssertionError(f"{self.name} ended with status {self.returncode}:\n{self.log()[-6000:]}")
            if time.monotonic() > deadline:
                raise AssertionError(f"{self.name} not ready in {timeout:g} s:\n{self.log()[-6000:]}")
            time.sleep(0.03)

    @property
    def pid(self) -> int:
        """Process id of the parent (the main process)."""
        assert self._process is not None, f"{self.name} was never started"
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the parent runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def returncode(self) -> int | None:
        """The parent's exit status, None while it runs."""
        return self._process.poll() if self._process is not None else None

    def children(self) -> list[int]:
        """List the processes below the parent.

        Returns:
            Their process ids.
        """
        return descendants(self.pid) if self._process is not None else []

    def kill(self) -> None:
        """SIGKILL the whole worker: parent, children and what those started, at one moment."""
        if self._process is None or self._token is None:
            return
        if not self.running and self.pid in _parents():
            # The id is another's by now, which the system allows only when our group is empty.
            self._done()
            return
        below = self.children()
        self._signal_group(signal.SIGKILL)
        # A child may have left the group; what is in it is dead by now.
        _signal(below, signal.SIGKILL)
        self._process.wait(10)
        _await_end(below)
        self._done()

    def kill_parent(self) -> None:
        """SIGKILL the main process alone; its children find out by themselves."""
        _signal([self.pid], signal.SIGKILL)
        assert self._process is not None
        self._process.wait(10)

    def kill_child(self) -> list[int]:
        """SIGKILL the pool's children, as the kernel does when memory runs out.

        Returns:
            The process ids that were killed.
        """
        children = self.children()
        _signal(children, signal.SIGKILL)
        return children

    def pause(self, part: Part = "both") -> list[int]:
        """Freeze (SIGSTOP) the children, the parent, or both.

        Args:
            part: which.

        Returns:
            The process ids that were frozen.
        """
        # The parent first: it would start a child in place of one that it thinks is lost.
        pids = self._part(part)
        _signal(pids, signal.SIGSTOP)
        eventually(
            lambda: all(_parents().get(p, (0, "T"))[1] in "TtZX" for p in pids),
            5,
            0.01,
            message=f"{self.name} stands still",
        )
        return pids

    def resume(self, part: Part = "both") -> None:
        """Let what was paused continue (SIGCONT).

        Args:
            part: which.
        """
        _signal(list(reversed(self._part(part))), signal.SIGCONT)

    def _part(self, part: Part) -> list[int]:
        if part not in {"child", "parent", "both"}:
            raise ValueError(f"part must be 'child', 'parent' or 'both', not {part!r}")
        parent = [self.pid] if part != "child" else []
        return parent + (self.children() if part != "parent" else [])

    def terminate(self) -> None:
        """Ask for a warm shutdown (SIGTERM); `wait` waits for its end."""
        _signal([self.pid], signal.SIGTERM)

    def quit(self) -> None:
        """Ask for a cold shutdown (SIGQUIT)."""
        _signal([self.pid], signal.SIGQUIT)

    def wait(self, timeout: float = 30.0) -> int:
        """Wait for the end of the parent.

        Args:
            timeout: seconds.

        Returns:
            Its exit status.

        Raises:
            subprocess.TimeoutExpired: if it still runs then.
        """
        assert self._process is not None, f"{self.name} was never started"
        return self._process.wait(timeout)

    def stop(self, timeout: float = 10.0) -> None:
        """Shut down warmly, and kill what is left after a while.

        Args:
            timeout: seconds for the warm shutdown.
        """
        if self.running:
            self.resume()
            self.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.wait(timeout)
        self.kill()

    def log(self) -> str:
        """Read the output.

        Returns:
            The output of all starts so far.
        """
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def _fresh_log(self) -> str:
        with self.log_path.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace")

    def _signal_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def _done(self) -> None:
        if self._token is not None:
            _guard.release(self._token)
            self._token = None
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
            _guard.release(self._scratch_token)
            self._scratch = None

    def __enter__(self: _Process) -> _Process:
        if not self.running:
            self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill()


class WorkerProcess(CeleryProcess):
    """A `celery worker`.

    Args:
        app: where the app is, `module:attribute`.
        name: node name before the `@`.
        hostname: node name after the `@`.
        env: environment variables, added to ours.
        concurrency: number of pool children, threads or greenlets.
        pool: "prefork", "threads", "solo", "gevent" or "eventlet".
        queues: queues to consume; None leaves the choice to the app.
        extra: more arguments of `celery worker`.
        cwd: working directory, from which the app is imported; None is ours.
        log_path: the file for its output; None makes a temporary one.
        log_level: Celery's log level.
        clock_offset: seconds by which its wall clock is wrong; needs libfaketime.
    """

    _ready_text = " ready."

    def __init__(
        self,
        app: str,
        *,
        name: str = "worker",
        hostname: str = "test",
        env: Mapping[str, str] | None = None,
        concurrency: int = 1,
        pool: str = "prefork",
        queues: Sequence[str] | None = None,
        extra: Sequence[str] = (),
        cwd: str | os.PathLike[str] | None = None,
        log_path: str | os.PathLike[str] | None = None,
        log_level: str = "INFO",
        clock_offset: float | None = None,
    ) -> None:
        self.node = f"{name}@{hostname}"
        arguments = [
            "worker",
            f"--hostname={self.node}",
            f"--concurrency={concurrency}",
            f"--pool={pool}",
            f"--loglevel={log_level}",
            "--without-gossip",
            "--without-mingle",
            *([f"--queues={','.join(queues)}"] if queues else []),
            *extra,
        ]
        super().__init__(app, arguments, name=name, env=env, cwd=cwd, log_path=log_path, clock_offset=clock_offset)


class BeatProcess(CeleryProcess):
    """A `celery beat`.

    Args:
        app: where the app is, `module:attribute`.
        name: what it is called in messages.
        env: environment variables, added to ours.
        schedule: the schedule's file; None puts it beside the log.
        max_interval: seconds between two looks at the schedule.
        extra: more arguments of `celery beat`.
        cwd: working directory, from which the app is imported; None is ours.
        log_path: the file for its output; None makes a temporary one.
        log_level: Celery's log level.
        clock_offset: seconds by which its wall clock is wrong; needs libfaketime.
    """

    _ready_text = "beat: Starting..."

    def __init__(
        self,
        app: str,
        *,
        name: str = "beat",
        env: Mapping[str, str] | None = None,
        schedule: str | os.PathLike[str] | None = None,
        max_interval: float = 1.0,
        extra: Sequence[str] = (),
        cwd: str | os.PathLike[str] | None = None,
        log_path: str | os.PathLike[str] | None = None,
        log_level: str = "INFO",
        clock_offset: float | None = None,
    ) -> None:
        super().__init__(app, [], name=name, env=env, cwd=cwd, log_path=log_path, clock_offset=clock_offset)
        self._arguments = [
            "beat",
            f"--loglevel={log_level}",
            f"--schedule={schedule or self.log_path.with_suffix('.schedule')}",
            "--pidfile=",
            f"--max-interval={max_interval:g}",
            *extra,
        ]


def _signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _await_end(pids: Iterable[int]) -> None:
    eventually(
        lambda: not [p for p in pids if _parents().get(p, (0, "Z"))[1] not in "ZX"],
        5,
        0.01,
        message="the killed processes are gone",
    )
