"""Celery around the protocol: task, request, publishing, worker steps, periodic tasks."""
