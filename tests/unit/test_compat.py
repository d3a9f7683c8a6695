"""What the package relies upon beyond Celery's documented interface is listed, and exists in every version."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import celery
import pytest
from celery import Celery

from celery_safe_effects import SafeEffects, SafeTask
from celery_safe_effects.errors import ConfigurationError
from celery_safe_effects.glue import compat, worker

PACKAGE = Path(compat.__file__).parents[1]
STANDARD = {"_asdict", "_replace", "_exit"}
"""Of named tuples, `sys` and `os`."""


def test_this_celery_is_one_of_the_supported() -> None:
    assert celery.__version__.rpartition(".")[0] in compat.SUPPORTED


@pytest.mark.parametrize("one", compat.RELIED_UPON, ids=lambda one: f"{one.owner}.{one.name}")
def test_a_name_that_is_relied_upon_exists(one: compat.Reliance) -> None:
    assert one not in compat.missing(), one.why


@pytest.mark.parametrize(
    "gone",
    [
        compat.Reliance("celery.app.amqp:AMQP", "_create_sender", ""),
        compat.Reliance("celery.app.amqp:Sender", "send", ""),
        compat.Reliance("celery.sender", "send", ""),
        compat.Reliance("celery.app.autoretry:add_autoretry_behaviour()", "_first_run", ""),
    ],
    ids=["attribute", "class", "module", "set"],
)
def test_a_celery_without_it_is_refused(gone: compat.Reliance, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "RELIED_UPON", (*compat.RELIED_UPON, gone))
    assert compat.missing() == [gone]
    with pytest.raises(ConfigurationError, match=f"{gone.name}.*install Celery 5.5 to 5.7"):
        compat.check()
    app = Celery("no", set_as_current=False)
    with pytest.raises(SystemExit, match=gone.name):
        worker.prepare(SafeEffects(app), app, "w@host")


def test_a_task_that_another_thread_is_binding() -> None:
    """Celery marks a class as bound before it has given it what a bound one has."""
    app = Celery("bound", set_as_current=False)
    SafeEffects(app)

    @app.task(base=SafeTask, shared=False, lazy=False, effects=[])
    def task() -> None: ...

    kind = type(task)
    kind.request_stack = None
    kind.bind(app)
    assert kind.__bound__


def private(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Each private name that is used or made in a module: pairs of "use" or "make" and the name."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield "make", node.name
        elif isinstance(node, ast.Attribute):
            yield ("use" if isinstance(node.ctx, ast.Load) else "make"), node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield "make", node.id
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from (("use", alias.name) for alias in node.names if isinstance(node, ast.ImportFrom))


def test_every_private_name_of_somebody_else_is_listed() -> None:
    """A name that this package uses and makes nowhere is Celery's: it belongs into `compat.RELIED_UPON`."""
    used: dict[str, str] = {}
    made: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        made.add(path.stem)
        for what, name in private(ast.parse(path.read_text())):
            if name.startswith("_") and not name.startswith("__"):
                if what == "make":
                    made.add(name)
                else:
                    used[name] = str(path.relative_to(PACKAGE))
    # Assigned here, but Celery's all the same.
    made -= {one.name for one in compat.RELIED_UPON}
    listed = {one.name for one in compat.RELIED_UPON} | STANDARD
    assert {name: where for name, where in used.items() if name not in made | listed} == {}
