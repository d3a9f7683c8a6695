"""The fake provider keeps its word: the ledger tells what happened, whatever the caller was told."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from celery_safe_effects.testing import eventually
from example_project.provider_client import Declined, Provider, ProviderError
from example_project.provider_process import ProviderProcess


@pytest.fixture(scope="module")
def process() -> Iterator[ProviderProcess]:
    with ProviderProcess() as started:
        yield started


@pytest.fixture
def provider(process: ProviderProcess) -> Provider:
    client = process.client
    client.reset()
    return client


def test_a_call_leaves_one_row(provider: Provider) -> None:
    answer = provider.call("charge", "k1", {"cents": 500})
    (row,) = provider.ledger()
    assert row["ref"] == answer["ref"]
    assert row["body"]["cents"] == 500
    assert provider.lookup("k1") == row
    assert provider.lookup("other") is None


def test_a_known_key_gets_the_first_result(provider: Provider) -> None:
    first = provider.call("charge", "k1")
    again = provider.call("charge", "k1")
    assert again["ref"] == first["ref"]
    assert again["deduplicated"]
    assert len(provider.ledger()) == 1
    assert provider.stats()["effects"]["charge"]["k1"] == {"received": 2, "accepted": 1, "deduplicated": 1}


def test_concurrent_calls_of_one_key_are_one(provider: Provider) -> None:
    provider.control(delay_before=0.3)
    refs: list[str] = []
    threads = [threading.Thread(target=lambda: refs.append(provider.call("charge", "k1")["ref"])) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(refs)) == 1
    assert len(provider.ledger()) == 1


def test_without_keys_every_call_is_a_row(provider: Provider) -> None:
    provider.control(dedupe=False)
    provider.call("charge", "k1")
    provider.call("charge", "k1")
    provider.call("charge", None)
    assert [r["key"] for r in provider.ledger()] == ["k1", "k1", None]


def test_a_dropped_reply_was_accepted(provider: Provider) -> None:
    provider.control(drop_reply=True, times=1)
    with pytest.raises(ConnectionError):
        provider.call("charge", "k1")
    assert len(provider.ledger(key="k1")) == 1
    assert provider.call("charge", "k1")["deduplicated"]


def test_an_error_after_accepting(provider: Provider) -> None:
    provider.control(status_after=500, times=1)
    with pytest.raises(ProviderError) as caught:
        provider.call("charge", "k1")
    assert caught.value.status == 500
    assert len(provider.ledger()) == 1


def test_a_refusal_leaves_nothing(provider: Provider) -> None:
    provider.control(refuse=402, kind="charge")
    with pytest.raises(Declined):
        provider.call("charge", "k1")
    provider.call("mail", "k1")
    assert [r["kind"] for r in provider.ledger()] == ["mail"]
    provider.control(refuse=None, kind="charge")
    provider.call("charge", "k1")


def test_a_known_key_is_not_refused(provider: Provider) -> None:
    first = provider.call("charge", "k1")
    provider.control(refuse=402)
    assert provider.call("charge", "k1")["ref"] == first["ref"]
    with pytest.raises(Declined):
        provider.call("charge", "k2")
    provider.control(dedupe=False)
    with pytest.raises(Declined):
        provider.call("charge", "k1")


def test_a_caller_that_went_away_is_served_all_the_same(provider: Provider) -> None:
    provider.control(delay_before=0.6)
    with pytest.raises(TimeoutError):
        provider.call("charge", "k1", timeout=0.1)
    assert provider.ledger() == []
    eventually(provider.ledger, 3, message="the row of the caller that went away")


def test_down_refuses_connections_and_comes_back(provider: Provider) -> None:
    provider.control(down=0.6)

    def refused() -> bool:
        try:
            provider.stats()
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
        return False

    eventually(refused, 3, 0.02)
    eventually(lambda: not refused(), 3)
    assert provider.call("charge", "k1")["ref"]


def test_keys_are_forgotten(provider: Provider) -> None:
    provider.control(forget_after=0.2)
    provider.call("charge", "k1")
    assert provider.call("charge", "k1")["deduplicated"]
    time.sleep(0.25)
    assert not provider.call("charge", "k1")["deduplicated"]
    assert len(provider.ledger()) == 2


def test_lookups_lag_hang_and_fail(provider: Provider) -> None:
    provider.call("charge", "k1")
    provider.control(lookup_lag=0.4)
    assert provider.lookup("k1") is None
    eventually(lambda: provider.lookup("k1"), 3)
    provider.control(lookup_status=503, times=1)
    with pytest.raises(ProviderError):
        provider.lookup("k1")
    provider.control(lookup_hang=1, times=1)
    with pytest.raises(TimeoutError):
        provider.lookup("k1", timeout=0.1)
    assert provider.lookup("k1")
    assert provider.stats()["lookups"]["k1"] >= 4


def test_a_request_from_before_a_reset_leaves_no_row(provider: Provider) -> None:
    provider.control(delay_before=0.4)
    with pytest.raises(TimeoutError):
        provider.call("charge", "k1", timeout=0.05)
    provider.reset()
    time.sleep(0.6)
    assert provider.ledger() == []


def test_an_unknown_fault_is_an_error(provider: Provider) -> None:
    with pytest.raises(ProviderError, match="no such fault"):
        provider.control(dealy=1)


def test_the_ledger_outlives_a_crash(process: ProviderProcess, provider: Provider) -> None:
    first = provider.call("charge", "k1")
    process.kill()
    process.start()
    assert provider.call("charge", "k1")["ref"] == first["ref"]
