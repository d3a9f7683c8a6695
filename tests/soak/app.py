"""What the soak's workers run: the tests' application, whose effects look at their own process before they call."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
from typing import Any

import psycopg

from celery_safe_effects import Operation, Outcome
from example_project.provider_client import Declined, Provider, ProviderError, Row
from tests.soak.names import LOOKED, OPEN
from tests.support import tasks
from tests.support.names import CONF_VARIABLE, PROVIDER_VARIABLE

SHARE = 0.2
"""Of the calls, which look: a connection of its own costs more than the call."""

_call = tasks._call


def ports(of: int) -> list[int]:
    """Our ends of this process's connections to a port."""
    found = []
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names alone
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):  # noqa: PTH115 - a link to nowhere
                continue
            with socket.socket(fileno=os.dup(int(name))) as one:
                if one.family in (socket.AF_INET, socket.AF_INET6) and one.getpeername()[1] == of:
                    found.append(one.getsockname()[1])
    return found


def look(conf: dict[str, Any]) -> list[Any]:
    """What this process has open in the database between two statements: that must be nothing."""
    dsn = str(conf["safe_effects_database_url"]).replace("+psycopg", "", 1)
    with psycopg.connect(dsn, autocommit=True, connect_timeout=3, application_name="soak") as connection:
        mine = ports(connection.info.port)
        return connection.execute(
            "SELECT query FROM pg_stat_activity"
            " WHERE pid <> pg_backend_pid() AND client_port = ANY (%s) AND state LIKE 'idle in transaction%%'",
            [mine],
        ).fetchall()


def looking_call(kind: str, op: Operation, payload: Row) -> Outcome[Row]:
    """Call the provider as the tests do, and now and then look first."""
    if random.random() < SHARE:
        # What is wrong with the provider just now is no answer to this question.
        with contextlib.suppress(psycopg.Error, OSError, ProviderError, Declined):
            found = look(app.conf)
            provider = Provider(os.environ[PROVIDER_VARIABLE], timeout=2)
            provider.call(OPEN if found else LOOKED, None, {"queries": [row[0] for row in found]})
    return _call(kind, op, payload)


tasks._call = looking_call
app = tasks.create_app(json.loads(os.environ[CONF_VARIABLE]))
