"""Ends what we started when we die, however we die.

A small helper process holds the read end of a pipe. The kernel closes our end when this process ends, also
by SIGKILL, and the helper then kills the processes and removes the folders that are still registered. Unlike
PR_SET_PDEATHSIG it does not depend on the thread that started a process, and it works outside Linux.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

_SCRIPT = r"""
import json, os, shutil, signal, sys, time

def started(pid):
    try:
        with open("/proc/%d/stat" % pid, "rb") as f:
            return f.read().rsplit(b")", 1)[1].split()[19].decode()
    except OSError:
        return None

def alive(pid):
    try:
        os.kill(pid, 0)
        return True
    except OSError:
        return False

def group(pid, sig):
    for send in (os.killpg, os.kill):
        try:
            send(pid, sig)
        except OSError:
            pass

held = {}
for line in sys.stdin:
    entry = json.loads(line)
    if "drop" in entry:
        held.pop(entry["drop"], None)
    else:
        held[entry["add"]] = (entry, started(entry["pid"]) if entry["pid"] else None)

ours = [e for e, since in held.values() if e["pid"] and started(e["pid"]) == since]
for entry in ours:
    try:
        os.kill(entry["pid"], entry["signal"])
    except OSError:
        pass
limit = time.monotonic() + 3
while time.monotonic() < limit and any(alive(e["pid"]) for e in ours):
    time.sleep(0.05)
for entry in ours:
    group(entry["pid"], signal.SIGKILL)
for entry, _ in held.values():
    if entry["remove"]:
        shutil.rmtree(entry["remove"], ignore_errors=True)
"""

_lock = threading.Lock()
_helper: tuple[int, int] | None = None  # whose, and our end of the pipe
_last_token = 0


def _send(message: dict[str, object]) -> None:
    global _helper  # noqa: PLW0603
    if _helper is None or _helper[0] != os.getpid():
        theirs, ours = os.pipe()
        helper = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _SCRIPT],
            stdin=theirs,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )
        os.close(theirs)
        # It outlives us on purpose, so nobody waits for it.
        helper.returncode = 0
        _helper = (os.getpid(), ours)
    os.write(_helper[1], json.dumps(message).encode() + b"\n")


def hold(pid: int | None, signal_number: int, remove: Path | None = None) -> int:
    """Register a process (the leader of its own group) or a folder to be ended with us.

    Args:
        pid: the process, or None for a folder alone.
        signal_number: sent first; SIGKILL to the whole group follows after at most three seconds.
        remove: a folder that is removed then.

    Returns:
        A token for `release`.
    """
    global _last_token  # noqa: PLW0603
    with _lock:
        _last_token += 1
        _send(
            {
                "add": _last_token,
                "pid": pid,
                "signal": signal_number,
                "remove": str(remove) if remove is not None else None,
            }
        )
        return _last_token


def release(token: int) -> None:
    """Forget what `hold` registered.

    Args:
        token: what `hold` returned.
    """
    with _lock:
        if _helper is not None and _helper[0] == os.getpid():
            _send({"drop": token})
