"""The project's own tests, run by `manage.py test` as a user's are; not collected by pytest."""

from __future__ import annotations

from typing import Any

import psycopg
from celery import current_app
from django.db import connection, transaction
from django.test import TestCase, TransactionTestCase

from celery_safe_effects import IdempotencyConflict

from .models import Order
from .tasks import bill


def jobs(conn: Any = connection) -> int:
    """How many jobs this connection sees."""
    with conn.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM safe_effects.jobs")
        return int(cursor.fetchone()[0])


def elsewhere() -> int:
    """How many jobs everybody sees."""
    with psycopg.connect(current_app._safe_effects.store.connections.opener.conninfo) as conn:
        return jobs(conn)


def messages() -> int:
    """How many messages wait."""
    with current_app.connection_for_read() as broker:
        return int(broker.default_channel.client.llen("celery"))


class InATestCase(TestCase):
    """Everything happens in a transaction that is rolled back."""

    def test_a_job_is_part_of_it(self) -> None:
        Order.objects.create(id="o", cents=5)
        with self.captureOnCommitCallbacks(execute=True) as callbacks:
            first = bill.apply_async_on_commit(("o",), idempotency_key="o")
            again = bill.apply_async_on_commit(("o",), idempotency_key="o")
            with self.assertRaises(IdempotencyConflict):
                bill.apply_async_on_commit(("p",), idempotency_key="o")
        self.assertEqual(first.id, again.id)
        self.assertEqual(len(callbacks), 1)
        self.assertEqual((jobs(), elsewhere(), messages()), (1, 0, 0))
        self.assertEqual(Order.objects.count(), 1)

    def test_it_is_gone_with_it(self) -> None:
        self.assertEqual((jobs(), Order.objects.count()), (0, 0))

    def test_run_where_it_is_enqueued(self) -> None:
        current_app.conf.task_always_eager = True
        try:
            Order.objects.create(id="eager", cents=5)
            with self.captureOnCommitCallbacks(execute=True):
                result = bill.delay_on_commit("eager")
                self.assertEqual(Order.objects.get().ref, "")
            self.assertNotEqual(Order.objects.get().ref, "")
            self.assertEqual(current_app._safe_effects.job(result.id).status, "succeeded")
        finally:
            current_app.conf.task_always_eager = False


class InATransactionTestCase(TransactionTestCase):
    """Commits are real."""

    def test_committed(self) -> None:
        before = elsewhere()
        with transaction.atomic():
            bill.delay_on_commit("o")
            self.assertEqual((elsewhere() - before, messages()), (0, 0))
        self.assertEqual((elsewhere() - before, messages()), (1, 1))
