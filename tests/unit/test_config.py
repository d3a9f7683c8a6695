"""Settings are validated once; a bad one is an error that names its key."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from celery import Celery

from celery_safe_effects import Limits
from celery_safe_effects.config import Config, from_conf
from celery_safe_effects.errors import ConfigurationError

URL = "postgresql+psycopg://localhost/shop"


def read(**settings: Any) -> Config:
    return from_conf({"safe_effects_database_url": URL, **{f"safe_effects_{k}": v for k, v in settings.items()}})


def test_the_defaults_are_the_contract() -> None:
    config = read()
    assert (config.lease_ttl, config.heartbeat_interval, config.sweep_interval, config.reconcile_interval) == (
        30,
        10,
        5,
        10,
    )
    assert (config.republish_after, config.max_attempts, config.max_age, config.statement_timeout) == (60, 5, 86400, 5)
    assert (config.queue, config.consume, config.max_payload, config.schema) == (
        "safe_effects",
        True,
        1_000_000,
        "safe_effects",
    )
    assert config.limits == Limits()


def test_the_heartbeat_follows_the_ttl() -> None:
    assert read(lease_ttl=6).heartbeat_interval == 2


def test_times_may_be_timedeltas() -> None:
    assert read(lease_ttl=timedelta(minutes=1)).lease_ttl == 60


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("database_url", "mysql://localhost/shop"), ("database_url", "shop"), ("database_url", 5), ("lease_ttl", 0),
        ("lease_ttl", "30"), ("lease_ttl", True), ("sweep_interval", -1), ("max_attempts", 0),
        ("max_attempts", 2.5),
        ("schema", "a b"), ("schema", 'x"; DROP TABLE job; --'), ("prepare", "maybe"), ("consume", "yes"),
        ("queue", ""),
        ("limits", 5), ("limits", {"tenant_qued": 1}), ("limits", {"tenant_queued": -1}),
        ("limits", {"max_attempts": 0}), ("limits", {"tenants": {"a": {"pool_running": {"x": 1}}}}),
        ("retention", {"unknown": 1}),
        ("max_payload", -5), ("heartbeat_interval", 20), ("strict_durability", 1), ("max_connections", 1),
    ],
)  # fmt: skip
def test_a_bad_value_names_its_key(key: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"safe_effects_{key}"):
        read(**{key: value})


@pytest.mark.parametrize(("given", "alone", "shared"), [(None, 1, 9), (2, 1, 1), (30, 29, 29)])
def test_one_connection_is_the_heartbeats(given: int | None, alone: int, shared: int) -> None:
    config = read() if given is None else read(max_connections=given)
    assert (config.connections(True), config.connections(False)) == (alone, shared)


def test_a_missing_url_says_what_to_set() -> None:
    with pytest.raises(ConfigurationError, match=r"app\.conf\.safe_effects_database_url = "):
        from_conf({})


def test_a_misspelled_setting_is_not_taken_for_its_default() -> None:
    with pytest.raises(ConfigurationError, match=r"safe_effects_lease_tll; did you mean safe_effects_lease_ttl\?"):
        read(lease_tll=5)


def test_settings_under_a_namespace() -> None:
    app = Celery("x", set_as_current=False)
    app.config_from_object(
        {"CELERY_SAFE_EFFECTS_DATABASE_URL": URL, "CELERY_SAFE_EFFECTS_LEASE_TTL": 9}, namespace="CELERY"
    )
    assert from_conf(app.conf).lease_ttl == 9
