"""Fault 32: a transaction-mode pooler stands before the database, and scenarios 1, 14 and 16 are as without it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery

from celery_safe_effects.testing import RabbitMQServer, eventually
from example_project.provider_client import Provider
from tests.faults.test_fault_01 import test_01_a_long_job_is_delivered_again_and_again as scenario_01
from tests.faults.test_fault_14 import SWEEP
from tests.faults.test_fault_14 import test_14_a_new_worker_under_the_same_host_name as scenario_14
from tests.faults.test_fault_16 import TTL
from tests.faults.test_fault_16 import test_fault_16_a_paused_worker_starts_no_further_effect as scenario_16
from tests.support.brokers import EACH_BROKER_AND_ACKS, Broker
from tests.support.pgbouncer import PgBouncer
from tests.support.processes import Workers
from tests.support.services import Sql

pytestmark = pytest.mark.faults


@pytest.fixture
def app_conf(app_conf: dict[str, Any], pooler: PgBouncer) -> dict[str, Any]:
    """Producer and workers reach the database through the pooler; the test itself looks past it."""
    url = app_conf["safe_effects_database_url"]
    app_conf["safe_effects_database_url"] = pooler.through(url)
    assert app_conf["safe_effects_database_url"] != url
    return app_conf


def assert_pooled(pooler: PgBouncer, sql: Sql) -> None:
    """All of ours went through the pooler, with fewer server connections than clients."""
    (row,) = sql("SELECT current_database() AS name")

    def pooled() -> bool:
        (pool,) = [pool for pool in pooler.show("POOLS") if pool["database"] == row["name"]]
        servers = sum(int(pool[name]) for name in ("sv_active", "sv_idle", "sv_used"))
        clients = sum(int(pool[name]) for name in ("cl_active", "cl_waiting"))
        assert pool["pool_mode"] == "transaction"
        assert 0 < servers <= 2 < clients
        ours = sql(
            "SELECT pid FROM pg_stat_activity WHERE datname = current_database()"
            " AND application_name = 'celery-safe-effects'"
        )
        assert len(ours) <= servers
        return True

    # The pooler opens and checks connections between two looks.
    eventually(pooled, 10)


class TestDeliveredAgain:
    @pytest.fixture
    def app_conf(self, app_conf: dict[str, Any], broker: Broker) -> Iterator[dict[str, Any]]:
        """A broker that has little patience, as in scenario 1."""
        app_conf["safe_effects_republish_after"] = 60
        if broker.kind == "redis":
            app_conf["broker_transport_options"] = {
                "visibility_timeout": 4,
                "unacked_restore_interval": 1,
                "unacked_restore_throttle": 1,
            }
        server = broker.server
        if isinstance(server, RabbitMQServer):
            server.ctl("eval", "application:set_env(rabbit, consumer_timeout, 4000).")
        yield app_conf
        if isinstance(server, RabbitMQServer):
            server.ctl("eval", "application:set_env(rabbit, consumer_timeout, 1800000).")

    @pytest.mark.slow
    @EACH_BROKER_AND_ACKS
    def test_fault_32_a_long_job_is_delivered_again(
        self,
        app: Celery,
        workers: Workers,
        broker: Broker,
        provider: Provider,
        sql: Sql,
        acks_late: bool,
        pooler: PgBouncer,
    ) -> None:
        scenario_01(app, workers, broker, provider, sql, acks_late)
        assert_pooled(pooler, sql)


class TestTakenOver:
    @pytest.fixture
    def app_conf(self, app_conf: dict[str, Any]) -> dict[str, Any]:
        # A lease that outlives the start of the second worker.
        app_conf.update(safe_effects_lease_ttl=10, safe_effects_sweep_interval=SWEEP)
        return app_conf

    @EACH_BROKER_AND_ACKS
    def test_fault_32_a_new_worker_under_the_same_host_name(
        self, app: Celery, workers: Workers, provider: Provider, sql: Sql, acks_late: bool, pooler: PgBouncer
    ) -> None:
        scenario_14(app, workers, provider, sql, acks_late)
        assert_pooled(pooler, sql)


class TestPaused:
    @pytest.fixture
    def app_conf(self, app_conf: dict[str, Any]) -> dict[str, Any]:
        quick = {"safe_effects_sweep_interval": 0.3, "safe_effects_reconcile_interval": 0.3}
        return {**app_conf, "safe_effects_lease_ttl": TTL, "safe_effects_republish_after": 2, **quick}

    @EACH_BROKER_AND_ACKS
    def test_fault_32_a_paused_worker_starts_no_further_effect(
        self, app: Celery, workers: Workers, provider: Provider, sql: Sql, acks_late: bool, pooler: PgBouncer
    ) -> None:
        scenario_16(app, workers, provider, sql, acks_late)
        assert_pooled(pooler, sql)
