"""The test application as a careless module makes it: connections are open before the worker forks."""

from __future__ import annotations

import os
from contextlib import ExitStack

from sqlalchemy import create_engine, text

from tests.support.app import app

# One that the library keeps for later, one that is in use at the fork, and an engine of the user's own.
app.safe_effects.store.check_schema()
held = ExitStack()
connection = held.enter_context(app.safe_effects.store.connections.connection())
engine = create_engine(app.conf.safe_effects_database_url)
with engine.connect() as users:
    PIDS = [
        int(connection.execute("SELECT pg_backend_pid()").fetchone()[0]),
        int(users.execute(text("SELECT pg_backend_pid()")).scalar_one()),
    ]
print(f"opened at import by {os.getpid()}: {PIDS}", flush=True)
