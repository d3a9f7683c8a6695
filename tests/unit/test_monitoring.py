"""The rules and the dashboard name what the exporter has, and each rule fires when it must."""

from __future__ import annotations

import json
import re
import subprocess
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from celery_safe_effects.engine.metrics import CATALOG
from tests.support.promtool import promtool

ROOT = Path(__file__).resolve().parents[2]
FOLDER = resources.files("celery_safe_effects.contrib.monitoring")
RULES = FOLDER.joinpath("alerts.yml").read_text("utf-8")
DASHBOARD: dict[str, Any] = json.loads(FOLDER.joinpath("dashboard.json").read_text("utf-8"))
CASES = (Path(__file__).parent / "alerts.test.yml").read_text("utf-8")
LABELS = {family.name: set(family.labels) for family in CATALOG}
SELECTOR = re.compile(r"\b(safe_effects_\w+)(?:\{([^}]*)\})?")
ALERTS = re.findall(r"- alert: (\w+)\n\s+expr: (.+)", RULES)


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def expressions() -> list[str]:
    return [expr for _, expr in ALERTS] + [target["expr"] for panel in panels() for target in panel["targets"]]


def test_every_name_and_label_is_one_that_the_exporter_has() -> None:
    assert len(ALERTS) == RULES.count("- alert:") == 11
    for expr in expressions():
        for name, matchers in SELECTOR.findall(expr):
            assert name in LABELS, expr
            assert set(re.findall(r"(\w+)\s*[=!]", matchers)) <= LABELS[name], expr


def test_labels_in_words_are_labels_of_the_metric() -> None:
    for block in RULES.split("- alert: ")[1:]:
        expr = block.partition("expr: ")[2].partition("\n")[0]
        has = set.union(*(LABELS[name] for name, _ in SELECTOR.findall(expr)))
        assert set(re.findall(r"\$labels\.(\w+)", block)) <= has, expr
    for panel in panels():
        for target in panel["targets"]:
            has = set.union(*(LABELS[name] for name, _ in SELECTOR.findall(target["expr"])))
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= has, target


def test_settings_and_metrics_that_the_rules_words_name_exist() -> None:
    from celery_safe_effects.config import PREFIX, Config

    known = {*LABELS, *(PREFIX + name for name in Config.__dataclass_fields__)}
    assert set(re.findall(r"\bsafe_effects_\w+", RULES)) <= known


def test_counters_are_read_as_counters_and_the_dashboard_shows_every_metric() -> None:
    text = " ".join(expressions())
    for family in CATALOG:
        assert family.name in text, family.name
        uses = re.findall(rf"(\w+\(|)\b{family.name}\b(?:\{{[^}}]*\}})?(\[|)", text)
        for function, ranged in uses:
            assert (function in {"rate(", "increase("}) == (family.kind == "counter") == bool(ranged), family.name


def test_the_dashboard_is_one_that_grafana_can_import() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    assert DASHBOARD["templating"]["list"][0]["type"] == "datasource"
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
    for panel in panels():
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["description"].endswith(".")


def test_prometheus_takes_the_rules_and_they_fire_when_they_must(request: pytest.FixtureRequest) -> None:
    tool = promtool(request)
    rules = ROOT / "celery_safe_effects" / "contrib" / "monitoring" / "alerts.yml"
    for command in (["check", "rules", str(rules)], ["test", "rules", str(Path(__file__).parent / "alerts.test.yml")]):
        done = subprocess.run([tool, *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_rule_is_tested_to_fire_and_not_to_fire() -> None:
    for name, _ in ALERTS:
        tests = re.findall(rf"alertname: {name}\n\s+exp_alerts:(.*)", CASES)
        assert "" in tests, name
        assert " []" in tests, name


def test_prometheus_parses_the_dashboards_expressions(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    tool = promtool(request)
    rules = [
        {"record": f"r{n}", "expr": target["expr"].replace("$__rate_interval", "5m")}
        for n, target in enumerate(target for panel in panels() for target in panel["targets"])
    ]
    made = tmp_path / "rules.json"  # YAML, too
    made.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    done = subprocess.run([tool, "check", "rules", str(made)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_docs_have_every_metric_and_every_alert() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    rows = dict(re.findall(r"^\| `(safe_effects_\w+)` \| (\w+) \|", text, re.MULTILINE))
    assert rows == {family.name: family.kind for family in CATALOG}
    for family in CATALOG:
        (row,) = re.findall(rf"^\| `{family.name}` \| \w+ \| ([^|]*)\|", text, re.MULTILINE)
        assert set(re.findall(r"`(\w+)`", row)) == set(family.labels), family.name
    assert set(re.findall(r"`(SafeEffects[A-Z]\w+)`", text)) == {name for name, _ in ALERTS}
