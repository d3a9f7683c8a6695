"""`python3 tests/machine`: histories of the protocol, in any interleaving, on a real PostgreSQL.

Prints how often each move was made, as JSON; or the shortest history found in which something does not hold, and exits
with status 1. A seed plays the same histories again: nothing else is loaded into this process, since Hypothesis also
draws the numbers that it finds in loaded code.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__" and "--inside" not in sys.argv:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "example_project"))
    import _bootstrap  # type: ignore[import-not-found]

    os.environ["PYTHONHASHSEED"] = "0"  # the order of sets is a choice, too
    _bootstrap.run("tests.machine", ["--inside", *sys.argv[1:]])


def main(arguments: Sequence[str]) -> int:
    """Play histories.

    Arguments:
        arguments: the command line's.

    Returns:
        The exit status.
    """
    from hypothesis import Phase

    from tests.machine.play import run, server

    parser = argparse.ArgumentParser(prog="tests/machine", description=__doc__)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--histories", type=int, default=10_000, help="%(default)s")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32), help="a new one unless given")
    given = parser.parse_args(arguments)
    print(f"{given.histories} histories, --seed {given.seed}", flush=True)
    with server() as machine:
        counts = run(machine, given.histories, given.seed, Phase.generate, Phase.shrink)
    print(json.dumps(dict(sorted(counts.items()))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
