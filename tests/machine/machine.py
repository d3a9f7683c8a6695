"""Producers, workers, a sweeper, a reconciler, an operator and zombies on the real statements, in any order.

Each history begins with an empty database. After each step, everything that stands there is held against what always
holds and against the model. Time is the database's: it moves because every stored moment is moved into the past.
"""

from __future__ import annotations

import itertools
import json
from datetime import timedelta
from typing import Any, ClassVar
from uuid import uuid4

import psycopg
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from celery_safe_effects.engine.reconcile import Reconciler
from celery_safe_effects.engine.tracing import Tracing
from celery_safe_effects.states import JOB_TRANSITIONS, OPERATION_TRANSITIONS, JobStatus, OperationStatus
from celery_safe_effects.store.hot import Lease, Store
from celery_safe_effects.values import Happened, NotHappened, Unresolved
from tests.machine.model import (
    DEADLINE,
    HOUR,
    KINDS,
    LAG,
    MAX_AGE,
    TTL,
    Job,
    Operation,
    Process,
    Provider,
    Question,
    Request,
    Run,
)
from tests.support.protocol import Claimed, Protocol

TERMINAL = ("succeeded", "failed", "cancelled")
POOL = 1
"""Jobs of the pool that may run at a time."""
LIMITS = json.dumps({"pool_running": {"p": POOL}})
_MOVED = {
    "job": "lease_until leased_at run_after expires_at gives_up_at next_publish_at published_at woken_at created_at"
    " finished_at cancel_requested_at telling_until",
    "operation": "first_intent_at intent_at deadline_at absent_from gone_at absent_at policy_at next_reconcile_at"
    " asking_until",
}
TRAVEL = "BEGIN; SET LOCAL session_replication_role = replica; {moves} COMMIT"
_MOVE = "UPDATE safe_effects.{table} SET {columns};"
EMPTY = (
    "BEGIN; SET LOCAL session_replication_role = replica; DELETE FROM safe_effects.operation;"
    " DELETE FROM safe_effects.transition; DELETE FROM safe_effects.job; DELETE FROM safe_effects.tally; COMMIT"
)
NEW = (
    "BEGIN; SET LOCAL session_replication_role = replica; TRUNCATE safe_effects.operation, safe_effects.transition,"
    " safe_effects.job, safe_effects.tally; COMMIT"
)
LOOK = """
SELECT (SELECT coalesce(json_agg(j), '[]') FROM (
            SELECT id, tenant, idempotency_key, status, fence, lease_token, attempts, max_attempts, open_ops,
                   unknown_ops, outcome_ref, result::text, error::text, finished_at, pool, held, reason,
                   waiting_for, next_publish_at IS NOT NULL AS due, publishes, pending_status FROM safe_effects.job) j),
       (SELECT coalesce(json_agg(o), '[]') FROM (
            SELECT key, job_id, status, attempt, fence, nonce, provider_ref, double_at IS NOT NULL AS doubled
              FROM safe_effects.operation) o),
       (SELECT coalesce(json_agg(t), '[]') FROM (
            SELECT * FROM safe_effects.transition WHERE id > %s ORDER BY id) t)
"""
GROUNDS = ("reconciler", "operator:", "policy:", "worker")
"""Who may say what became of an open question."""

Wanted = tuple[Any, ...]
JOB = st.tuples(
    st.sampled_from([None, None, "k1", "k2"]),  # its idempotency key
    st.sampled_from(["a", "b"]),  # the tenant
    st.sampled_from(["d1", "d1", "d2"]),  # the arguments
    st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=2),  # what its body calls
    st.sampled_from([None, None, "p"]),  # the pool
    st.sampled_from([None, None, None, None, 5.2]),  # hours until it expires
    st.integers(1, 4),  # attempts
)
pick = st.integers(0, 5)


class Machine(RuleBasedStateMachine):
    """The protocol from outside; `store`, `sql` and `counts` are set by whoever runs it."""

    store: ClassVar[Store]
    sql: ClassVar[psycopg.Connection[Any]]
    counts: ClassVar[dict[str, int]]

    def __init__(self) -> None:
        super().__init__()
        # Dead rows cost every look at the tables; new tables cost more than a few of them.
        self.sql.execute(EMPTY if self.counts["histories"] % 10 else NEW, prepare=False)
        self.now = 0.0
        self.provider = Provider()
        self.jobs: dict[str, Job] = {}
        self.operations: dict[str, Operation] = {}
        self.runs: list[Run] = []
        self.zombies: list[Run] = []
        self.requests: list[Request] = []
        self.questions: list[Question] = []
        self.processes = (Process(f"worker{n}@host/{n}/1") for n in itertools.count(1))
        self.begun: list[Process] = []
        self.dead: list[Process] = []
        self.messages: set[str] = set()
        self.rows: dict[str, dict[str, Any]] = {}
        self.op_rows: dict[str, dict[str, Any]] = {}
        self.last_log = 0
        self.logged: dict[str, str] = {}
        self.fences: dict[str, int] = {}
        self.ended: dict[str, tuple[Any, ...]] = {}
        self.protocol = Protocol(self.store, "producer")
        self.reconciler = Reconciler(
            self.store,
            interval=HOUR,
            find_effect=lambda effect, task: None,
            longest_lookup=lambda: 10 * HOUR,
            deliver_now=lambda *ids: 0,
            on_moved=lambda *told: None,
            count=lambda name, label: None,
            tracing=Tracing(),
        )
        self.retried: set[str] = set()

    # -- the producer --------------------------------------------------------------------------------------------------

    @initialize(wanted=JOB, how=st.integers(0, 7))
    def begins(self, wanted: Wanted, how: int) -> None:
        """A job: queued, running, in a call, in doubt, or taken over from a worker that stands still."""
        self.accept((*wanted[:5], None, max(wanted[6], 3)))
        self.holds()
        run = self._claim(self.jobs["j1"]) if how > 0 else None
        self.holds()
        if run is None:
            return
        if how in {2, 3, 5, 6, 7}:
            self.call(0)
            self.holds()
        if how in {3, 6}:
            self._outcome(run, "unknown")
            self.holds()
        if how == 3:
            self._leave(run, "unknown")
        elif how >= 4:
            self.taken_over(0, 3)

    @rule(wanted=JOB)
    @precondition(lambda self: len(self.jobs) < 3)
    def accept(self, wanted: Wanted) -> None:
        key, tenant, digest, kinds, pool, expires, attempts = wanted
        job_id = f"j{len(self.jobs) + 1}"
        holder = next((j for j in self.jobs.values() if key and (j.tenant, j.key) == (tenant, key)), None)
        row = self.store.row(
            "ACCEPT",
            **{
                **_ACCEPT,
                "id": job_id,
                "tenant": tenant,
                "key": key,
                "digest": digest,
                "pool": pool,
                "limits": json.dumps({"max_attempts": attempts, "max_age": MAX_AGE}),
                "expires": None if expires is None else self.moment(expires * HOUR),
            },
        )
        assert (row is None) == (holder is not None), "1: one row for each tenant and key"
        if holder is not None:
            (held,) = self.store.rows("HOLDERS", id=[job_id], tenant=[tenant], key=[key])
            assert (held.id, held.args_digest) == (holder.id, holder.digest)
            return
        self.jobs[job_id] = Job(
            job_id,
            tenant,
            key,
            digest,
            tuple(kinds),
            pool,
            None if expires is None else self.now + expires * HOUR,
            self.now + MAX_AGE,
        )
        self.messages.add(job_id)

    def moment(self, seconds: float) -> Any:
        """A moment of the database's clock, from now."""
        with self.sql.cursor() as cursor:
            cursor.execute("SELECT clock_timestamp() + %s * interval '1 second'", (seconds,))
            (found,) = cursor.fetchone() or (None,)
        return found

    # -- workers -------------------------------------------------------------------------------------------------------

    @rule(n=pick, lost_reply=st.booleans(), wrong=st.sampled_from([None, None, None, "digest", "generation"]))
    @precondition(lambda self: self.jobs and len(self.runs) < 2)
    def claim(self, n: int, lost_reply: bool, wrong: str | None) -> None:
        """Any message may come at any time, doubled, late, or of another generation."""
        job = list(self.jobs.values())[n % len(self.jobs)]
        self._claim(job, lost_reply, wrong)

    def _claim(self, job: Job, lost_reply: bool = False, wrong: str | None = None) -> Run | None:
        row = self.rows[job.id]
        process, token = next(self.processes), uuid4()
        mark = {"generation": 0, "digest": job.digest, "task": None, "seq": None, "tenant": job.tenant}
        mark |= {} if wrong is None else {wrong: "other" if wrong == "digest" else 1}
        claim = {"id": job.id, "token": token, "owner": process.name, "ttl": TTL, "limits": LIMITS, **mark}
        found = self.store.claim("CLAIM", claim)
        if lost_reply:
            found = self.store.claim("CLAIM", claim)
        assert found is not None
        running = [j for j in self.rows.values() if j["pool"] == "p" and j["status"] == "running"]
        granted = found.lease_token == token and found.status == "running"
        allowed = (
            wrong is None
            and row["status"] == "queued"
            and not job.cancelled
            and not job.dying(self.now)
            and row["attempts"] < row["max_attempts"]
        )
        assert allowed or not granted, f"2: a claim that must be refused: {row}"
        if not granted:
            assert not allowed or job.pool == "p", f"8: a claim that must be granted: {row}, {found}"
            return None
        assert job.pool != "p" or len(running) < POOL, "10: more of the pool than may run"
        assert found.fence > job.fence, "2: the fence grows"
        job.fence, job.token, job.lease_until = found.fence, token, self.now + TTL
        self.begun.append(process)
        run = Run(job, token, found.fence, process)
        self.runs.append(run)
        return run

    def run_of(self, n: int) -> Run:
        """Any worker, or zombie."""
        both = [*self.runs, *self.zombies]
        return both[n % len(both)]

    @rule(n=pick, lost_reply=st.booleans())
    @precondition(lambda self: self.runs or self.zombies)
    def begin_effect(self, n: int, lost_reply: bool) -> None:
        self._begin(self.run_of(n), lost_reply)

    def _begin(self, run: Run, lost_reply: bool = False) -> bool:
        """The next step's intent; whether its call may be made."""
        if run.nonce is not None or run.step >= len(run.job.kinds):
            return False
        job, kind, key = run.job, run.job.kinds[run.step], run.key
        before, known = self.op_rows.get(key), self.operations.get(key)
        nonce = uuid4()
        options: dict[str, Any] = {**KINDS[kind], "deadline": DEADLINE, "lag": LAG}
        claimed = Claimed(self.lease(run), None)
        protocol = Protocol(self.store, run.process.name)
        process = {"process": run.process.name}
        granted = self._intent(protocol, claimed, str(run.step + 1), nonce, {**options, **process})
        if lost_reply and granted:
            # Its owner tells its own intent, when it asks again, by the nonce.
            assert not self._intent(protocol, claimed, str(run.step + 1), nonce, {**options, **process})
            found = self.store.row("INTENT_OF", key=key)
            assert found is not None
            assert found.nonce == nonce
        live = run.holds(self.now) and self.rows[job.id]["status"] == "running" and not job.cancelled
        live = live and not job.dying(self.now)
        assert live or not granted, "3: an intent without a live lease, or of a cancelled job"
        if before is None or before["status"] == "not_happened":
            assert granted == live, f"4: an intent that must be granted: {before}"
        elif before["status"] == "unknown":
            assert known is not None
            sendable = known.may_be_resent(self.now) or (known.policy == known.attempt and known.policy > 0)
            assert sendable or not granted, "4: sent again without grounds"
        else:
            assert not granted, f"4: a second intent for {before}"
        if not granted:
            if before is not None and before["status"] in {"outcome_confirmed", "refused"}:
                run.step += 1
            return False
        operation = self.operations.setdefault(key, Operation(key, kind, self.now))
        operation.begin(nonce, run.fence, self.now, run.process)
        run.nonce, run.request = nonce, None
        return True

    def _intent(self, protocol: Protocol, claimed: Claimed, step: str, nonce: Any, options: dict[str, Any]) -> bool:
        values = {**_INTENT, **options, "key": f"{claimed.lease.job}:{step}", "step": step, "ordinal": int(step)}
        lease = claimed.lease
        (row,) = self.store.rows(
            "INTENT",
            job=lease.job,
            token=lease.token,
            fence=lease.fence,
            owner=lease.owner,
            nonce=nonce,
            **values,
        )
        return bool(row.held and row.nonce == nonce)

    def lease(self, run: Run) -> Lease:
        """What the run's writes carry."""
        return Lease(run.job.id, run.token, run.fence, run.process.name)

    @rule(n=pick)
    @precondition(lambda self: any(r.nonce and r.request is None for r in [*self.runs, *self.zombies]))
    def send(self, n: int) -> None:
        """The request goes out, in time by the sender's own clock."""
        waiting = [r for r in [*self.runs, *self.zombies] if r.nonce and r.request is None]
        self._send(waiting[n % len(waiting)])

    def _send(self, run: Run) -> None:
        operation = self.operations[run.key]
        if operation.nonce != run.nonce or self.now >= operation.deadline_at or not run.holds(self.now):
            # The wrapper refuses to start a call that late, and its owner can prove that it did.
            self._outcome(run, "not_happened")
            return
        request = Request(run.key, operation.kind, operation.deadline_at, operation.first_intent, run.process)
        run.request = request
        self.requests.append(request)

    @rule(n=pick)
    @precondition(lambda self: any(r.may_arrive(self.now) for r in self.requests))
    def arrive(self, n: int) -> None:
        waiting = [r for r in self.requests if r.may_arrive(self.now)]
        self._arrive(waiting[n % len(waiting)])

    def _arrive(self, request: Request) -> None:
        operation = self.operations[request.key]
        assert operation.first_intent is not None
        self.provider.accept(request, self.now)

    @rule(n=pick, how=st.sampled_from(["answer", "answer", "unknown", "refused", "not_happened"]))
    @precondition(lambda self: any(r.request for r in [*self.runs, *self.zombies]))
    def end_call(self, n: int, how: str) -> None:
        """The call returns, raises something that proves something, or something that proves nothing."""
        calling = [r for r in [*self.runs, *self.zombies] if r.request]
        run = calling[n % len(calling)]
        assert run.request is not None
        if run.request.ref is not None:
            self._outcome(run, "unknown" if how == "unknown" else "outcome_confirmed")
        elif how in {"refused", "not_happened"}:
            run.request.dead = True  # proven
            self._outcome(run, how)
        elif how == "unknown":
            self._outcome(run, "unknown")

    def _outcome(self, run: Run, status: str) -> None:
        key, operation = run.key, self.operations[run.key]
        before = self.op_rows[key]
        ref = run.request.ref if status == "outcome_confirmed" and run.request is not None else None
        protocol = Protocol(self.store, run.process.name)
        found = protocol.outcome(
            Claimed(self.lease(run), None),
            run.nonce,
            status,
            str(run.step + 1),
            ref=ref,
            statement="OUTCOME_ASYNC" if status == "outcome_confirmed" else "OUTCOME",
        )
        mine = operation.nonce == run.nonce
        fitting = before["status"] == "intent_recorded" or (
            (before["status"] == "unknown" and status != "unknown")
            or (before["status"] == "not_happened" and status == "outcome_confirmed")
        )
        assert (found.status is not None) == (mine and fitting), f"9: {status} of {before}"
        assert not found.held or run.owns(), "2: held by another"
        if found.status is None and status == "outcome_confirmed":
            self.store.rows("LATE_OUTCOME", key=key, nonce=run.nonce, fence=run.fence, owner=run.process.name, ref=ref)
        if status == "unknown" or (status == "refused" and found.status == "unknown"):  # refused, and in doubt
            run.swallowed = True
        elif status in {"outcome_confirmed", "refused"}:
            run.step += 1
        run.nonce = run.request = None

    @rule(n=pick, wish=st.sampled_from(["succeeded", "succeeded", "again", "failed", "unknown"]), twice=st.booleans())
    @precondition(lambda self: self.runs or self.zombies)
    def leave(self, n: int, wish: str, twice: bool) -> None:
        self._leave(self.run_of(n), wish, twice)

    def _leave(self, run: Run, wish: str, twice: bool = False) -> None:
        row = self.rows[run.job.id]
        if wish == "succeeded" and (run.step < len(run.job.kinds) or run.swallowed):
            wish = "again"  # its body is not through
        protocol, claimed = Protocol(self.store, run.process.name), Claimed(self.lease(run), None)
        found = protocol.leave(claimed, wish)
        if twice:
            assert protocol.leave(claimed, wish) is None, "2: one end of a run"
        assert (found is not None) == (run.owns() and row["status"] == "running"), f"2: an end of {row}"
        if found is not None and row["open_ops"] + row["unknown_ops"] > 0:
            assert found.status == "unknown", "6: an open question parks"
        self.forget(run)

    def forget(self, run: Run, dies: bool = False) -> None:
        """The run is over, for whoever had it. A call that it left behind is still under way."""
        for held in (self.runs, self.zombies):
            if run in held:
                held.remove(run)
        if dies:
            run.process.died_at = self.now
            self.dead.append(run.process)

    @rule(n=pick)
    @precondition(lambda self: self.runs or self.zombies)
    def renew(self, n: int) -> None:
        run = self.run_of(n)
        row = self.rows[run.job.id]
        found = self.store.renew([(self.lease(run), TTL)]).get(run.token)
        renewed = found is not None and found.renewed
        # Past its age it is not renewed.
        live = run.holds(self.now) and row["status"] == "running" and self.now < run.job.gives_up_at
        assert renewed == live, f"11: a renewal of {row}"
        if found is not None and renewed:
            run.job.lease_until = self.now + TTL
            assert found.cancelled == run.job.cancelled

    @rule(n=pick)
    @precondition(lambda self: self.runs or self.zombies)
    def checkpoint(self, n: int) -> None:
        run = self.run_of(n)
        row = self.rows[run.job.id]
        lease = self.lease(run)
        found = self.store.row("CHECKPOINT", job=lease.job, token=lease.token, fence=lease.fence, ttl=TTL)
        assert (found is not None) == (run.holds(self.now) and row["status"] == "running"), f"11: {row}"
        if found is not None:
            run.job.lease_until = self.now + TTL
            assert found.cancelled == run.job.cancelled
            assert (found.dying is not None) == run.job.dying(self.now)

    @rule(n=pick)
    @precondition(lambda self: self.runs or self.zombies)
    def crash(self, n: int) -> None:
        self.forget(self.run_of(n), dies=True)

    @rule(n=pick)
    @precondition(lambda self: self.runs and len(self.zombies) < 2)
    def pause(self, n: int) -> None:
        """It stands still, for however long: another worker is free to take its place, and it will go on."""
        run = self.runs.pop(n % len(self.runs))
        self.zombies.append(run)

    @rule(n=pick, hours=st.sampled_from([3, 7]))
    @precondition(lambda self: self.runs and len(self.zombies) < 3 and self.now < 8 * HOUR)
    def taken_over(self, n: int, hours: int) -> None:
        """It stands still past its lease, and another has its job, if that can run at all."""
        run = self.runs.pop(n % len(self.runs))
        self.zombies.append(run)
        self.time_passes(hours)
        self.sweep()
        self.holds()
        if self.rows[run.job.id]["status"] == "queued":
            self._claim(run.job)

    @rule(n=pick)
    @precondition(lambda self: any(r.nonce is None for r in self.runs))
    def call(self, n: int) -> None:
        """A whole call, up to where the provider has it."""
        idle = [r for r in self.runs if r.nonce is None]
        run = idle[n % len(idle)]
        if self._begin(run):
            self.holds()
            self._send(run)
            if run.request is not None:
                self._arrive(run.request)

    @rule(n=pick)
    @precondition(lambda self: self.runs)
    def child_lost(self, n: int) -> None:
        """The parent sees its child go, and fences its attempt first."""
        run = self.runs[n % len(self.runs)]
        self.forget(run, dies=True)
        row = self.rows[run.job.id]
        found = self.store.rows(
            "LOST", id=run.job.id, owner=run.process.name, wish="again", reason="worker_lost", delay=0.0,
            max_delay=0.0, refund=0, actor=run.process.name,
        )  # fmt: skip
        assert bool(found) == (run.owns() and row["status"] == "running"), "2: an attempt of another was ended"

    # -- sweeper, reconciler, clock ------------------------------------------------------------------------------------

    @rule(hours=st.sampled_from([1, 1, 2, 3, 7]))
    @precondition(lambda self: self.requests or self.now < 4 * HOUR)
    def time_passes(self, hours: int) -> None:
        seconds = hours * HOUR
        self.now += seconds
        self.sql.execute(_travel(hours), prepare=False)
        back = timedelta(seconds=seconds)
        for question in self.questions:
            row = question.row
            moments = {
                name: getattr(row, name) - back
                for name in ("asked_at", "absent_from", "deadline_at", "first_intent_at", "intent_at")
                if getattr(row, name) is not None
            }
            question.row = row._replace(**moments)

    @rule()
    def sweep(self) -> None:
        over = {
            job.id
            for job in self.jobs.values()
            if self.rows[job.id]["status"] == "running" and job.lease_until < self.now
        }
        assert {row.id for row in self.protocol.sweep()} == over, "8, 11: leases that ran out, and no others"
        dying = {
            job.id
            for job in self.jobs.values()
            if self.rows[job.id]["status"] == "queued" and job.dying(self.now) and job.id not in over
        }
        swept = {row.id for row in self.store.rows("SWEEP_DYING", id=None, limit=100, actor="sweeper")}
        assert dying <= swept <= dying | over, "8: what is past its time"

    @rule()
    def publish(self) -> None:
        for row in self.store.rows("DUE", ids=None, limit=100, ahead=0.5, settle_tries=8, republish=60.0):
            self.messages.add(row.id)

    @rule()
    @precondition(lambda self: any(not p.seen_dead for p in self.dead))
    def observe_gone(self) -> None:
        """Someone on the same machine sees that these processes are no more."""
        found = [p.name for p in self.dead]
        self.store.rows("GONE", processes=found, in_flight=HOUR / 2)
        for operation in self.operations.values():
            unknown = self.op_rows[operation.key]["status"] == "unknown"
            if unknown and operation.sender is not None and not operation.sender.alive:
                operation.note_gone(self.now)
        for process in self.dead:
            process.seen_dead = True

    @rule(n=pick, lagging=st.booleans(), answers=st.sampled_from([True, True, False]))
    @precondition(lambda self: any(o["status"] == "unknown" for o in self.op_rows.values()))
    def ask(self, n: int, lagging: bool, answers: bool) -> None:
        """A look-up; what it says is written down later, if at all."""
        unknown = [o["key"] for o in self.op_rows.values() if o["status"] == "unknown"]
        self._ask(unknown[n % len(unknown)], lagging, answers)

    def _ask(self, key: str, lagging: bool = False, answers: bool = True) -> None:
        rows = self.store.rows("RECONCILE_DUE", keys=[key], busy=[], limit=1, hold=HOUR)
        operation = self.operations[key]
        for row in rows:
            assert (row.attempt, row.fence) == (operation.attempt, operation.fence)
            ref = self.provider.knows(key, self.now, lagging)
            self.questions.append(Question(row, self.now, operation.attempt, ref, answers))

    @rule(n=pick)
    @precondition(lambda self: self.questions)
    def conclude(self, n: int) -> None:
        self._conclude(self.questions.pop(n % len(self.questions)))

    def _conclude(self, question: Question) -> None:
        row, operation = question.row, self.operations[question.row.key]
        before = self.op_rows[operation.key]
        verdict: Any = None
        if KINDS[operation.kind]["has_lookup"]:
            verdict = Happened(question.ref) if question.ref else NotHappened("no such key")
            verdict = verdict if question.answered else Unresolved("no answer")
        current = operation.attempt == question.attempt and before["status"] == "unknown"
        late = question.asked_at >= operation.absent_from
        if current and isinstance(verdict, NotHappened) and late:
            operation.absent = True
        said = self.reconciler._apply(row, verdict, "reconciler")
        if said == "not_happened":
            assert current, "14: a verdict of another attempt"
            assert late, "14: absent, and asked too early"
            assert operation.gone, "14: absent, and its sender may live"
        elif said == "outcome_confirmed":
            assert current, "14: a verdict of another attempt"
        elif said == "resend":
            resumed = [o for o in self.operations.values() if o.key.split(":")[0] == row.job_id]
            for other in resumed:
                if self.op_rows[other.key]["status"] == "unknown":
                    sendable = other.may_be_resent(self.now) or (other.policy == other.attempt and other.policy > 0)
                    assert sendable, f"4: resumed with {other}"
        elif said == "policy_send_again":
            assert operation.policy_allows(self.now), "4: the policy before its time"
        if KINDS[operation.kind]["if_unknown"] == "send_again" and current:
            (marked,) = self.sql.execute(
                "SELECT policy_at IS NOT NULL FROM safe_effects.operation WHERE key = %s", (operation.key,)
            ).fetchone() or (False,)
            if marked:
                assert operation.policy_allows(self.now), "4: the policy before its time"
                operation.policy = operation.attempt

    # -- the operator --------------------------------------------------------------------------------------------------

    @rule(n=pick, rare=st.integers(0, 3))
    @precondition(lambda self: self.jobs)
    def cancel(self, n: int, rare: int) -> None:
        if rare < 3:
            return
        job = list(self.jobs.values())[n % len(self.jobs)]
        row = self.rows[job.id]
        found = self.store.row("CANCEL", id=job.id, reason="by hand", actor="operator:ann")
        assert (found is not None) == (row["status"] not in TERMINAL), "9: an end was cancelled"
        if found is not None:
            job.cancelled = True

    @rule(n=pick)
    @precondition(lambda self: any(row["status"] in {"failed", "cancelled", "unknown"} for row in self.rows.values()))
    def retry(self, n: int) -> None:
        job = list(self.jobs.values())[n % len(self.jobs)]
        row = self.rows[job.id]
        found = self.store.row("RETRY", id=job.id, reason="once more", actor="operator:ann", new_keys=None)
        settled = row["open_ops"] + row["unknown_ops"] == 0
        allowed = row["status"] in {"failed", "cancelled"} or (row["status"] == "unknown" and settled)
        assert (found is not None) == allowed, f"6, 9: a retry of {row}"
        if found is not None:
            job.cancelled = False
            job.expires_at, job.gives_up_at = None, self.now + MAX_AGE
            self.retried.add(job.id)
            self.ended.pop(job.id, None)

    @rule(n=pick)
    @precondition(lambda self: any(o["status"] == "unknown" for o in self.op_rows.values()))
    def resolve(self, n: int) -> None:
        """The operator knows, for certain."""
        unknown = [o["key"] for o in self.op_rows.values() if o["status"] == "unknown"]
        self._resolve(unknown[n % len(unknown)])

    def _resolve(self, key: str) -> bool:
        operation, row = self.operations[key], self.op_rows[key]
        ref = self.provider.knows(key, self.now, False)
        senders = [r for r in [*self.runs, *self.zombies] if r.nonce is not None and r.key == key]
        if ref is None and (senders or any(r.key == key and r.may_arrive(self.now) for r in self.requests)):
            return False
        rows = self.store.rows(
            "VERDICT", job=row["job_id"], key=key, attempt=operation.attempt, fence=operation.fence,
            status="outcome_confirmed" if ref else "not_happened", ref=ref, result="null" if ref else None, error=None,
            evidence="{}", asked_at=None, trusted=True, actor="operator:ann", reason="resolved by hand",
        )  # fmt: skip
        assert rows
        return True

    # -- what always holds ---------------------------------------------------------------------------------------------

    @invariant()
    def holds(self) -> None:
        self.counts["steps"] += 1
        assert self.sql.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
        (jobs, operations, log) = self.sql.execute(LOOK, (self.last_log,)).fetchone() or ([], [], [])
        self.rows = {row["id"]: row for row in jobs}
        self.op_rows = {row["key"]: row for row in operations}
        assert self.rows.keys() == self.jobs.keys(), "1: one row for each accepted job"
        assert self.op_rows.keys() == self.operations.keys(), "3: an operation for each intent"
        self._check_log(log)
        self._check_jobs()
        self._check_ledger()

    def _check_log(self, log: list[dict[str, Any]]) -> None:
        for row in log:
            self.last_log = max(self.last_log, row["id"])
            before, after, key = row["from_status"], row["to_status"], row["operation_key"]
            subject = key or row["job_id"]
            assert row["actor"], "7: who?"
            assert self.logged.get(subject) == before, f"7: a gap before {row}"
            self.logged[subject] = after
            if key is not None:
                if before is not None:
                    assert OperationStatus(after) in OPERATION_TRANSITIONS[OperationStatus(before)], row
                if before == "unknown" and after != "intent_recorded":
                    assert row["actor"].startswith(GROUNDS), f"6: no grounds: {row}"
                continue
            if before is not None:
                assert JobStatus(after) in JOB_TRANSITIONS[JobStatus(before)], row
            fence = self.fences.setdefault(row["job_id"], 0)
            assert row["fence"] == fence + (after == "leased"), f"2, 7: the fence of {row}"
            self.fences[row["job_id"]] = row["fence"]
            if before in {"failed", "cancelled"}:
                assert row["job_id"] in self.retried, f"9: {row}"
            if after in {"failed", "cancelled"} and before == "unknown":
                self.counts["pending ends"] += 1
            self.counts[f"{before} > {after}"] += 1
        for subject, status in self.logged.items():
            row = self.rows.get(subject) or self.op_rows[subject]
            assert row["status"] == status, f"7: log and row disagree: {subject}"

    def _check_jobs(self) -> None:
        running = 0
        for row in self.rows.values():
            own = [o["status"] for o in self.op_rows.values() if o["job_id"] == row["id"]]
            job = self.jobs[row["id"]]
            assert row["fence"] == self.fences[row["id"]] == job.fence, "2"
            assert row["open_ops"] == own.count("intent_recorded"), "the number of open operations"
            assert row["unknown_ops"] == own.count("unknown"), "the number of unknown operations"
            assert row["tenant"] == job.tenant
            assert row["idempotency_key"] == job.key
            if row["status"] == "running":
                assert row["lease_token"] == str(job.token), "2: another's lease"
                running += row["pool"] == "p"
            else:
                assert row["open_ops"] == 0, "6: an open operation, and nobody runs"
            if row["status"] in TERMINAL:
                assert row["unknown_ops"] == 0, "5, 6: ended with an open question"
                assert row["status"] != "succeeded" or row["outcome_ref"], "5: a reference"
                end = tuple(row[name] for name in ("status", "fence", "outcome_ref", "result", "error", "attempts"))
                assert self.ended.setdefault(row["id"], end) == end, "9: an end changed"
            else:
                assert row["id"] not in self.ended, f"9: an end was left: {row}"
            assert row["status"] != "unknown" or row["unknown_ops"] or row["held"], (
                f"8: parked without a question: {row}"
            )
            # Who waits for a slot is woken by whoever frees one.
            reachable = row["due"] or row["id"] in self.messages or row["waiting_for"]
            assert row["status"] != "queued" or reachable, f"8: nobody will deliver {row}"
        assert running <= POOL, "10: more of the pool than may run"

    def _check_ledger(self) -> None:
        for key, happened in self.provider.accepted.items():
            operation, row = self.operations[key], self.op_rows[key]
            if operation.policy == 0:
                assert len(happened) <= 1, f"4: {key} happened twice"
                assert not row["doubled"], f"9: a double effect is told that was none: {row}"
            assert row["status"] not in {"refused", "not_happened"} or operation.policy, (
                f"happened, and recorded: {row}"
            )
        for key, row in self.op_rows.items():
            operation = self.operations[key]
            assert (row["attempt"], row["fence"]) == (operation.attempt, operation.fence), "4: another's attempt"
            if row["status"] == "outcome_confirmed":
                refs = [ref for _, ref in self.provider.accepted.get(key, [])]
                assert row["provider_ref"] in refs, f"confirmed, and the provider knows nothing of it: {row}"

    def teardown(self) -> None:
        """8: with workers, sweeper and reconciler back, everything ends, or is parked with a question that is open."""
        self.counts["histories"] += 1
        if self.rows.keys() != self.jobs.keys():
            return  # it failed before it looked
        for run in [*self.runs, *self.zombies]:
            self.forget(run)
        self.dead = self.begun  # all are stopped, and others start
        for process in self.dead:
            process.died_at = self.now if process.alive else process.died_at
        for request in self.requests:
            request.dead = True
        self._recover()
        for _ in range(8):
            if not self._more_to_do():
                break
            self._recover()
        for row in self.rows.values():
            assert row["status"] in {*TERMINAL, "unknown"}, f"8: accepted work did not end: {row}"
            if row["status"] == "unknown" and not row["held"]:
                open_keys = [o["key"] for o in self.op_rows.values() if o["job_id"] == row["id"]]
                for key in open_keys:
                    if self.op_rows[key]["status"] == "unknown":
                        self._may_stay_open(key)

    def _more_to_do(self) -> bool:
        statuses = {row["status"] for row in self.rows.values()} - set(TERMINAL)
        if statuses - {"unknown"}:
            return True
        return any(
            row["status"] == "unknown" and KINDS[self.operations[key].kind]["has_lookup"]
            for key, row in self.op_rows.items()
        )

    def _may_stay_open(self, key: str) -> None:
        kind = self.operations[key].kind
        if KINDS[kind]["has_lookup"]:
            # All senders are seen to be dead and every deadline is long past: a look-up tells.
            raise AssertionError(f"8: {key} stayed unknown, although a look-up tells")

    def _recover(self) -> None:
        self.time_passes(3)
        self.holds()
        self.sweep()
        self.holds()
        if self.dead:
            self.observe_gone()
        self.questions.clear()
        for key in [key for key, row in self.op_rows.items() if row["status"] == "unknown"]:
            self._ask(key)
            self._conclude(self.questions.pop())
            self.holds()
        self.publish()
        for job_id in sorted(self.messages):
            self._run_whole(self.jobs[job_id])
            self.holds()

    def _run_whole(self, job: Job) -> None:
        run = self._claim(job)
        self.holds()
        if run is None:
            return
        for _ in range(6):
            if run.step >= len(job.kinds):
                break
            if self._begin(run):
                self.holds()
                self._send(run)
                if run.request is not None:
                    self._arrive(run.request)
                    self._outcome(run, "outcome_confirmed")
                self.holds()
            elif self.op_rows.get(run.key, {}).get("status") == "unknown" or job.cancelled or job.dying(self.now):
                break
        unknown = self.rows[job.id]["unknown_ops"] > 0
        wish = "succeeded" if run.step >= len(job.kinds) else "unknown" if unknown else "again"
        self._leave(run, wish)
        self.holds()


def _travel(hours: int) -> bytes:
    moves = " ".join(
        _MOVE.format(
            table=table, columns=", ".join(f"{name} = {name} - interval '{hours} hours'" for name in names.split())
        )
        for table, names in _MOVED.items()
    )
    return TRAVEL.format(moves=moves).encode()


_ACCEPT: dict[str, Any] = {
    "task": "tests.task", "queue": "celery", "priority": 0, "parent": None, "retries": 0, "eta": None, "fair": True,
    "admitted": False, "enlisted": False, "envelope": b"{}", "settle": True, "stamps": None, "actor": "producer",
    "lead": 5.0, "patience": "2s", "due": 60.0,
}  # fmt: skip
_INTENT: dict[str, Any] = {
    "effect": "tests.effect", "keyed": False, "repeatable": False, "whole_body": False, "args": "{}",
    "args_digest": "args", "detached": False, "deadline_is_proof": False, "trace": None,
}  # fmt: skip
