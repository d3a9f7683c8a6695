"""Settings; what differs from test to test comes as JSON in the environment."""

from __future__ import annotations

import json
import os
from typing import Any

from sqlalchemy.engine import make_url

VARIABLE = "SAFE_EFFECTS_TEST_DJANGO"
_given: dict[str, Any] = json.loads(os.environ[VARIABLE])


def _database(url: str) -> dict[str, Any]:
    found = make_url(url)
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": found.database,
        "USER": found.username,
        "PASSWORD": found.password or "",
        "HOST": found.host,
        "PORT": found.port or "",
    }


SECRET_KEY = "x"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
DATABASES = {name: _database(url) for name, url in _given["databases"].items()}
DATABASES["lite"] = {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}
INSTALLED_APPS = [
    "django.contrib.contenttypes",
    "django_celery_beat",
    "django_celery_results",
    "celery_safe_effects.contrib.django",
    "tests.support.django_project.shop",
]

CELERY_SAFE_EFFECTS_DATABASE_URL = "django:default"
CELERY_RESULT_BACKEND = "django-db"
CELERY_RESULT_EXTENDED = True
CELERY_TASK_TRACK_STARTED = True
CELERY_BEAT_SCHEDULER = "django_celery_beat.schedulers:DatabaseScheduler"
globals().update({f"CELERY_{name.upper()}": value for name, value in _given["celery"].items()})
