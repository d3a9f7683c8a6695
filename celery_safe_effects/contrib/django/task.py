"""``DjangoSafeTask``: what Celery's ``DjangoTask`` puts off until the commit is part of the transaction here."""

from __future__ import annotations

import functools
from typing import Any

from celery.utils import uuid

from ...address import django_alias
from ...glue.task import SafeTask

DEFAULT_ALIAS = "default"


class DjangoSafeTask(SafeTask):
    """A :class:`~celery_safe_effects.SafeTask` with the two methods that Celery's Django tasks have.

    There they enqueue after the commit, which a crash in between loses. Here the job's row is written in the
    transaction, with the business rows: both are there after the commit, or neither. The message follows the commit.

    Use it as ``@shared_task(base=DjangoSafeTask, effects=[...])``.
    """

    abstract = True

    def delay_on_commit(self, *args: Any, **kwargs: Any) -> Any:
        """As ``delay``, as a part of the current transaction of the database that holds the jobs.

        Returns:
            the ``AsyncResult``; its id is the job's.
        """
        return self.apply_async_on_commit(args, kwargs)

    def apply_async_on_commit(
        self, args: Any = None, kwargs: Any = None, *, using: str | None = None, **options: Any
    ) -> Any:
        """As ``apply_async``, as a part of the current transaction.

        Arguments:
            using: alias of the database whose transaction it is; by default the one that ``safe_effects_database_url``
                names as ``django:<alias>``, else ``default``.

        Returns:
            the ``AsyncResult``; its id is the job's. Outside a transaction the job is accepted at once.

        Raises:
            ConfigurationError: when that database is not the one that holds the jobs.
        """
        app = self._get_app()
        alias = using or django_alias(app.conf.get("safe_effects_database_url")) or DEFAULT_ALIAS
        if app.conf.task_always_eager:
            from django.db import transaction

            # A job that runs where it is enqueued cannot run before its transaction has ended.
            options.setdefault("task_id", uuid())
            transaction.on_commit(functools.partial(self.apply_async, args, kwargs, **options), using=alias)
            return self.AsyncResult(options["task_id"])
        return self.apply_async(args, kwargs, transaction=alias, **options)
