"""The service's Celery app. Run `celery -A example_project.app worker`, `… beat` and `… safe-effects status`.

All settings come from the environment:

| variable                  | default                                | what                                       |
|---------------------------|----------------------------------------|--------------------------------------------|
| `EXAMPLE_BROKER_URL`      | `redis://localhost:6379/0`             | broker and result backend                  |
| `EXAMPLE_DATABASE_URL`    | `postgresql+psycopg://localhost/example` | where jobs and operations are recorded   |
| `EXAMPLE_PROVIDER_URL`    | `http://localhost:8001`                | `python -m example_project.provider`       |
| `EXAMPLE_SETTINGS`        | `{}`                                   | more settings of the app, as JSON          |
"""

from __future__ import annotations

import json
import os

from celery import Celery

from celery_safe_effects import SafeEffects

BROKER_URL = os.environ.get("EXAMPLE_BROKER_URL", "redis://localhost:6379/0")

app = Celery("example", broker=BROKER_URL, backend=BROKER_URL, include=["example_project.tasks"])
app.conf.safe_effects_database_url = os.environ.get("EXAMPLE_DATABASE_URL", "postgresql+psycopg://localhost/example")
app.conf.broker_connection_retry_on_startup = True
app.conf.update(json.loads(os.environ.get("EXAMPLE_SETTINGS", "{}")))

safe = SafeEffects(app)
