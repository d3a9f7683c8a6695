"""What a test of fault tolerance needs: servers, workers and connections that can be killed, paused and cut.

Everything here runs as local processes, without Docker and without touching a server that already runs. All
of it ends with the process that started it, also when that one is killed.

    with EmbeddedPostgres() as postgres, EmbeddedRedis() as redis:
        url = postgres.create_database("shop")
        worker = WorkerProcess("proj:app", env={"BROKER": redis.url()}).start()
        worker.kill()
"""

from celery_safe_effects.testing._server import LocalServer, ServerFailed, ServerNotFound
from celery_safe_effects.testing.broker import EmbeddedRedis, RabbitMQServer
from celery_safe_effects.testing.crashing import Boundary, CrashProblem, CrashReport, CrashRun, crash_everywhere
from celery_safe_effects.testing.postgres import EmbeddedPostgres
from celery_safe_effects.testing.process import (
    BeatProcess,
    CeleryProcess,
    FaketimeNotFound,
    WorkerProcess,
    eventually,
    find_faketime,
)
from celery_safe_effects.testing.proxy import TcpProxy
from celery_safe_effects.testing.stubs import (
    JOB_ID,
    EffectCall,
    NotReplayable,
    SentMessage,
    StubbedJob,
    assert_replayable,
    stub_effects,
)

__all__ = [
    "JOB_ID",
    "BeatProcess",
    "Boundary",
    "CeleryProcess",
    "CrashProblem",
    "CrashReport",
    "CrashRun",
    "EffectCall",
    "EmbeddedPostgres",
    "EmbeddedRedis",
    "FaketimeNotFound",
    "LocalServer",
    "NotReplayable",
    "RabbitMQServer",
    "SentMessage",
    "ServerFailed",
    "ServerNotFound",
    "StubbedJob",
    "TcpProxy",
    "WorkerProcess",
    "assert_replayable",
    "crash_everywhere",
    "eventually",
    "find_faketime",
    "stub_effects",
]
