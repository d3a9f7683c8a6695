"""What every command shares: the app, ``--json``, one line for each error, and the exit status."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import click

from ..errors import (
    ConfigurationError,
    NotAllowed,
    PermissionMissing,
    SafeEffectsError,
    SchemaMismatch,
    StoreUnavailable,
)
from . import output

if TYPE_CHECKING:
    from ..app import SafeEffects

DONE: Final = 0
NO: Final = 1
"""Exit status when the answer is "no" or "unhealthy"; wrong usage is 2, which is click's."""


@dataclass(frozen=True)
class Answer:
    """What a command found or did.

    Attributes:
        document: the JSON document.
        lines: the same for people.
        ok: false when the answer is "no": exit status 1.
        streamed: everything was printed already.
    """

    document: Any = None
    lines: Sequence[str] = field(default=())
    ok: bool = True
    streamed: bool = False


class Console:
    """Where a command prints while it works.

    Arguments:
        as_json: standard output is for a program.
    """

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json

    def say(self, *lines: str) -> None:
        """Print lines for people; nothing with ``--json``."""
        if not self.as_json:
            for line in lines:
                click.echo(line)

    def note(self, text: str) -> None:
        """Print a remark on standard error."""
        click.echo(output.clean(text), err=True)

    @contextmanager
    def progress(self, what: str) -> Iterator[Callable[[int, int], None] | None]:
        """A bar on standard error; gives what moves it, or ``None`` where no person looks at a terminal.

        Arguments:
            what: what is done meanwhile.
        """
        if self.as_json or not sys.stderr.isatty():
            yield None
            return
        with ExitStack() as stack:
            bars: list[Any] = []

            def move(done: int, total: int) -> None:
                if not bars:
                    made = click.progressbar(length=total, label=what, show_pos=True, file=sys.stderr)
                    bars.append(stack.enter_context(made))
                bars[0].length = total
                bars[0].update(done - bars[0].pos)

            yield move

    def emit(self, value: Any) -> None:
        """Print one JSON document on one line."""
        click.echo(output.document(value, one_line=True))


def text(value: Any) -> str:
    """The type of options and arguments: text that PostgreSQL can hold, and that says something.

    Arguments:
        value: what was given.

    Returns:
        the text.

    Raises:
        click.BadParameter: for blank text, and for what is not text.
    """
    given = str(value)
    if not given.strip():
        raise click.BadParameter("it is empty")
    try:
        given.encode("utf-8")
    except UnicodeEncodeError:
        raise click.BadParameter("it is not valid UTF-8") from None
    if "\x00" in given:
        raise click.BadParameter("it contains a NUL character")
    return given


def command(
    *, schema: bool = True, modules: bool = False, check: Callable[..., object] | None = None
) -> Callable[[Callable[..., Answer]], click.Command]:
    """Make a command of a function that gets the console, the app's SafeEffects and the options.

    Arguments:
        schema: whether the database must have this version's schema.
        modules: whether the project's task modules are imported first, as a worker does.
        check: gets the options before the database is asked, and raises ``click.UsageError`` for wrong usage.

    Returns:
        a decorator; the function's docstring is the command's help.
    """

    def decorate(fn: Callable[..., Answer]) -> click.Command:
        def run(ctx: click.Context, as_json: bool, **options: Any) -> None:
            if check is not None:
                check(**options)
            console = Console(as_json)
            status = NO
            with _one_line_log():
                try:
                    status = _run(console, fn, ctx.obj.app, schema, modules, options)
                except (click.ClickException, click.Abort, click.exceptions.Exit):
                    raise
                except Exception as exc:
                    found = describe(exc)
                    if found is None:
                        raise
                    _complain(console, fn.__name__, *found)
            ctx.exit(status)

        wrapped: Any = functools.wraps(fn)(run)  # with fn's options and help
        as_json = click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output.")
        return click.command(fn.__name__)(as_json(click.pass_context(wrapped)))

    return decorate


def _run(
    console: Console, fn: Callable[..., Answer], app: Any, schema: bool, modules: bool, options: dict[str, Any]
) -> int:
    safe = find(app)
    try:
        if modules:
            import_modules(app)
        if schema:
            safe.store.check_schema()
        answer = fn(console, safe, **options)
    finally:
        safe.close()
    if not answer.streamed:
        if console.as_json:
            click.echo(output.document(answer.document))
        else:
            console.say(*answer.lines)
    return DONE if answer.ok else NO


def find(app: Any) -> SafeEffects:
    """The app's SafeEffects, which a task module may be the one to make.

    Raises:
        ConfigurationError: when there is none.
    """
    from ..glue.task import of

    try:
        return of(app)
    except ConfigurationError:
        import_modules(app)
    try:
        return of(app)
    except ConfigurationError:
        raise ConfigurationError(
            f"the app {app.main or 'default'!r} has no SafeEffects; name the app "
            "(`celery -A yourproject safe-effects ...`) and add `SafeEffects(app)` where it is made"
        ) from None


def import_modules(app: Any) -> None:
    """Import the project's task modules, so that effects and their lookups are known.

    Raises:
        ConfigurationError: when one of them cannot be imported.
    """
    try:
        app.loader.import_default_modules()
    except SafeEffectsError:
        raise
    except Exception as exc:
        raise ConfigurationError(f"a task module cannot be imported: {type(exc).__name__}: {exc}") from exc


@contextmanager
def extra(name: str, package: str, what: str) -> Iterator[None]:
    """Around an import of what an extra brings.

    Arguments:
        name: the extra.
        package: what it installs.
        what: the error's beginning: who needs it.

    Raises:
        ConfigurationError: when it is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as exc:
        if exc.name is None or exc.name.partition(".")[0] != package.replace("-", "_"):
            raise
        raise ConfigurationError(
            f"{what} needs the package {package}: pip install 'celery-safe-effects[{name}]'"
        ) from None


# -- errors --------------------------------------------------------------------------------------------------------


def describe(exc: BaseException) -> tuple[str, str] | None:
    """The code and the message of an error that an operator can act on; ``None`` for a bug."""
    import psycopg

    if isinstance(exc, SafeEffectsError):
        return exc.code, _one_line(exc.message)
    if isinstance(exc, psycopg.Error):
        return _of_database(exc)
    if "sqlalchemy" not in sys.modules:  # only migrations load it
        return None
    from sqlalchemy.exc import ArgumentError, DBAPIError

    if isinstance(exc, DBAPIError) and isinstance(exc.orig, psycopg.Error):
        return _of_database(exc.orig)
    if isinstance(exc, ArgumentError):
        return (
            ConfigurationError.code,
            "safe_effects_database_url is not a URL; write postgresql+psycopg://user@host/name",
        )
    return None


def _of_database(exc: Any) -> tuple[str, str]:
    import psycopg

    words = _one_line(exc.diag.message_primary or str(exc))
    if (exc.sqlstate or "").startswith("SE"):
        return NotAllowed.code, f"the database refuses: {words}; nothing was changed"
    if isinstance(
        exc, (psycopg.errors.UndefinedTable, psycopg.errors.UndefinedColumn, psycopg.errors.InvalidSchemaName)
    ):
        return SchemaMismatch.code, f"{words}; run `celery -A yourproject safe-effects upgrade`"
    if isinstance(exc, (psycopg.OperationalError, psycopg.InterfaceError)) and exc.sqlstate is None:
        return StoreUnavailable.code, f"PostgreSQL does not answer: {words}; check safe_effects_database_url"
    if isinstance(exc, psycopg.errors.InsufficientPrivilege):  # the protocol's own statements say more themselves
        return PermissionMissing.code, f"{words}; `safe-effects upgrade` takes the role that owns the schema"
    return "database", f"PostgreSQL refuses: {words}"


def _one_line(message: str) -> str:
    """libpq's messages have several lines."""
    return output.clean("; ".join(part for line in message.splitlines() if (part := line.strip())))


def _complain(console: Console, name: str, code: str, message: str) -> None:
    if console.as_json:
        found: dict[str, Any] = {"error": {"code": code, "message": message}}
        if name == "status":
            found = {"healthy": False, **found}
        click.echo(output.document(found))
    else:
        click.echo(f"error: [{code}] {message}", err=True)


class _OneLine(logging.Handler):
    """Warnings of the library as one line each, without the traceback that a worker's log shows."""

    def emit(self, record: logging.LogRecord) -> None:
        words = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            exc = record.exc_info[1]
            words += f" ({type(exc).__name__}: {exc})"
        click.echo(f"{record.levelname.lower()}: {output.clean(words)}", err=True)


@contextmanager
def _one_line_log() -> Iterator[None]:
    logger = logging.getLogger("celery_safe_effects")
    handler, propagate = _OneLine(logging.WARNING), logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate
