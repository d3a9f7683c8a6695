"""A task of Celery alone is untouched by the extension that shares its application."""

from __future__ import annotations

from pytest_celery import RESULT_TIMEOUT, CeleryTestSetup


def test_a_plain_task_goes_through(celery_setup: CeleryTestSetup) -> None:
    result = celery_setup.app.tasks["tests.plain"].delay({"n": 1})
    assert result.get(timeout=RESULT_TIMEOUT) == {"n": 1}
    assert result.status == "SUCCESS"
