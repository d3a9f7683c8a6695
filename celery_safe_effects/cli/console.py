"""``console``: the operators' pages without Flower."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from .command import Answer, Console, command, extra, import_modules

if TYPE_CHECKING:
    from ..app import SafeEffects

VARIABLE: Final = "SAFE_EFFECTS_CONSOLE_TOKEN"
PORT: Final = 9541


@command()
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=PORT, show_default=True, help="The port; 0 takes a free one."
)
@click.option(
    "--token-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help=f"A file that holds the token; else the variable {VARIABLE} does.",
)
def console(console: Console, safe: SafeEffects, host: str, port: int, token_file: Path | None) -> Answer:
    """Serve the operators' pages, until ended: pressure, open questions, one job's time line.

    Whoever signs in with the token may resolve, cancel and retry there; without a token nobody may.
    """
    with extra("console", "tornado", "the console"):
        from ..contrib.console import server
    import_modules(safe.app)  # a retry or a verdict may go on with any task
    token = token_file.read_text().strip() if token_file is not None else os.environ.get(VARIABLE) or None

    def ready(address: str) -> None:
        console.note(f"the console is at {address}" + ("" if token else ", reading only: it has no token"))
        if console.as_json:
            console.emit({"url": address, "writes": token is not None})

    server.serve(safe, host=host, port=port, token=token, ready=ready)
    return Answer(streamed=True)


__all__ = ["console"]
