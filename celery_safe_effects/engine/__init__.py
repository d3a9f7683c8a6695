"""The protocol between two statements: leases, effects, deadlines, sweep and reconcile. Knows nothing of Celery."""
