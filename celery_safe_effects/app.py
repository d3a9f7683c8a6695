"""``SafeEffects``: the composition root, which alone knows the concrete parts."""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable, Collection, Iterable
from typing import Any

import psycopg

from . import canonical, doctor, faults, signals
from .config import Config, from_conf
from .doctor import Finding
from .effects import Effect, all_effects, registered
from .engine import failures, loop, process
from .engine.admission import Admission, LimitInUse, StoredLimits
from .engine.job import Hooks, key_of
from .engine.lease import LeaseKeeper
from .engine.metrics import COUNTED, ENDED, LOOKED, Metric, Metrics
from .engine.prune import Pruned, Pruner
from .engine.rebuild import Rebuilder, Republished
from .engine.reconcile import Reconciled, Reconciler
from .engine.sweep import Sweeper, Swept
from .errors import ConfigurationError, NotAllowed, NotFound, SafeEffectsError
from .glue import gate, mapped, periodic, threads, worker
from .glue.announce import Announcer
from .glue.asynchronous import send
from .glue.eager import Eager
from .glue.many import Many
from .glue.publish import Publisher
from .glue.stopping import Stopping
from .glue.task import SafeTask, keep_built_ins_plain
from .glue.teller import Teller
from .glue.trace import END
from .limits import Limits
from .states import JobStatus, OperationStatus
from .store import migrate
from .store.grants import Grants
from .store.hot import Lease, Store
from .values import Enqueued, Happened, InFlight, JobRow, NotHappened, OperationRow, Refused, TransitionRow

logger = logging.getLogger(__name__)


class SafeEffects:
    """Adds safe jobs to a Celery app.

    Arguments:
        app: the Celery app; or give it later to :meth:`init_app`.

    Nothing is read, opened or started here: settings are validated and connections are opened at their first use.
    """

    SETTLE_TRIES = 8
    """Deliveries of an end that Celery was not told, before the sweeper gives up."""

    def __init__(self, app: Any = None) -> None:
        self._app: Any = None
        self._config: Config | None = None
        self._store: Store | None = None
        self._admission: Admission | None = None
        self._keeper: LeaseKeeper | None = None
        self._making = threading.Lock()
        self._kept: list[Any] = []
        self.timer: Any = None
        self.stopping = Stopping()
        self.express: list[str] = []
        """The queues whose express lanes this worker consumes."""
        self._owner: tuple[int, str, str] = (0, "", "")
        if app is not None:
            self.init_app(app)

    def init_app(self, app: Any) -> None:
        """Attach to an app: publishing, worker steps, beat entries, the command line.

        Arguments:
            app: a Celery app; each app takes one SafeEffects, and each SafeEffects one app.

        Raises:
            ConfigurationError: when either is taken, or ``task_cls=SafeTask`` has made Celery's own tasks already.
        """
        if self._app is not None:
            raise ConfigurationError("this SafeEffects has an app already; make another one for another app")
        if app.__dict__.get("_safe_effects") is not None:
            raise ConfigurationError(f"the app {app.main!r} has a SafeEffects already")
        keep_built_ins_plain(app)
        self._app = app
        app.__dict__["_safe_effects"] = self
        self.publisher = Publisher(self)
        self.publisher.install()
        self.teller = Teller(self)
        self.eager = Eager(self)
        self.announce = Announcer(self).announce
        self.hooks = Hooks(double_effect=self._on_double_effect)
        periodic.install(self, app)
        app.steps["worker"].add(worker.make_step(self))
        app.steps["consumer"].add(gate.make_gate(self))
        app.steps["consumer"].add(worker.make_consumer_step(self))
        self._connect_signals(app)

    def call_later(self, seconds: float, call: Callable[[], Any]) -> None:
        """Call something in the worker's own event loop; without a worker, never."""
        if self.timer is not None:
            self.timer.call_after(seconds, call)

    def keep(self, receiver: Any) -> None:
        """Keep a signal receiver alive as long as this object."""
        self._kept.append(receiver)

    def _connect_signals(self, app: Any) -> None:
        from celery import signals as celery_signals

        def on_setup(sender: Any = None, instance: Any = None, **_: Any) -> None:
            if instance is not None and instance.app is app:
                worker.prepare(self, app, instance.hostname)

        def on_beat(**_: Any) -> None:
            faults.enter("beat")
            faults.arm_from_environment()

        def on_told(sender: Any = None, **_: Any) -> None:
            """Celery has stored the end and sent the continuations; only then is the job settled."""
            if isinstance(sender, SafeTask) and sender.app is app:
                end = sender.request.__dict__.pop(END, None)
                if end is not None:
                    if faults.armed is not None:
                        faults.at(faults.Point.AFTER_TELL, sender.request.id)
                    self.keeper.settle(sender.request.id, end.fence)

        def on_retried(sender: Any = None, request: Any = None, **_: Any) -> None:
            """RETRY is stored by now, perhaps over the end that another worker has reached meanwhile."""
            if isinstance(sender, SafeTask) and sender.app is app and request is not None:
                self.teller.recheck(request.id)

        def on_exit(**_: Any) -> None:
            """What is not settled would be delivered once more."""
            self.flush()

        def on_child_exit(**_: Any) -> None:
            """A child ends without the interpreter's own clean-up."""
            loop.close()

        for receiver in (on_setup, on_beat, on_told, on_retried, on_exit, on_child_exit, self.stopping.begin):
            self.keep(receiver)
        celery_signals.worker_shutting_down.connect(self.stopping.begin, weak=False)
        celery_signals.beat_init.connect(on_beat, weak=False)
        celery_signals.task_retry.connect(on_retried, weak=False)
        celery_signals.worker_process_shutdown.connect(on_exit, weak=False)
        celery_signals.worker_process_shutdown.connect(on_child_exit, weak=False)
        celery_signals.worker_shutdown.connect(on_exit, weak=False)
        celery_signals.celeryd_after_setup.connect(on_setup, weak=False)
        celery_signals.task_success.connect(on_told, weak=False)
        celery_signals.task_failure.connect(on_told, weak=False)

    # -- the parts -----------------------------------------------------------------------------------------------------

    @property
    def app(self) -> Any:
        """The Celery app.

        Raises:
            ConfigurationError: before :meth:`init_app`.
        """
        if self._app is None:
            raise ConfigurationError("this SafeEffects has no app yet; call init_app(app)")
        return self._app

    @property
    def config(self) -> Config:
        """The validated settings.

        Raises:
            ConfigurationError: naming the key that is missing or wrong.
        """
        if self._config is None:
            self._config = from_conf(self.app.conf)
        return self._config

    @property
    def store(self) -> Store:
        """The database, opened at its first use in each process."""
        if self._store is None:
            config = self.config
            with self._making:  # a second one, made by another thread, would be a second pool of connections
                if self._store is None:
                    faults.arm_from_environment()
                    self._store = Store(config, alone=lambda: self.prefork)
        return self._store

    @property
    def admission(self) -> Admission:
        """The door: limits, and why they refuse."""
        if self._admission is None:
            defaults = {"max_attempts": self.config.max_attempts, "max_age": self.config.max_age}
            self._admission = Admission(self.store, self.config.limits, defaults)
        return self._admission

    @property
    def keeper(self) -> LeaseKeeper:
        """The leases of this process."""
        if self._keeper is None:
            with self._making:  # two threads of a pool may ask at once
                if self._keeper is None:
                    own = Store(self.config, natively=True)
                    self._keeper = LeaseKeeper(own, self.config.heartbeat_interval, self._on_lost, self._on_late)
        return self._keeper

    @property
    def sweeper(self) -> Sweeper:
        """The sweep."""
        return Sweeper(
            self.store,
            self.config,
            deliver=self.publisher.deliver,
            deliver_posted=self.publisher.deliver_posted,
            finish_chords=self.publisher.chords.finish,
            ask=self.publisher.ask,
            declare=self.publisher.wire.declare_again,
            count=self.count,
            on_parked=self._on_parked,
            on_moved=self.announce,
            settle_tries=self.SETTLE_TRIES,
            limits=self.admission.given(),
        )

    @property
    def rebuilder(self) -> Rebuilder:
        """What brings the broker back to what the database says."""
        return Rebuilder(self.store, declare=self.publisher.wire.declare_again, deliver=self.publisher.deliver)

    @property
    def reconciler(self) -> Reconciler:
        """The reconciliation."""
        return Reconciler(
            self.store,
            interval=self.config.reconcile_interval,
            find_effect=self.find_effect,
            longest_lookup=self.longest_lookup,
            deliver_now=self.publisher.deliver_now,
            on_moved=self.announce,
            count=self.count,
            tracing=self.hooks.tracing,
            leave=threads.leave,
        )

    @property
    def pruner(self) -> Pruner:
        """The pruning of finished jobs."""
        return Pruner(self.store)

    @property
    def prefork(self) -> bool:
        """Whether this process is a pool child of its own, which may be killed without harming another job."""
        from billiard.process import current_process

        return str(getattr(current_process(), "name", "")).startswith(("ForkPool", "SpawnPool"))

    def owner(self, hostname: str | None) -> str:
        """Who acts: the worker's node name, the process id and its start time."""
        pid, host, found = self._owner
        if pid != os.getpid() or host != hostname:
            identity = process.identity().rpartition("|")[2]
            found = f"{hostname or 'producer'}/{os.getpid()}/{identity}"
            self._owner = (os.getpid(), hostname or "", found)
        return found

    def close(self) -> None:
        """Close this process's connections; they open again when needed."""
        if self._store is not None:
            self._store.connections.close()

    def flush(self) -> None:
        """Write what is noted only: an end that is not settled would be delivered once more."""
        if self._keeper is not None:
            self._keeper.flush(self.store)
            self._keeper.speak()

    def task_names(self) -> list[str]:
        """The names of the app's SafeTasks."""
        return sorted(name for name, task in self.app.tasks.items() if isinstance(task, SafeTask))

    def check_declarations(self) -> None:
        """Build what is built lazily, so that a wrong declaration is found at start."""
        for name in self.task_names():
            task = self.app.tasks[name]
            task._check_for_worker()
            if task.effects is None:
                task._body_effect()
            for found in task._declared or ():
                if found.uses_loop:
                    loop.check(f"effect {found.name!r}")
            if task._is_async or (task.effects is None and task._body_effect().uses_loop):
                loop.check(f"task {name!r}")

    def refuse_risks(self) -> None:
        """Refuse what is certain to break safety, in the doctor's words.

        Raises:
            ConfigurationError: unless ``safe_effects_accept_risks`` accepts it.
        """
        doctor.refuse(self)

    def add_companions(self) -> None:
        """Register what runs the items of ``map``, ``starmap`` and ``chunks``, for each of the app's SafeTasks."""
        for name in self.task_names():
            task = self.app.tasks[name]
            if getattr(task, "mapped", None) is None:
                mapped.companion(task)

    def find_effect(self, name: str, task: str) -> Effect[Any, Any] | None:
        """The effect of a recorded name: a registered one, or the whole body of a task."""
        found = registered(name)
        if found is None and task in (name, name + mapped.ENDING):
            known = self.app.tasks.get(name)
            if isinstance(known, SafeTask) and known.effects is None:
                found = known._body_effect()
        return found

    def longest_lookup(self) -> float:
        """Seconds that the slowest lookup of this process's effects may take."""
        bodies = [self.app.tasks[name] for name in self.task_names()]
        known = [*all_effects(), *(task._body_effect() for task in bodies if task.effects is None)]
        return max((found.options.lookup_timeout for found in known), default=0.0)

    # -- what happened elsewhere ---------------------------------------------------------------------------------------

    def count(self, name: str, label: str = "", by: int = 1) -> None:
        """Add to a counter; losing it is safe."""
        try:
            self.store.count(name, label, by)
        except (SafeEffectsError, psycopg.Error):
            logger.debug("counter %s could not be written", name, exc_info=True)

    def _on_lost(self, lease: Lease) -> None:
        self.count("leases_lost", "renewal")

    def _on_late(self, lease: Lease, seconds: float) -> None:
        try:
            self.store.rows("WORKER_PAUSED", owner=lease.owner, seconds=seconds)
        except (SafeEffectsError, psycopg.Error):
            logger.debug("a pause of %.1f s could not be written", seconds, exc_info=True)

    def _on_double_effect(self, key: str, job_id: str, ref: str) -> None:
        signals.double_effect.send(sender=key, operation_key=key, job_id=job_id, ref=ref)

    def _on_parked(self, row: Any) -> None:
        task = self.app.tasks.get(row.task)
        if task is not None:
            self.teller.unknown(task, row.id, None, row.reason or "lease_expired")

    # -- producers -----------------------------------------------------------------------------------------------------

    def enqueue_many(self, items: Iterable[Any], *, transaction: Any = None) -> list[Enqueued]:
        """Enqueue many calls of SafeTasks at once: few statements, a verdict for each, and none hurts another.

        Arguments:
            items: signatures, such as ``task.s(1).set(idempotency_key="order-1", tenant="acme", countdown=5)``; or
                tuples ``(task, args, kwargs, options)``, the task by name too, of which the last may be left out. Two
                items of one key are as two calls in this order.
            transaction: as in ``apply_async``: the jobs and the caller's rows commit or vanish together.

        Returns:
            an :class:`~celery_safe_effects.Enqueued` for each item, in order. What is wrong with an item, or stands
            against it, is its verdict's ``error`` and is not raised.

        Raises:
            ConfigurationError: for what is no transaction.
            SchemaMismatch: when the database is of another version.
            ReplayMismatch: in a job's body that sent other messages before.
        """
        return Many(self.publisher, transaction).run(items)

    async def aenqueue_many(self, items: Iterable[Any], *, transaction: Any = None) -> list[Enqueued]:
        """As :meth:`enqueue_many`, without blocking the event loop; ``transaction`` may be asynchronous."""
        found: list[Enqueued] = await send(
            functools.partial(self.enqueue_many, list(items)), {"transaction": transaction}
        )
        return found

    async def aapply_async(self, signature: Any, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        """Send a signature, group, chain or chord without blocking the event loop; a task has a method of this name.

        Arguments:
            signature: what has Celery's ``apply_async``.
            args, kwargs, options: as for its ``apply_async``; ``transaction`` may be asynchronous.

        Returns:
            what its ``apply_async`` returns.
        """
        return await send(functools.partial(signature.apply_async, args, kwargs), options)

    # -- operators -----------------------------------------------------------------------------------------------------

    def upgrade(self, *, grants: Grants | None = None, revoke: Collection[str] = ()) -> list[int]:
        """Bring the schema up to date, and the rights of the roles that were granted any.

        Arguments:
            grants: database roles by kind, ``{"producer": "web", "worker": "worker", "observer": ["grafana"]}``: each
                gets what its kind needs, now and with every later upgrade.
            revoke: roles that lose all that they have in the schema; before ``grants``.

        Returns:
            the migrations applied.

        Raises:
            SchemaMismatch: when the schema is newer than this library.
            ConfigurationError: for a kind or a role that does not exist, and for the role that owns the schema.
        """
        return migrate.upgrade(self.config.database_url, self.config.schema, grants=grants, revoke=revoke)

    def sweep(self) -> Swept:
        """Sweep now, in this process."""
        return self.sweeper.run("operator:sweep")

    def reconcile(self, keys: list[str] | None = None) -> Reconciled:
        """Reconcile now, in this process: due operations, or those of ``keys``."""
        return self.reconciler.run("operator:reconcile", keys)

    def overview(self) -> dict[str, Any]:
        """Counts by status, the oldest waiting jobs, maintenance and double effects, as one look at the database.

        Returns:
            the columns of the statement ``VIEW_OVERVIEW``; times are the database's, ``at`` is its present. Counting
            ends at 100,001 of a kind, and of what has ended at 10,001.
        """
        found: dict[str, Any] = self.store.look("VIEW_OVERVIEW", most=COUNTED + 1, ended=ENDED + 1)[0]._asdict()
        return {**found, "jobs": found["jobs"] or {}, "operations": found["operations"] or {}}

    def set_limits(
        self, limits: Limits | None, *, tenant: str | None = None, task: str | None = None, actor: str = "set_limits"
    ) -> None:
        """Store limits in the database: for every process, from the next enqueue and claim on, before the settings'.

        Jobs that run keep running; those that wait for a slot are woken by the next sweep.

        Arguments:
            limits: the limits of the scope, instead of those stored for it before; ``None`` removes them. Entries of
                ``pool_running`` and ``tenants`` are stored for their pool and tenant.
            tenant: only for this tenant.
            task: only for this task: ``max_attempts``, ``max_age`` and ``max_operations``.
            actor: who; shown beside the stored limits.

        Raises:
            ConfigurationError: for limits that mean nothing in that scope; nothing was stored.
        """
        self.admission.store_limits(limits, tenant=tenant, task=task, actor=f"operator:{actor}")

    def limits(self) -> list[LimitInUse]:
        """Every limit that is set, and what stands against it now."""
        return self.admission.in_use()

    def stored_limits(self) -> list[StoredLimits]:
        """What :meth:`set_limits` has stored.

        Returns:
            one entry a scope: ``*``, ``tenant:<name>``, ``task:<name>`` or ``pool:<name>``.
        """
        return self.admission.stored()

    def doctor(self) -> list[Finding]:
        """Find what will hurt, in the database, the broker, the workers and the app's declarations; takes some seconds.

        Returns:
            what was found, problems first; each says how to mend it.
        """
        return doctor.examine(self)

    def metrics(self) -> list[Metric]:
        """What the database says about queues, leases, limits, open questions and counted events; reads only.

        Returns:
            every metric of ``docs/metrics.md``; ``contrib.prometheus`` makes Prometheus' text of them.

        Raises:
            StoreUnavailable: when the database cannot be reached.
        """
        return Metrics(self.store, self.admission, self.config.republish_after).collect()

    def prune(self, *, progress: Callable[[int, int], object] | None = None) -> Pruned:
        """Delete finished jobs past their retention now, in this process.

        Arguments:
            progress: told from time to time how many of how many are gone.
        """
        return self.pruner.run("operator:prune", progress)

    def job(self, job_id: str) -> JobRow:
        """One job.

        Raises:
            NotFound: when there is none.
        """
        found = self.store.rows("VIEW_JOB", id=job_id)
        if not found:
            raise NotFound(f"there is no job {job_id!r}", job_id=job_id)
        return JobRow(*found[0])

    def jobs(
        self, status: str | None = None, tenant: str | None = None, task: str | None = None, limit: int = 1000
    ) -> list[JobRow]:
        """Jobs by status, tenant and task, newest first.

        Arguments:
            status, tenant, task: only those with this status, of this tenant, of this task.
            limit: at most so many. By tenant and task the newest 10,000 jobs of each status (or ``limit``, if that is
                more) are searched, all parked ones, and as many of a tenant's queued ones; the view ``jobs`` has all.
        """
        wanted = {"statuses": _statuses(JobStatus, status), "tenant": tenant, "task": task}
        return [JobRow(*row) for row in self.store.look("VIEW_JOBS", **wanted, looked=max(LOOKED, limit), limit=limit)]

    def searched(self, status: str | None = None, limit: int = 1000) -> int | None:
        """How many jobs of each status :meth:`jobs` searches by tenant and task; ``None`` where that is all of them."""
        statuses, looked = _statuses(JobStatus, status), max(LOOKED, limit)
        return looked if self.store.look("VIEW_JOBS_BEYOND", statuses=statuses, looked=looked)[0].beyond else None

    def operation(self, key: str) -> OperationRow:
        """One operation.

        Raises:
            NotFound: when there is none.
        """
        found = self.store.rows("VIEW_OPERATION", key=key)
        if not found:
            raise NotFound(f"there is no operation {key!r}", key=key)
        return OperationRow(*found[0])

    def in_flight(self, tenant: str | None = None, task: str | None = None, limit: int = 1000) -> list[InFlight]:
        """What workers own now, by tenant and task, the longest owned first; at most ``limit``."""
        return [InFlight(*row) for row in self.store.rows("VIEW_LIVE", tenant=tenant, task=task, limit=limit)]

    def operations(
        self,
        job_id: str | None = None,
        status: str | None = None,
        limit: int = 1000,
        *,
        effect: str | None = None,
        tenant: str | None = None,
        older_than: float | None = None,
    ) -> list[OperationRow]:
        """Operations, in the order of their first intents.

        Arguments:
            job_id, status, effect, tenant: only those of this job, with this status, of this effect, of this tenant.
            limit: at most so many. Without a job, the oldest 10,000 of each status (or ``limit``, if that is more) are
                searched by effect, tenant and age, and all unknown ones; the view ``operations`` has all.
            older_than: only those whose intent is older than so many seconds.
        """
        statuses = _statuses(OperationStatus, status)
        wanted = {"statuses": statuses, "effect": effect, "tenant": tenant, "older": older_than}
        found = (
            self.store.look("VIEW_OPERATIONS", **wanted, looked=max(LOOKED, limit), limit=limit)
            if job_id is None
            else self.store.rows("VIEW_OPERATIONS_OF_JOB", **wanted, job=job_id, limit=limit)
        )
        return [OperationRow(*row) for row in found]

    def transitions(self, job_id: str, after: int = 0) -> list[TransitionRow]:
        """The log of a job, oldest first; only rows with an id above ``after``."""
        return [TransitionRow(*row) for row in self.store.rows("VIEW_TRANSITIONS", id=job_id, after=after)]

    def resolve(self, key: str, verdict: Happened | NotHappened | Refused, actor: str, reason: str) -> OperationRow:
        """Resolve an unknown operation by an operator's word; recorded with actor and reason.

        Arguments:
            key: the operation's key.
            verdict: what is known.
            actor: who says so.
            reason: why it is known; not empty.

        Returns:
            the operation as it stands now.

        Raises:
            NotFound: when there is no such operation.
            NotAllowed: when it is not unknown, or no reason is given.
        """
        if not reason or not reason.strip() or not actor or not actor.strip():
            raise NotAllowed("a verdict needs an actor and a reason; nothing was changed")
        row = self.operation(key)
        params: dict[str, Any] = {"ref": None, "result": None, "error": None}
        if isinstance(verdict, Happened):
            if not isinstance(verdict.ref, str) or not verdict.ref:
                raise NotAllowed("Happened needs the provider's reference, a non-empty string; nothing was changed")
            status = "outcome_confirmed"
            params |= {"ref": verdict.ref, "result": canonical.encode(verdict.result)}
        elif isinstance(verdict, NotHappened):
            status = "not_happened"
        elif isinstance(verdict, Refused):
            exc = verdict.error
            error = failures.to_json(exc) if isinstance(exc, BaseException) else {"text": str(exc)}
            status, params = "refused", params | {"error": canonical.encode(error)}
        else:
            raise NotAllowed(f"{verdict!r} is no verdict; give Happened, NotHappened or Refused")
        rows = self.store.rows(
            "VERDICT",
            job=row.job_id,
            key=key,
            attempt=row.attempt,
            fence=row.fence,
            status=status,
            evidence=canonical.encode({"operator": actor, "reason": reason}),
            asked_at=None,
            trusted=True,
            actor=f"operator:{actor}",
            reason=reason,
            **params,
        )
        if not rows:
            now = self.operation(key)
            raise NotAllowed(f"operation {key!r} is {now.status}, not unknown; nothing was changed")
        self.announce(f"operator:{actor}", row.job_id)
        self.publisher.deliver_now(row.job_id)
        return self.operation(key)

    def cancel(self, job_id: str, reason: str, *, actor: str = "cancel") -> JobRow:
        """Cancel a job: at once where nobody works on it, else at its next checkpoint or effect.

        Arguments:
            job_id: the job.
            reason: why; it ends up in the log.
            actor: who; the log shows ``operator:<actor>``.

        Returns:
            the job as it stands now.

        Raises:
            NotFound: when there is no such job.
            NotAllowed: when it has ended already.
        """
        if not self.store.rows("CANCEL", id=job_id, reason=reason, actor=f"operator:{actor}"):
            raise NotAllowed(f"job {job_id} is {self.job(job_id).status} already; nothing was changed")
        self.announce(f"operator:{actor}", job_id)
        self.publisher.deliver_now(job_id)
        return self.job(job_id)

    def retry(self, job_id: str, reason: str, *, new_keys: Iterable[str] = (), actor: str = "retry") -> JobRow:
        """Run a failed, cancelled or mismatched job again; attempts start anew, recorded outcomes stay.

        Arguments:
            job_id: the job.
            reason: why; it ends up in the log.
            new_keys: steps that the provider refused and that are sent again, under a new key; others stay refused.
            actor: who; the log shows ``operator:<actor>``.

        Raises:
            NotFound: when there is no such job.
            NotAllowed: when its state does not allow it, or a step has not been refused.
        """
        steps = list(dict.fromkeys(new_keys))
        numbers = canonical.encode(self._new_keys(job_id, steps)) if steps else None
        if not self.store.rows("RETRY", id=job_id, reason=reason, actor=f"operator:{actor}", new_keys=numbers):
            job = self.job(job_id)
            why = f" ({job.reason})" if job.reason else ""
            raise NotAllowed(
                f"job {job_id} is {job.status}{why}; only failed and cancelled jobs, and parked ones without an "
                "unresolved operation, are retried; nothing was changed"
            )
        self.announce(f"operator:{actor}", job_id)
        self.publisher.deliver_now(job_id)
        return self.job(job_id)

    def _new_keys(self, job_id: str, steps: list[str]) -> dict[str, int]:
        """The numbers of new keys for refused steps of a job."""
        row = self.store.row("JOB", id=job_id)
        if row is None:
            raise NotFound(f"there is no job {job_id!r}", job_id=job_id)
        task = self.app.tasks.get(row.task)
        if getattr(task, "_declared", None) is None:
            raise NotAllowed(
                f"task {row.task!r} declares no effects, or is not known here: a new key is for a step of declared "
                "effects; nothing was changed"
            )
        present: dict[str, int] = canonical.decode(row.new_keys) or {}
        recorded = {record.key: record for record in self.store.rows("RECORDED", id=job_id)}
        for step in steps:
            record = recorded.get(key_of(job_id, row.generation, step, present.get(step)))
            status = "not recorded" if record is None else record.status
            if record is None or record.keyed or status != OperationStatus.REFUSED:
                raise NotAllowed(
                    f"step {step!r} of job {job_id} is {status}; only a refused step, which no other job shares, gets "
                    "a new key; nothing was changed"
                )
        return {step: present.get(step, 1) + 1 for step in steps}

    def republish(
        self,
        *job_ids: str,
        all: bool = False,  # noqa: A002 - the command's word
        progress: Callable[[int, int], object] | None = None,
    ) -> Republished:
        """Publish stored messages now: of these jobs, of everything due, or of everything.

        Arguments:
            job_ids: the jobs; without any, what is due or found to be lost.
            all: every queued job whose message should be in the broker, since the broker may have lost them: one that
                is there already then comes twice, which does no harm. What waits for its time, a key or a slot is
                published when that comes.
            progress: with ``all``: told how many of how many messages are out, from time to time.

        Returns:
            how many messages went out; its ``missed`` counts those that the broker did not take, which the sweep
            publishes.

        Raises:
            NotAllowed: when jobs are named and ``all`` is given, too.
        """
        if all:
            if job_ids:
                raise NotAllowed("name jobs, or give all=True; nothing was published")
            return self.rebuilder.publish(self.sweeper.publish, self.publisher.deliver_posted, progress=progress)
        if not job_ids:
            sweeper = self.sweeper
            return Republished(sweeper.publish() + sweeper.republisher.run())
        self.publisher.soon(*job_ids)
        return Republished(self.publisher.deliver_now(*job_ids))

    def new_epoch(self, *, actor: str = "new_epoch") -> int:
        """Say that the database was restored from an older state, before anything else uses it again.

        Messages of jobs that the restored state does not know are parked from then on, reason ``row_missing``, however
        late they come; without this, they are taken for stale as soon as new jobs have used up the numbers.

        Arguments:
            actor: who says so; it is recorded.

        Returns:
            the first number of the new epoch's jobs.
        """
        return self.rebuilder.new_epoch(f"operator:{actor}")

    def park_restored(self, *, spare: Iterable[str] = (), actor: str = "park_restored") -> int:
        """After :meth:`new_epoch`: park what was not over in the restored state and may have had effects since.

        Each of them becomes ``unknown``, reason ``restored``: :meth:`retry` lets it go on, :meth:`cancel` ends it. Jobs
        whose time has not come, and tasks whose declared effects are none or ``repeatable``, are left alone.

        Arguments:
            spare: further tasks that may go on, by name.
            actor: who says so; it is recorded.

        Returns:
            how many were parked.

        Raises:
            NotAllowed: when no epoch was begun.
        """
        spared = {*self.harmless_tasks(), *spare}
        parked = 0
        for rows in self.rebuilder.park(sorted(spared), f"operator:{actor}"):
            self.announce(f"operator:{actor}", *(row.id for row in rows))
            for row in rows:
                self._on_parked(row)
            parked += len(rows)
        return parked

    def harmless_tasks(self) -> list[str]:
        """The names of the app's SafeTasks that declare no effect but repeatable ones."""
        known = {name: self.app.tasks[name]._declared for name in self.task_names()}
        found = [
            name
            for name, declared in known.items()
            if declared is not None and all(one.options.repeatable for one in declared)
        ]
        return found + [name + mapped.ENDING for name in found]


def _statuses(kind: type[JobStatus] | type[OperationStatus], status: str | None) -> list[str]:
    return [one.value for one in kind if status is None or one == status]


__all__ = ["SafeEffects"]
