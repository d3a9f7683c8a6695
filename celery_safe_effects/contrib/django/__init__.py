"""For Django projects: ``DjangoSafeTask``, and the schema as a Django migration.

``INSTALLED_APPS += ["celery_safe_effects.contrib.django"]`` brings the migration; the task needs no entry there.
"""

from .task import DjangoSafeTask

__all__ = ["DjangoSafeTask"]
