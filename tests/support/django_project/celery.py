"""The project's Celery app."""

from __future__ import annotations

import os

from celery import Celery

from celery_safe_effects import SafeEffects

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.support.django_project.settings")

app = Celery("django_project")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()
SafeEffects(app)
