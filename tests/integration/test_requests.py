"""What a worker's main process makes of what its pool tells it."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from billiard.einfo import ExceptionInfo
from celery.exceptions import Ignore
from celery.worker.request import Request

from celery_safe_effects.glue.request import SafeRequest
from tests.support.lab import Lab


def told(error: BaseException, internal: bool = False) -> ExceptionInfo:
    """As the pool passes an exception on."""
    try:
        raise error
    except BaseException:
        return ExceptionInfo(internal=internal)


@pytest.fixture
def celerys(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Failures that were left to Celery, which stores them and calls errbacks."""
    found: list[str] = []
    monkeypatch.setattr(Request, "on_failure", lambda self, *_: found.append(self.id))
    return found


def request_of(lab: Lab, task: Any, job: str) -> SafeRequest:
    """The main process's request of a job that a child of it runs."""
    message = SimpleNamespace(
        headers={"id": job, "task": task.name, "lang": "py"}, body=b"[[], {}, {}]", payload=([], {}, {}),
        properties={}, delivery_info={}, delivery_tag=1, content_type="application/json", content_encoding="utf-8",
    )  # fmt: skip
    made = SafeRequest(
        message, app=lab.app, task=task, hostname="lab", decoded=True, headers=message.headers, body=message.payload,
        on_ack=lambda *_: None,
    )  # fmt: skip
    made.worker_pid = os.getpid()
    return made


@pytest.mark.parametrize(
    ("error", "return_ok", "internal", "ends"),
    [
        # The pool could not read or send something, or the tracer itself broke: nobody said that the job is over.
        (ValueError("the result cannot be sent"), False, False, ("queued", "internal_error")),
        (ValueError("the tracer broke"), True, True, ("running", None)),
        # These are Celery's own words, or the job's own end.
        (ValueError("the body's"), True, False, None),
        (Ignore(), False, False, None),
    ],
    ids=["of the pool", "of a broken tracer", "of the tracer", "ignored"],
)
def test_only_the_tracers_word_is_a_jobs_end(
    lab: Lab, celerys: list[str], error: BaseException, return_ok: bool, internal: bool, ends: Any
) -> None:
    seen: list[Any] = []

    def body(self: Any) -> None:
        request_of(lab, self, job).on_failure(told(error, internal), return_ok=return_ok)
        row = lab.row(job)
        seen.append((row["status"], row["reason"]))

    task, job = lab.task(body, effects=[]), str(uuid4())
    lab.deliver(task, job)
    assert celerys == ([job] if ends is None else [])
    assert seen == [ends or ("running", None)]
