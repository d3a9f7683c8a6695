"""Who is sending: an identity of a process that can be checked later, on the same machine, without trusting clocks."""

from __future__ import annotations

import functools
import os
from pathlib import Path


@functools.lru_cache(maxsize=1)
def here() -> str:
    """Identity of this boot and process namespace; process ids mean something only inside it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""
    return f"{boot}|{namespace}|"


def start_time(pid: int) -> str | None:
    """The start time of a process in clock ticks since boot, or ``None`` if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("latin-1")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    # A zombie has exited: it can send nothing any more.
    return None if fields[0] in ("Z", "X") else fields[19]


def identity() -> str:
    """This process: boot, namespace, process id and start time. Empty where the system does not tell."""
    return _identity(os.getpid())


@functools.lru_cache(maxsize=1)
def _identity(pid: int) -> str:
    base = here()
    started = start_time(pid) if base else None
    return f"{base}{pid}|{started}" if started else ""


def is_gone(process: str) -> bool:
    """Whether a process of this boot and namespace is observably no more.

    Arguments:
        process: an :func:`identity`; one of another machine, boot or container is never judged.
    """
    base = here()
    if not base or not process.startswith(base):
        return False
    pid, _, started = process[len(base) :].partition("|")
    return pid.isdigit() and start_time(int(pid)) != started
