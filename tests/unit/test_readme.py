"""What README and docs say is what the code does: their code runs, their tables and commands are the real ones."""

from __future__ import annotations

import ast
import inspect
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest

from celery_safe_effects import Limits, effect
from celery_safe_effects.config import PREFIX, Config, Retention, from_conf
from celery_safe_effects.states import JOB_TRANSITIONS, OPERATION_TRANSITIONS

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")])
RUNNABLE = re.compile(r"<!-- runnable: (\w+\.py) -->\n```python\n(.*?)```", re.DOTALL)
FENCED = re.compile(r"```python\n(.*?)```", re.DOTALL)
COMMAND = re.compile(r"celery -A \S+ safe-effects ([^`\n]*)")


def _blocks(pattern: re.Pattern[str]) -> list[Any]:
    return [
        pytest.param(match, id=f"{page.name}-{number}")
        for page in PAGES
        for number, match in enumerate(pattern.finditer(page.read_text()), 1)
    ]


@pytest.mark.parametrize("match", _blocks(FENCED))
def test_code_compiles(match: re.Match[str]) -> None:
    ast.parse(match[1])


@pytest.mark.parametrize("match", _blocks(RUNNABLE))
def test_marked_code_runs_as_written(match: re.Match[str], tmp_path: Path) -> None:
    (tmp_path / match[1]).write_text(match[2])
    name = Path(match[1]).stem
    code = f"import {name}"
    if "SafeEffects(app)" in match[2]:
        code += f"; from celery_safe_effects.glue.task import of; {name}.app.finalize(); of({name}.app).config"
        code += f"; of({name}.app).check_declarations(); print(*of({name}.app).task_names())"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"import sys; sys.path[:0] = {[str(tmp_path), str(ROOT)]!r}; {code}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    if name == "shop":
        assert done.stdout.split() == ["shop.bill", "shop.close_account"]


def _table(page: Path, after: str) -> list[list[str]]:
    """The cells of the first table after a text."""
    lines = page.read_text().partition(after)[2].splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("|"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip().strip("`") for cell in line.strip("|").split("|")])
    return rows


def test_the_settings_are_all_there_with_their_defaults() -> None:
    rows = _table(ROOT / "README.md", "<!-- settings -->")
    default = from_conf({"safe_effects_database_url": "postgresql+psycopg://localhost/shop"})
    assert [row[0] for row in rows] == [PREFIX + name for name in Config.__dataclass_fields__]
    for key, text, _ in rows:
        name = key.removeprefix(PREFIX)
        if name == "database_url":
            assert text == "required"
        elif name == "limits":
            assert text == "Limits()"
            assert default.limits == Limits()
        elif name == "retention":
            assert Retention(**ast.literal_eval(text)) == default.retention
        else:
            assert ast.literal_eval(text) == getattr(default, name), key


def test_the_options_of_an_effect_are_all_there() -> None:
    rows = _table(ROOT / "docs" / "effects.md", "## Options")
    assert {row[0] for row in rows} == set(inspect.signature(effect).parameters)


def _commands() -> list[Any]:
    found = [(page.name, match[1].strip()) for page in PAGES for match in COMMAND.finditer(page.read_text())]
    return [pytest.param(line, id=f"{page}: {line[:60]}") for page, line in found if line]


@pytest.mark.parametrize("line", _commands())
def test_every_command_line_is_one_that_exists(line: str) -> None:
    from celery_safe_effects.cli import safe_effects

    words = shlex.split(line, comments=True)
    name = words[0].rstrip(".,;:")
    command = safe_effects.commands.get(name)
    assert command is not None, f"there is no command {name!r}, only {', '.join(safe_effects.commands)}"
    # Placeholders are arguments like any others; what is checked is that the options exist.
    context = click.Context(command, info_name=name)
    command.make_parser(context).parse_args([w for w in words[1:] if w not in {"…", "..."}])


def test_the_changelog_names_all_commands() -> None:
    from celery_safe_effects.cli import safe_effects

    text = (ROOT / "CHANGELOG.md").read_text()
    assert [name for name in safe_effects.commands if f"`{name}`" not in text] == []


@pytest.mark.parametrize(
    ("name", "legal"),
    [
        ("job", {(str(a), str(b)) for a, many in JOB_TRANSITIONS.items() for b in many}),
        ("operation", {(str(a), str(b)) for a, many in OPERATION_TRANSITIONS.items() for b in many}),
    ],
)
def test_the_diagrams_show_legal_transitions(name: str, legal: set[tuple[str, str]]) -> None:
    text = (ROOT / "README.md").read_text()
    diagram = re.search(rf'state "{name}" as {name} \{{(.*?)\}}', text, re.DOTALL)
    assert diagram is not None
    shown = set(re.findall(r"(\w+) --> (\w+)", diagram[1]))
    assert shown <= legal
    # The ends of a lease that never started are told in words.
    assert {(a, b) for a, b in legal - shown if a != "leased"} == set()


def test_links_lead_somewhere() -> None:
    dead = [
        f"{page.name}: {target}"
        for page in PAGES
        for target in re.findall(r"\]\((?!https?://|#)([^)#\s]+)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert dead == []


def test_the_exit_statuses_are_those_of_all_commands() -> None:
    from celery_safe_effects.cli import safe_effects

    rows = _table(ROOT / "docs" / "cli.md", "<!-- exit statuses -->")
    assert {row[0] for row in rows} == set(safe_effects.commands)
