"""Threads that Celery does not know of give back what frameworks keep for each thread."""

from __future__ import annotations

import contextlib
import sys


def leave() -> None:
    """Close what Django has opened for this thread; a connection that broke would otherwise stay broken here."""
    django_db = sys.modules.get("django.db")
    if django_db is not None:
        with contextlib.suppress(Exception):  # settings that were never configured
            django_db.connections.close_all()
