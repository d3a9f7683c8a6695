"""`docker-compose.yml`, as far as it can be told without an engine: what it names is there, nothing is left open."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docker-compose.yml").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load(TEXT)
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
KNOWN = {
    "image", "build", "user", "init", "restart", "environment", "security_opt", "cap_drop", "command", "volumes",
    "healthcheck", "depends_on", "stop_grace_period", "ports", "hostname", "shm_size",
}  # fmt: skip
BY_SERVICE = pytest.mark.parametrize("name", list(SERVICES))


def test_everything_that_a_whole_installation_has() -> None:
    assert set(SERVICES) == {
        "postgres", "rabbitmq", "redis", "provider", "upgrade", "worker-a", "worker-b", "beat", "flower", "metrics",
        "prometheus", "grafana",
    }  # fmt: skip


@BY_SERVICE
def test_a_service_is_pinned_restarted_watched_and_not_root(name: str) -> None:
    service = SERVICES[name]
    assert set(service) <= KNOWN, "a key that compose does not know, or that nobody has looked at"
    if "build" not in service:
        image, _, tag = service["image"].rpartition(":")
        assert image
        assert re.search(r"\d+\.\d+", tag), "a version, and not the latest"
    assert service["restart"].startswith(("unless-stopped", "on-failure"))
    assert str(service["user"]) not in {"root", "0", ""}
    assert "no-new-privileges:true" in service["security_opt"]
    watched = service["healthcheck"]
    if name == "upgrade":
        assert watched == {"disable": True}
    else:
        assert watched["test"][0] == "CMD"
        assert {"interval", "timeout", "retries"} <= set(watched)


@BY_SERVICE
def test_what_a_service_waits_for_tells_that_it_is_ready(name: str) -> None:
    for other, how in SERVICES[name].get("depends_on", {}).items():
        condition = how["condition"]
        if condition == "service_healthy":
            assert "test" in SERVICES[other]["healthcheck"]
        else:
            assert (other, condition) == ("upgrade", "service_completed_successfully")


@BY_SERVICE
def test_nobody_else_reaches_it(name: str) -> None:
    for port in SERVICES[name].get("ports", ()):
        assert port.startswith("127.0.0.1:")


@BY_SERVICE
def test_what_is_mounted_is_there(name: str) -> None:
    for volume in SERVICES[name].get("volumes", ()):
        source, target, *mode = volume.split(":")
        assert target.startswith("/")
        if source.startswith("."):
            assert (ROOT / source).is_file()
            assert mode == ["ro"]
        else:
            assert source in COMPOSE["volumes"]


def test_nothing_secret_stands_in_it() -> None:
    """Passwords are variables without a default, and the example names just these."""
    wanted = set(re.findall(r"\$\{(\w+):\?fill in \.env\}", TEXT))
    assert set(re.findall(r"\$\{?(\w+)", TEXT)) == wanted
    named = {line.partition("=")[0]: line.partition("=")[2] for line in example() if not line.startswith("#")}
    assert named == dict.fromkeys(wanted, "")
    assert ".env" in (ROOT / ".gitignore").read_text().splitlines()
    for service in SERVICES.values():
        for key, value in service.get("environment", {}).items():
            if re.search("PASS|AUTH|SECRET|TOKEN", key):
                assert re.fullmatch(r"\$\{\w+:\?fill in \.env\}", value)


def example() -> list[str]:
    return (ROOT / ".env.example").read_text().splitlines()


def test_the_image_is_made_of_what_is_there() -> None:
    lines = SERVICES["worker-a"]["build"]["dockerfile_inline"].splitlines()
    assert re.fullmatch(r"FROM python:3\.\d+\.\d+-slim-\w+", lines[0])
    for line in lines:
        if line.startswith("COPY"):
            *sources, _ = line.split()[1:]
            assert all((ROOT / source).exists() for source in sources)
    assert lines[-1] == "USER app"


def test_prometheus_and_grafana_find_each_other_and_the_metrics() -> None:
    folder = ROOT / "example_project/compose"
    prometheus = yaml.safe_load((folder / "prometheus.yml").read_text())
    (job,) = prometheus["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    assert target == f"metrics:{SERVICES['metrics']['command'][-1]}"
    mounted = {volume.split(":")[1]: volume.split(":")[0] for volume in SERVICES["prometheus"]["volumes"]}
    assert prometheus["rule_files"] == ["alerts.yml"]
    assert mounted["/etc/prometheus/alerts.yml"].endswith("contrib/monitoring/alerts.yml")
    (source,) = yaml.safe_load((folder / "grafana-datasource.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((folder / "grafana-dashboards.yml").read_text())["providers"]
    mounted = {volume.split(":")[1]: volume.split(":")[0] for volume in SERVICES["grafana"]["volumes"]}
    assert f"{provider['options']['path']}/safe-effects.json" in mounted
    json.loads((ROOT / mounted[f"{provider['options']['path']}/safe-effects.json"]).read_text())
