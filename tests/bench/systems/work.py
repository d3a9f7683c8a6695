"""The work that every system does, and the count of it, with the standard library alone.

Every process that runs jobs counts them in a file of its own, mapped into memory: counting costs no system call.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

KINDS: Final[dict[str, tuple[int, float]]] = {
    "noop": (0, 0.0),
    "one": (1, 0.0),
    "ten": (10, 0.0),
    "io5": (1, 0.005),
    "io50": (1, 0.05),
}
"""Jobs: how many effects, and for how many seconds each of them waits."""

_RECORD: Final = struct.Struct("<qd")
_lock = threading.Lock()
_mine: list[tuple[int, mmap.mmap]] = []


def effect(seconds: float) -> int:
    """What is outside: it takes its time, and answers."""
    if seconds:
        time.sleep(seconds)
    return 1


def do(kind: str, call: Callable[[float], object], since: float = 0.0) -> None:
    """One job.

    Arguments:
        kind: one of :data:`KINDS`.
        call: makes an effect of so many seconds.
        since: as of :func:`done`.
    """
    times, seconds = KINDS[kind]
    for _ in range(times):
        call(seconds)
    done(since)


def done(since: float = 0.0) -> None:
    """One more job is done.

    Arguments:
        since: when it was enqueued, if its wait counts (``time.monotonic()``, which is the machine's).
    """
    with _lock:
        if not _mine or _mine[0][0] != os.getpid():
            path = Path(os.environ["BENCH_TALLY"]) / f"{os.getpid()}.count"
            path.write_bytes(bytes(_RECORD.size))
            with path.open("r+b") as file:
                _mine[:] = [(os.getpid(), mmap.mmap(file.fileno(), _RECORD.size))]
        count, waited = _RECORD.unpack_from(_mine[0][1])
        _RECORD.pack_into(_mine[0][1], 0, count + 1, waited + (time.monotonic() - since if since else 0.0))


def counted(folder: Path) -> tuple[int, float]:
    """How many jobs are done, and the seconds that they waited, all together."""
    found = [_RECORD.unpack(path.read_bytes()) for path in folder.glob("*.count") if path.stat().st_size]
    return sum(count for count, _ in found), sum(waited for _, waited in found)
