"""Exceptions as JSON and back: recorded errors are raised again on replay, without pickle."""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Callable, Iterable
from typing import Any

from .. import canonical
from . import current

logger = logging.getLogger(__name__)

Matcher = type[BaseException] | Callable[[BaseException], bool]
TEXT_LIMIT = 4000
ARGS_LIMIT = 16_000
"""Characters of JSON; longer arguments are not kept, and a replay raises the same class with the text."""


def to_json(exc: BaseException) -> dict[str, Any]:
    """Describe an exception: its class, its arguments where they are JSON, and its text."""
    try:
        encoded = canonical.encode(list(exc.args))
        args: Any = canonical.printable(canonical.decode(encoded)) if len(encoded) <= ARGS_LIMIT else None
    except (TypeError, ValueError):
        args = None
    job = current.job_here()
    text = _text(exc)
    if job is not None and job.veil:
        args, text = job.veil.over(args), job.veil.text(text)
    return {
        "type": type(exc).__qualname__,
        "module": type(exc).__module__,
        "args": args,
        "text": canonical.printable(f"{type(exc).__name__}: {text}"[:TEXT_LIMIT]),
    }


def unveiled(exc: Exception) -> Exception:
    """An exception that Celery may be told: the same, or one without the values that the job keeps to itself.

    It must not be raised from another: what led to it is left out where it shows such a value.
    """
    job = current.job_here()
    if job is None or not job.veil.shows(exc):
        return exc
    made = from_json(to_json(exc)).with_traceback(exc.__traceback__)
    made.__suppress_context__ = True
    return made


def _text(exc: BaseException) -> str:
    try:
        return str(exc)
    except Exception:
        return "(its text cannot be made)"


class RecordedError(Exception):
    """A recorded exception whose class cannot be built again here; its text is the original's."""


def from_json(error: Any) -> Exception:
    """Build an exception again from :func:`to_json`; anything unusable becomes :class:`RecordedError`."""
    if not isinstance(error, dict):
        return RecordedError(str(error))
    text = str(error.get("text", ""))
    try:
        found: Any = importlib.import_module(str(error["module"]))
        for part in str(error["type"]).split("."):
            found = getattr(found, part)
    except Exception:
        return RecordedError(text)
    if not (isinstance(found, type) and issubclass(found, Exception)):
        return RecordedError(text)
    if error.get("args") is not None:
        with contextlib.suppress(Exception):
            return found(*error["args"])
    return _bare(found, text)


def _bare(cls: type[Exception], text: str) -> Exception:
    """An exception of this class without its constructor: a replay's ``except`` must take the same branch."""
    try:
        made = cls.__new__(cls)
        made.args = (text,)
        str(made)
    except Exception:
        return RecordedError(text)
    return made


def matches(exc: BaseException, matchers: Iterable[Matcher]) -> bool:
    """Whether an exception is of one of the classes, or a predicate says so; a predicate that raises says nothing."""
    for matcher in matchers:
        if isinstance(matcher, type):
            if isinstance(exc, matcher):
                return True
        elif _says_yes(matcher, exc):
            return True
    return False


def _says_yes(predicate: Callable[[BaseException], bool], exc: BaseException) -> bool:
    try:
        return bool(predicate(exc))
    except Exception:
        logger.exception("the predicate %r raised; it proves nothing", predicate)
        return False


def find(exc: BaseException, kinds: tuple[type[BaseException], ...]) -> BaseException | None:
    """The first exception of these kinds: the exception itself, or one inside an exception group."""
    if isinstance(exc, kinds):
        return exc
    for inner in getattr(exc, "exceptions", ()) or ():
        if isinstance(inner, BaseException):
            found = find(inner, kinds)
            if found is not None:
                return found
    return None
