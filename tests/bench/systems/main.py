"""The command line of a peer: `prepare`, `enqueue KIND COUNT [--bulk]`, `worker`."""

from __future__ import annotations

import sys
import time
from typing import Any


def main(system: Any) -> None:
    """Do what the command line says, and print how many seconds enqueueing took.

    Arguments:
        system: a module with ``prepare``, ``enqueue`` and ``worker``.
    """
    command, *rest = sys.argv[1:]
    if command == "prepare":
        system.prepare()
    elif command == "worker":
        system.worker()
    else:
        kind, count, *flags = rest
        system.enqueue(kind, 10, False)  # connections are made
        began = time.perf_counter()
        system.enqueue(kind, int(count) - 10, "--bulk" in flags)
        print(time.perf_counter() - began)


if __name__ == "__main__":
    import importlib

    # Ours is run as a module of the project, a peer as a script of its folder.
    system = sys.argv.pop(1)
    main(importlib.import_module(f"{__package__}.{system}" if __package__ else system))
