"""The Django app: it has no models, only the migration that makes the schema."""

from __future__ import annotations

from django.apps import AppConfig


class SafeEffectsConfig(AppConfig):
    """`celery_safe_effects.contrib.django` in `INSTALLED_APPS`."""

    name = "celery_safe_effects.contrib.django"
    label = "safe_effects"
    verbose_name = "celery-safe-effects"
    default_auto_field = "django.db.models.BigAutoField"
