"""The benchmark: plain Celery, SafeTask and peers on the same machine and servers, taking turns. No test."""
