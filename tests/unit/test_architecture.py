"""Who may import whom: the contracts stand in pyproject.toml, under `[tool.importlinter]`."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "celery_safe_effects"
LOW = ["errors", "values", "states", "canonical", "limits", "config"]
"""What everything else stands on."""


def test_the_layers_hold(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from importlinter.cli import EXIT_STATUS_SUCCESS, lint_imports

    monkeypatch.chdir(ROOT)
    status = lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True)
    assert status == EXIT_STATUS_SUCCESS, capsys.readouterr().out


def test_the_contracts_see_what_they_speak_of() -> None:
    """A renamed module would make a contract true of nothing; an import in a function is an import."""
    import grimp

    graph = grimp.build_graph(
        PACKAGE, exclude_type_checking_imports=True, include_external_packages=True, cache_dir=None
    )
    modules = {
        f"{PACKAGE}.{name}" for name in [*LOW, "app", "cli", "contrib", "glue", "effects", "signals", "engine", "store"]
    }
    assert modules <= graph.modules
    assert graph.direct_import_exists(importer=f"{PACKAGE}.glue.task", imported="celery")
    assert graph.direct_import_exists(importer=f"{PACKAGE}.glue.task", imported=f"{PACKAGE}.glue.execution")


@pytest.mark.parametrize("part", ["engine", "store"])
def test_the_protocol_does_not_reach_celerys_glue_by_any_way(part: str) -> None:
    import grimp

    graph = grimp.build_graph(PACKAGE, exclude_type_checking_imports=True, cache_dir=None)
    for glue in ("glue", "cli", "app"):
        chain = graph.find_shortest_chain(f"{PACKAGE}.{part}", f"{PACKAGE}.{glue}", as_packages=True)
        assert chain is None, " -> ".join(chain or ())
