"""Measuring: servers, workers as processes, and how many jobs they do in a second."""

from __future__ import annotations

import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
import redis

from celery_safe_effects.testing import EmbeddedPostgres, EmbeddedRedis, RabbitMQServer, ServerNotFound
from tests.bench.environment import installed
from tests.bench.systems.work import KINDS, counted

ROOT = Path(__file__).resolve().parent.parent.parent
SYSTEMS = Path(__file__).resolve().parent / "systems"
PEERS = ("dbos", "procrastinate", "relier", "absurd")
GUESSED = {"plain": 1500, "safe": 800, "dbos": 200, "procrastinate": 400, "relier": 350, "absurd": 250}
"""Jobs a second, to choose how many a round has; nothing else depends on it."""
LIMIT = 90.0
"""Seconds after which a round ends with what was done."""


class Cell(NamedTuple):
    """One comparison."""

    kind: str
    concurrency: int
    broker: str
    results: bool = False

    def __str__(self) -> str:
        return f"{self.kind:>5} c={self.concurrency} {self.broker}{' results' if self.results else ''}"


class Round(NamedTuple):
    """What one system did in one round.

    Attributes:
        jobs: a second, between the first fifth and the last twentieth.
        enqueued: single calls a second.
        commits, wal: transactions and bytes of write-ahead log of the whole server, for each job.
        uss: megabytes that belong to one child alone; of peers, to their one process.
        cores: milliseconds of a core for each job, by who took them: the worker's main process, its children, the
            database, the broker, and nobody.
    """

    jobs: float
    enqueued: float
    commits: float
    wal: float
    uss: float
    cores: dict[str, float]


class Bench:
    """Servers and environments of one run.

    Arguments:
        systems: what is measured; peers that cannot be installed are left out, and said so.
        seconds: about how long a round runs.
        fsync_ms: milliseconds by which each of the database's fsyncs is slowed down.
    """

    def __init__(self, systems: Sequence[str], *, seconds: float, fsync_ms: float = 0.0) -> None:
        self.systems = list(systems)
        self.seconds = seconds
        self.fsync_ms = fsync_ms
        self._stack = ExitStack()
        self._number = 0

    def __enter__(self) -> Bench:
        with ExitStack() as stack:
            self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
            self.folder.chmod(0o755)  # the server runs as another user
            preload = slow_fsync(self.folder, self.fsync_ms) if self.fsync_ms else None
            self.postgres = stack.enter_context(_Postgres(preload))
            self.redis = stack.enter_context(EmbeddedRedis())
            try:
                self.rabbitmq: RabbitMQServer | None = stack.enter_context(RabbitMQServer())
            except ServerNotFound as exc:
                print(f"RABBITMQ IS NOT MEASURED: {exc}", file=sys.stderr)
                self.rabbitmq = None
            self.python = peers() if set(self.systems) & set(PEERS) else None
            if self.python is None:
                self.systems = [name for name in self.systems if name not in PEERS]
            self.absurd_sql = absurd_sql(self.folder, self.python) if "absurd" in self.systems else None
            if self.absurd_sql is None and "absurd" in self.systems:
                print("ABSURD IS NOT MEASURED: its schema could not be had", file=sys.stderr)
                self.systems.remove("absurd")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def about(self) -> dict[str, Any]:
        """The machine and the run."""
        with psycopg.connect(self.postgres.dsn()) as connection:
            row = connection.execute("SELECT version()").fetchone()
        return {
            "python": platform.python_version(),
            "machine": platform.platform(),
            "cores": os.cpu_count(),
            "postgres": row[0] if row else None,
            "fsync_ms": self.fsync_ms,
        }

    def takes_part(self, name: str, cell: Cell) -> bool:
        """Whether a peer is measured in a cell: once, on the broker that it knows, without results."""
        return cell.broker == "redis" and not cell.results and cell.kind in ("noop", "one", "io50")

    # -- one round -----------------------------------------------------------------------------------------------------

    @contextmanager
    def stage(self, name: str, cell: Cell) -> Iterator[dict[str, str]]:
        """A fresh database and an empty broker; gives the environment of the system's processes."""
        self._number += 1
        database = f"bench_{self._number}"
        tally = self.folder / database
        tally.mkdir()
        url = self.postgres.create_database(database)
        client = redis.Redis.from_url(self.redis.url(0))
        client.flushall()
        broker = self.redis.url(0)
        if cell.broker == "rabbitmq":
            assert self.rabbitmq is not None
            self.rabbitmq.add_vhost(database)
            broker = self.rabbitmq.url(database)
        env = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "BENCH_DATABASE": url,
            "BENCH_BROKER": broker,
            "BENCH_BACKEND": self.redis.url(1),
            "BENCH_RESULTS": "1" if cell.results else "0",
            "BENCH_CONCURRENCY": str(cell.concurrency),
            "BENCH_TALLY": str(tally),
            "RELIER_REDIS_URL": self.redis.url(2),
            "RELIER_CELERY_BROKER_URL": self.redis.url(0),
            "RELIER_SECRET_KEY": "x" * 40,
            "RELIER_LOG_LEVEL": "ERROR",
        }
        if self.absurd_sql is not None:
            env["BENCH_ABSURD_SQL"] = str(self.absurd_sql)
        try:
            yield env
        finally:
            client.close()
            self.postgres.drop_database(database)

    def run(self, name: str, *arguments: str, env: dict[str, str]) -> str:
        """Run a system's command to its end."""
        done = subprocess.run(
            self._command(name, *arguments), env=env, check=False, capture_output=True, text=True, cwd=ROOT
        )
        if done.returncode != 0:
            raise SystemExit(f"{name} {' '.join(arguments)} failed:\n{(done.stdout + done.stderr)[-2000:]}")
        return done.stdout

    def _command(self, name: str, *arguments: str) -> list[str]:
        if name in PEERS:
            assert self.python is not None
            return [str(self.python), str(SYSTEMS / "main.py"), f"{name}_peer", *arguments]
        return [sys.executable, "-m", "tests.bench.systems.main", name, *arguments]

    @contextmanager
    def worker(self, name: str, cell: Cell, env: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
        """A running worker."""
        command = self._command(name, "worker")
        if name not in PEERS:
            celery = [sys.executable, "-m", "celery", "-A", f"tests.bench.systems.{name}:app", "worker"]
            command = [*celery, "-c", str(cell.concurrency), "--without-gossip", "--without-mingle", "-l", "error"]
        log = (Path(env["BENCH_TALLY"]) / "worker.log").open("wb")
        process = subprocess.Popen(
            command, env=env, cwd=SYSTEMS if name in PEERS else ROOT, stdout=log, stderr=log, start_new_session=True
        )
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            log.close()

    def round(self, name: str, cell: Cell) -> Round:
        """Enqueue, then work, then read what it cost."""
        effects, seconds = KINDS[cell.kind]
        guess = GUESSED[name] / (1 + effects / 3)
        if seconds:
            guess = min(guess, cell.concurrency / seconds)
        jobs = max(60, int(guess * self.seconds))
        with self.stage(name, cell) as env:
            self.run(name, "prepare", env=env)
            enqueued = (jobs - 10) / float(self.run(name, "enqueue", cell.kind, str(jobs), env=env).split()[-1])
            before = self._server()
            with self.worker(name, cell, env) as process:
                rate, cores = self._rate(jobs, process, cell.broker, env)
                uss = max((_uss(pid) for pid in _descendants(process.pid)), default=_uss(process.pid))
            after = self._server()
            done = counted(Path(env["BENCH_TALLY"]))[0]
        return Round(rate, enqueued, (after[0] - before[0]) / done, (after[1] - before[1]) / done, uss, cores)

    def _rate(
        self, jobs: int, process: subprocess.Popen[bytes], broker: str, env: dict[str, str]
    ) -> tuple[float, dict[str, float]]:
        server = self.rabbitmq if broker == "rabbitmq" else self.redis
        parts = {"main": process.pid, "database": self.postgres.pid, "broker": server.pid if server else None}
        tally = Path(env["BENCH_TALLY"])
        low, high = jobs // 5, jobs - max(1, jobs // 20)
        samples: list[tuple[float, int]] = []
        first, before = 0, _processor(parts)
        give_up = time.monotonic() + LIMIT
        while time.monotonic() < give_up:
            samples.append((time.monotonic(), counted(tally)[0]))
            if samples[-1][1] >= low > first:
                first, before = samples[-1][1], _processor(parts)
            if samples[-1][1] >= jobs:
                break
            if process.poll() is not None:
                raise SystemExit(f"a worker ended:\n{(tally / 'worker.log').read_text()[-2000:]}")
            time.sleep(0.02)
        after = _processor(parts)
        inside = [(at, count) for at, count in samples if low <= count <= high]
        if len(inside) < 2 or inside[-1][0] == inside[0][0]:
            raise SystemExit(
                f"only {samples[-1][1]} of {jobs} jobs were done:\n{(tally / 'worker.log').read_text()[-2000:]}"
            )
        cores = {who: (after[who] - before[who]) / max(1, samples[-1][1] - first) for who in before}
        return (inside[-1][1] - inside[0][1]) / (inside[-1][0] - inside[0][0]), cores

    def _server(self) -> tuple[int, int]:
        time.sleep(1.1)  # backends report what they did once a second
        with psycopg.connect(self.postgres.dsn()) as connection:
            row = connection.execute(
                "SELECT sum(xact_commit)::bigint, pg_current_wal_lsn() - '0/0'::pg_lsn FROM pg_stat_database"
            ).fetchone()
        assert row is not None
        return int(row[0]), int(row[1])

    def compare(self, cell: Cell, systems: Sequence[str], rounds: int) -> dict[str, list[Round]]:
        """Rounds of all systems in turn."""
        if cell.broker == "rabbitmq" and self.rabbitmq is None:
            return {}
        found: dict[str, list[Round]] = {name: [] for name in systems}
        for number in range(rounds):
            turn = number % len(systems)
            for name in [*systems[turn:], *systems[:turn]]:
                found[name].append(self.round(name, cell))
        return found


# -- environments ------------------------------------------------------------------------------------------------------


class _Postgres(EmbeddedPostgres):
    """Settings of a small server, as PostgreSQL's own documentation advises them for its memory."""

    def __init__(self, preload: Path | None) -> None:
        super().__init__(settings={"shared_buffers": "1GB", "max_connections": 200, "max_wal_size": "4GB"})
        self._preload = preload

    def _environment(self) -> dict[str, str]:
        more = {"LD_PRELOAD": str(self._preload)} if self._preload is not None else {}
        return {**super()._environment(), **more}


def peers() -> Path | None:
    """The interpreter of the peers' environment; ``None`` where they cannot be installed."""
    folder = Path(os.environ.get("SAFE_EFFECTS_BENCH_VENV") or ROOT / ".venv-bench")
    python = installed(folder, Path(__file__).resolve().parent / "peers.txt")
    if python is None:
        print("THE PEERS ARE NOT MEASURED: they cannot be installed here", file=sys.stderr)
    return python


def absurd_sql(folder: Path, python: Path | None) -> Path | None:
    """Absurd's schema, which its SDK does not bring along, out of a package that does."""
    if python is None:
        return None
    command = [str(python), "-m", "pip", "download", "-qq", "--no-deps", "--disable-pip-version-check"]
    options = ["--python-version", "3.12", "--only-binary=:all:", "-d", str(folder), "django-absurd==1.0.1"]
    subprocess.run([*command, *options], check=False)
    for wheel in folder.glob("django_absurd*.whl"):
        shutil.unpack_archive(wheel, folder / "absurd", "zip")
        for found in sorted((folder / "absurd").glob("django_absurd/migrations/0001*.sql")):
            return found
    return None


def slow_fsync(folder: Path, milliseconds: float) -> Path:
    """A library to preload whose fsync and fdatasync take longer."""
    source = folder / "slow.c"
    source.write_text(
        "#define _GNU_SOURCE\n#include <dlfcn.h>\n#include <time.h>\n"
        f"static void wait_(void) {{ struct timespec t = {{0, {int(milliseconds * 1e6)}}}; nanosleep(&t, 0); }}\n"
        "#define SLOW(name) int name(int fd) { static int (*real)(int); "
        "if (!real) real = (int (*)(int)) dlsym(RTLD_NEXT, #name); wait_(); return real(fd); }\n"
        "SLOW(fsync)\nSLOW(fdatasync)\n"
    )
    library = folder / "slow.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    return library


# -- processes ---------------------------------------------------------------------------------------------------------


def _processor(parts: dict[str, int | None]) -> dict[str, float]:
    """Milliseconds of a core that each of these processes and their descendants took so far, and that nobody took.

    0 where the system does not say.
    """
    tick = 1000 / os.sysconf("SC_CLK_TCK")
    taken = dict.fromkeys((*parts, "children", "nobody"), 0.0)
    for name, pid in parts.items():
        if pid is not None:
            taken[name] += tick * _ticks(pid)
            taken["children" if name == "main" else name] += tick * sum(map(_ticks, _descendants(pid)))
    with suppress(OSError):
        idle = Path("/proc/stat").read_text().split("\n", 1)[0].split()[4:6]
        taken["nobody"] = tick * sum(map(int, idle))
    return taken


def _ticks(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])


def _descendants(pid: int) -> list[int]:
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            fields = (path / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents.setdefault(int(fields[1]), []).append(int(path.name))
    found, waiting = [], [pid]
    while waiting:
        for child in parents.get(waiting.pop(), []):
            found.append(child)
            waiting.append(child)
    return found


def _uss(pid: int) -> float:
    """Megabytes that no other process has a share in; 0 where the system does not say."""
    try:
        lines = Path(f"/proc/{pid}/smaps").read_text().splitlines()
    except OSError:
        return 0.0
    kilobytes = sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Clean:", "Private_Dirty:")))
    return kilobytes / 1024
