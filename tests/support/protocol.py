"""The protocol driven statement by statement, without Celery: for what needs an exact interleaving."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any
from uuid import UUID, uuid4

from celery_safe_effects.config import Config, from_conf
from celery_safe_effects.store.hot import Intent, Lease, Row, Store


def make_store(database_url: str, **settings: Any) -> Store:
    """A store with the settings of a test."""
    conf = {"safe_effects_database_url": database_url, **{f"safe_effects_{k}": v for k, v in settings.items()}}
    config: Config = from_conf(conf)
    return Store(config)


@dataclass
class Claimed:
    """A lease and the row that the claim returned."""

    lease: Lease
    row: Row


class Protocol:
    """One actor's view of the database."""

    def __init__(self, store: Store, owner: str = "test@host/1/1") -> None:
        self.store = store
        self.owner = owner

    def accept(self, job_id: str | None = None, **changed: Any) -> str:
        """Enqueue a job; returns its id."""
        params: dict[str, Any] = {
            "id": job_id or str(uuid4()),
            "task": "tests.task",
            "tenant": "default",
            "pool": None,
            "queue": "celery",
            "priority": 0,
            "key": None,
            "digest": "digest",
            "parent": None,
            "retries": 0,
            "eta": None,
            "expires": None,
            "limits": {},
            "fair": True,
            "admitted": False,
            "enlisted": False,
            "envelope": b"{}",
            "settle": True,
            "stamps": None,
            "actor": "producer",
            "lead": 5.0,
            "patience": "2s",
            "due": 60.0,
        }
        params |= changed
        params["limits"] = json.dumps({"max_attempts": 5, "max_age": 86400.0, **params["limits"]})
        row = self.store.row("ACCEPT", **params)
        assert row is not None
        return str(params["id"])

    def claim(self, job_id: str, ttl: float = 30.0) -> Claimed | None:
        """Claim and start a job; ``None`` if that was refused."""
        token = uuid4()
        mark = {"generation": 0, "digest": "digest", "task": None, "seq": None, "tenant": None}
        row = self.store.row("CLAIM", id=job_id, token=token, owner=self.owner, ttl=ttl, limits=None, **mark)
        if row is None or row.lease_token != token:
            return None
        return Claimed(Lease(job_id, token, row.fence, self.owner), row)

    def intent(self, claimed: Claimed, step: str = "1", nonce: UUID | None = None, **changed: Any) -> UUID | None:
        """Record an intent; its nonce, or ``None`` if that was refused."""
        nonce = nonce or uuid4()
        values: dict[str, Any] = {
            "key": f"{claimed.lease.job}:{step}",
            "step": step,
            "ordinal": int(step) if step.isdigit() else 1,
            "effect": "tests.effect",
            "keyed": False,
            "repeatable": False,
            "whole_body": False,
            "args": "{}",
            "args_digest": "args",
            "deadline": 60.0,
            "lag": 0.0,
            "idempotent_for": None,
            "has_lookup": True,
            "if_unknown": "park",
            "detached": False,
            "deadline_kills": True,
            "deadline_is_proof": False,
        }
        live, row = self.store.intent(claimed.lease, Intent(**{**values, **changed}), nonce, "process", lambda: False)
        return nonce if live and row is not None else None

    def outcome(
        self, claimed: Claimed, nonce: UUID, status: str = "outcome_confirmed", step: str = "1", **changed: Any
    ) -> Row:
        """Record an outcome; the statement's row."""
        params: dict[str, Any] = {
            "statement": "OUTCOME",
            "key": f"{claimed.lease.job}:{step}",
            "status": status,
            "ref": "ref" if status == "outcome_confirmed" else None,
            "result": None,
            "error": None,
            "evidence": None,
            "reason": None,
            "position": None,
        }
        params |= changed
        lease = claimed.lease
        return self.store.row(
            params.pop("statement"),
            job=lease.job,
            token=lease.token,
            fence=lease.fence,
            owner=lease.owner,
            nonce=nonce,
            **params,
        )

    def leave(self, claimed: Claimed, wish: str = "succeeded", **changed: Any) -> Row | None:
        """End a run; the statement's row, ``None`` if the lease is no longer ours."""
        params: dict[str, Any] = {
            "reason": None,
            "ref": f"result:{claimed.lease.job}" if wish == "succeeded" else None,
            "result": "null",
            "error": None,
            "delay": 0.0,
            "run_at": None,
            "expires": None,
            "queue": None,
            "priority": None,
            "refund": 0,
            "waiting_for": None,
            "patience": 60.0,
            "hold": None,
            "settle": None,
            "envelope": None,
            "digest": None,
            "retries": None,
            "generation": None,
            "task": None,
        }
        lease = claimed.lease
        return self.store.row(
            "LEAVE",
            id=lease.job,
            token=lease.token,
            fence=lease.fence,
            actor=lease.owner,
            wish=wish,
            **{**params, **changed},
        )

    def parked(self) -> str:
        """A job that is parked with an open question; its id."""
        job = self.accept()
        claimed = self.claim(job)
        assert claimed is not None
        self.intent(claimed)
        self.leave(claimed)
        return job

    def sweep(self) -> list[Row]:
        """Release or park what ran out."""
        return self.store.rows(
            "SWEEP_LEASES", limit=100, wish="again", reason="lease_expired", delay=0.0, max_delay=0.0, actor="sweeper"
        )
