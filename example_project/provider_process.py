"""The fake provider as a process of ours, for the demo and the tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from celery_safe_effects.testing import LocalServer
from example_project.provider_client import Provider


class ProviderProcess(LocalServer):
    """The provider in its own process, with a ledger that outlives a restart."""

    name = "provider"

    @property
    def url(self) -> str:
        """The address to call."""
        return f"http://{self.host}:{self.port}"

    @property
    def client(self) -> Provider:
        """A client of it."""
        return Provider(self.url)

    @property
    def ledger_path(self) -> Path:
        """The ledger's file."""
        return self.folder / "ledger.jsonl"

    def _prepare(self) -> None:
        self.folder.mkdir(exist_ok=True)

    def _environment(self) -> dict[str, str]:
        root = str(Path(__file__).resolve().parents[1])
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
        }

    def _command(self) -> list[str]:
        return [
            sys.executable,
            "-m",
            "example_project.provider",
            f"--port={self.port}",
            f"--ledger={self.ledger_path}",
        ]

    def _answers(self) -> bool:
        try:
            return self.client.stats() is not None
        except OSError:
            return False
