"""The soak's world: PostgreSQL, and for each kind of broker an application with workers, beat, provider and load."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import psycopg
from celery import chain, chord, group

from celery_safe_effects.errors import NotAllowed
from celery_safe_effects.store import migrate
from celery_safe_effects.testing import (
    BeatProcess,
    EmbeddedPostgres,
    EmbeddedRedis,
    LocalServer,
    RabbitMQServer,
    TcpProxy,
    WorkerProcess,
)
from example_project.provider_process import ProviderProcess
from tests.soak.lanes import (
    Event,
    Lane,
    beat_lane,
    broker_lane,
    database_lane,
    provider_lane,
    started,
    worker_lane,
)
from tests.soak.names import DEADLINE, LAG, LEASE, WHY
from tests.support.processes import FAST, ROOT, process_environment
from tests.support.provider import KEYLESS
from tests.support.services import queries
from tests.support.tasks import create_app

WORKERS: Final = ("a", "b")


class Site:
    """An application on a broker of its own.

    Arguments:
        kind: of the broker, `redis` or `rabbitmq`.
        postgres: where its database is made.
        broker: the broker's server.
        results: where Celery stores results, a URL.
        folder: for logs.
        seed: what its load is drawn from.
    """

    def __init__(
        self, kind: str, postgres: EmbeddedPostgres, broker: LocalServer, results: str, folder: Path, seed: str
    ) -> None:
        self.kind = kind
        self.broker = broker
        self.proxy = TcpProxy(broker.host, broker.port)
        self.provider = ProviderProcess()
        self.folder = folder
        self.chance = random.Random(f"{seed}:{kind}: load")
        self.database_url = postgres.create_database(f"soak_{kind}")
        self.dsn = self.database_url.replace("+psycopg", "", 1)
        migrate.upgrade(self.database_url)
        url = f"redis://{self.proxy.host}:{self.proxy.port}/1"
        if kind == "rabbitmq":
            url = f"amqp://guest:guest@{self.proxy.host}:{self.proxy.port}//"
        self.conf: dict[str, Any] = {
            **FAST,
            "safe_effects_lease_ttl": LEASE,
            "safe_effects_max_attempts": 30,  # a job that dies that often is what happens here
            "safe_effects_database_url": self.database_url,
            "broker_url": url,
            "result_backend": results,
            "broker_heartbeat": 5,
            "broker_connection_timeout": 3,
            "broker_transport_options": {"socket_timeout": 10} if kind == "redis" else {},
            "redis_socket_timeout": 5,
        }
        self.app: Any = None
        self.beat: BeatProcess | None = None
        self.workers: dict[str, WorkerProcess] = {}
        self._settings: dict[str, dict[str, Any]] = {}
        self.accepted: list[str] = []
        """Jobs of which the caller was told that they are accepted."""
        self.rolled_back: list[str] = []
        self.refused: list[str] = []
        self.cancelled: list[str] = []

    # -- processes -----------------------------------------------------------------------------------------------------

    def environment(self, **conf: Any) -> dict[str, str]:
        """The environment of a worker or beat."""
        return {
            **process_environment({**self.conf, **conf}, self.provider.client),
            "SAFE_EFFECTS_TEST_DEADLINE": str(DEADLINE),
            "SAFE_EFFECTS_TEST_LOOKUP_LAG": str(LAG),
            "SAFE_EFFECTS_TEST_IDEMPOTENT_FOR": str(7 * 86400),
        }

    def start(self) -> None:
        """Start everything, and wait until it is ready."""
        self.proxy.start()
        self.provider.start()
        self.tell_provider()
        self.app = create_app(self.conf)
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            connection.execute("CREATE TABLE orders (id text PRIMARY KEY, task text NOT NULL)")
        for name in WORKERS:
            started(self.renew(name))
        self.beat = BeatProcess(
            "tests.soak.app:app", name="beat", env=self.environment(), cwd=ROOT, log_path=self._log("beat")
        )
        started(self.beat)

    @property
    def processes(self) -> list[WorkerProcess | BeatProcess]:
        """Those of Celery."""
        return [*self.workers.values(), *([self.beat] if self.beat else [])]

    def renew(self, name: str, **changes: Any) -> WorkerProcess:
        """A worker that is not started yet, in the place of the one of this name.

        Arguments:
            name: which.
            **changes: in what it differs from now on: `concurrency`, `acks_late`, `clock_offset`.
        """
        settings = self._settings.setdefault(name, {"concurrency": 2, "acks_late": True, "clock_offset": None})
        settings.update(changes)
        self.workers[name] = WorkerProcess(
            "tests.soak.app:app",
            name=name,
            env=self.environment(task_acks_late=settings["acks_late"]),
            concurrency=settings["concurrency"],
            clock_offset=settings["clock_offset"],
            cwd=ROOT,
            log_path=self._log(name),
        )
        return self.workers[name]

    def _log(self, name: str) -> Path:
        return self.folder / f"{self.kind}-{name}.log"

    def tell_provider(self) -> None:
        """These effects stand for providers without keys."""
        for kind in KEYLESS:
            self.provider.client.control(kind=kind, dedupe=False)

    def forget(self) -> None:
        """The broker loses everything that it holds."""
        if self.kind == "redis":
            assert isinstance(self.broker, EmbeddedRedis)
            self.broker.command("FLUSHALL")
        else:
            assert isinstance(self.broker, RabbitMQServer)
            self.broker.ctl("delete_vhost", "/")
            self.broker.ctl("add_vhost", "/")
            self.broker.ctl("set_permissions", "guest", ".*", ".*", ".*")

    def heal(self) -> None:
        """Mend everything, so that what was accepted can come to its end."""
        self.broker.resume()
        self.broker.start()
        self.proxy.resume()
        self.provider.resume()
        self.provider.start()
        for fault in ("drop_reply", "refuse", "status_after", "delay_after", "lookup_status"):
            self.provider.client.control(**{fault: None})
        self.tell_provider()
        for name, worker in list(self.workers.items()):
            worker.kill()
            started(self.renew(name, clock_offset=None))
        if self.beat is not None:
            started(self.beat)
        if self.app is not None:
            self.app.safe_effects.close()  # connections of its own that were cut, and that nothing has used since

    def stop(self) -> None:
        """End everything."""
        for process in self.processes:
            process.kill()
        if self.app is not None:
            self.app.safe_effects.close()
            self.app.close()
        self.proxy.stop()
        self.provider.remove()

    def lanes(self, gap: float) -> list[Lane]:
        """What may break here."""
        return [
            *[worker_lane(self, name, gap) for name in WORKERS],
            beat_lane(self, 3 * gap),
            broker_lane(self, 2 * gap),
            provider_lane(self, gap),
        ]

    # -- load ----------------------------------------------------------------------------------------------------------

    def load(self, rate: float, over: threading.Event) -> None:
        """Enqueue until it is over; what is refused or not answered is not accepted.

        Arguments:
            rate: jobs or canvases a second.
            over: ends it.
        """
        self.app.set_current()
        acts = [self.one] * 12 + [self.enlisted] * 3 + [self.canvas] * 2 + [self.many, self.cancel, self.cancel]
        while not over.wait(self.chance.expovariate(rate)):
            act = self.chance.choice(acts)
            try:
                act()
            except Exception as error:
                self.refused.append(f"{type(error).__name__}: {error}"[:200])

    def one(self) -> None:
        """A job, perhaps a later one."""
        name, args = self._choose()
        job = str(uuid4())
        options = {"countdown": self.chance.uniform(0.5, 6)} if self.chance.random() < 0.2 else {}
        self.app.tasks[name].apply_async(args, task_id=job, **options)
        self.accepted.append(job)

    def enlisted(self) -> None:
        """A job and a row that commit together, or not at all."""
        name, args = self._choose()
        job = str(uuid4())
        back = self.chance.random() < 0.3
        with psycopg.connect(self.dsn, connect_timeout=5) as connection:
            connection.execute("INSERT INTO orders VALUES (%s, %s)", [job, name])
            self.app.tasks[name].apply_async(args, task_id=job, transaction=connection)
            if back:
                connection.rollback()
            else:
                connection.commit()
        if back:
            self.rolled_back.append(job)
        else:
            self.accepted.append(job)

    def canvas(self) -> None:
        """A chain or a chord."""
        member, gathered = self.app.tasks["tests.member"], self.app.tasks["tests.gathered"]
        label = uuid4().hex[:6]
        if self.chance.random() < 0.5:
            made = chain(member.s(label), self.app.tasks["tests.pure"].s()).apply_async()
            self.accepted.append(made.parent.id)
        else:
            made = chord(group(member.s(f"{label} {n}") for n in range(3)), gathered.s()).apply_async()
            self.accepted += [one.id for one in made.parent.results]

    def many(self) -> None:
        """Twenty jobs in one statement."""
        pure = self.app.tasks["tests.pure"]
        for found in self.app.safe_effects.enqueue_many([pure.s(n) for n in range(20)]):
            if found.job_id is not None and found.error is None:
                self.accepted.append(str(found.job_id))

    def cancel(self) -> None:
        """Cancel a job of late."""
        latest = self.accepted[-30:]
        if latest:
            job = self.chance.choice(latest)
            with contextlib.suppress(NotAllowed):
                self.app.safe_effects.cancel(job, WHY, actor="soak")
                self.cancelled.append(job)

    def _choose(self) -> tuple[str, tuple[Any, ...]]:
        number = self.chance.randint(1, 10**6)
        return self.chance.choice(
            [
                ("tests.charge", ("cus", number)),
                ("tests.charge", ("cus", number)),
                ("tests.charge_keyed", ("cus", number)),
                ("tests.charge_both", ("cus", number)),
                ("tests.charge_plain", ("cus", number)),
                ("tests.charge_then_mail", ("cus", number)),
                ("tests.agent", (f"order {number}",)),
                ("tests.points", (f"p{number}",)),
                ("tests.retries_itself", (f"r{number}",)),
                ("tests.whole_body", ("cus", number)),
                ("tests.sleep", (self.chance.uniform(0.1, 4),)),
                ("tests.pure", (number,)),
            ]
        )


class World:
    """All of it.

    Arguments:
        brokers: kinds of brokers, each with a site of its own.
        folder: for logs and the report.
        seed: what faults and load are drawn from; what coincides is up to the machine.
    """

    def __init__(self, brokers: Sequence[str], folder: Path, seed: str) -> None:
        self.brokers = brokers
        self.folder = folder
        self.seed = seed
        self.sites: list[Site] = []
        self.lanes: list[Lane] = []
        self.samples: list[dict[str, Any]] = []
        self._stack = ExitStack()

    def __enter__(self) -> World:
        with ExitStack() as stack:
            self.postgres = stack.enter_context(EmbeddedPostgres(settings={"max_connections": 300}))
            self.redis = stack.enter_context(EmbeddedRedis())
            # Results outlive what happens to the broker: they are another machine's.
            results = self.redis if "redis" not in self.brokers else stack.enter_context(EmbeddedRedis())
            for number, kind in enumerate(self.brokers):
                broker: LocalServer = self.redis
                if kind == "rabbitmq":
                    broker = stack.enter_context(RabbitMQServer())
                site = Site(kind, self.postgres, broker, results.url(number), self.folder, self.seed)
                stack.callback(site.stop)
                self.sites.append(site)
                site.start()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        for server in (self.postgres, *[site.broker for site in self.sites]):
            server.resume()
        self._stack.close()

    @property
    def events(self) -> list[Event]:
        """What went wrong, in its order."""
        return sorted((event for lane in self.lanes for event in lane.events), key=lambda event: event.began)

    def run(self, seconds: float, rate: float, gap: float) -> None:
        """Load everything and break everything.

        Arguments:
            seconds: how long.
            rate: what each site enqueues a second.
            gap: seconds between two faults of a worker; other lanes break less often.
        """
        over = threading.Event()
        began = time.monotonic()
        self.lanes = [database_lane(self.postgres, 3 * gap)]
        for site in self.sites:
            self.lanes += site.lanes(gap)
        work = [threading.Thread(target=lane.run, args=(self.seed, began, over), name=lane.name) for lane in self.lanes]
        work += [
            threading.Thread(target=site.load, args=(rate, over), name=f"{site.kind}: load") for site in self.sites
        ]
        work.append(threading.Thread(target=self._sample, args=(began, over), name="samples"))
        for one in work:
            one.start()
        try:
            over.wait(seconds)
        finally:
            over.set()
            for one in work:
                one.join()
        self.seconds = time.monotonic() - began

    def _sample(self, began: float, over: threading.Event) -> None:
        with ExitStack() as stack:
            asked = {site.kind: stack.enter_context(queries(site.dsn)) for site in self.sites}
            while not over.wait(1):
                for kind, sql in asked.items():
                    with contextlib.suppress(psycopg.Error):
                        rows = sql("SELECT status, count(*)::int AS n FROM jobs GROUP BY status")
                        at = time.monotonic() - began
                        self.samples.append({"at": at, "site": kind, **{row["status"]: row["n"] for row in rows}})

    def heal(self) -> None:
        """Mend everything."""
        self.postgres.resume()
        self.postgres.start()
        for site in self.sites:
            site.heal()

    def about(self) -> dict[str, Any]:
        """What was run, for the report."""
        return {
            "seed": self.seed,
            "seconds": round(self.seconds, 1),
            "brokers": list(self.brokers),
            "sites": {
                site.kind: {
                    "accepted": len(site.accepted),
                    "rolled_back": len(site.rolled_back),
                    "not_accepted": Counter(error.partition(":")[0] for error in site.refused),
                    "cancelled": len(site.cancelled),
                }
                for site in self.sites
            },
        }
