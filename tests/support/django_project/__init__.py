"""A Django project with the library in it, laid out as Celery's own documentation does."""

from .celery import app as celery_app

__all__ = ["celery_app"]
