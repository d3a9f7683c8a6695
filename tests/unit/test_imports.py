"""Nothing happens at import, and a worker child pays for what it uses only."""

from __future__ import annotations

import subprocess
import sys


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.strip()


def test_importing_opens_nothing_and_starts_nothing() -> None:
    code = """
import socket, threading, os
def no(*a, **k): raise AssertionError("a socket was opened")
socket.socket.connect = no
import celery_safe_effects
from celery import Celery
app = Celery("x", broker="redis://localhost:1", backend="redis://localhost:1")
app.conf.safe_effects_database_url = "postgresql+psycopg://localhost:1/x"
safe = celery_safe_effects.SafeEffects(app)
@app.task(base=celery_safe_effects.SafeTask, effects=[])
def t(): pass
print(threading.active_count())
"""
    assert run(code) == "1"


def test_the_hot_path_imports_neither_sqlalchemy_nor_django() -> None:
    code = """
import sys
import celery_safe_effects, celery_safe_effects.glue.execution, celery_safe_effects.glue.request
print([name for name in ("sqlalchemy", "django.db") if name in sys.modules])
"""
    assert run(code) == "[]"


def test_djangos_task_needs_no_settings_to_be_imported() -> None:
    """A module of tasks may be imported before Django is set up."""
    code = """
import sys
from celery_safe_effects.contrib.django import DjangoSafeTask
print([name for name in sys.modules if name in ("django.conf", "django.db", "django.apps")])
"""
    assert run(code) == "[]"
