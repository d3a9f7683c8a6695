"""Tasks and effects of ``async def``; only apps whose settings ask for them have them, since some pools refuse them."""

from __future__ import annotations

import asyncio
import json
import os
import time
from typing import Any
from urllib.parse import urlencode, urlsplit

from celery import Celery

from celery_safe_effects import Happened, NotHappened, Operation, Outcome, SafeTask, effect
from example_project.provider_client import Row
from tests.support.faults2 import gate
from tests.support.names import PROVIDER_VARIABLE
from tests.support.tasks import DEADLINE, IDEMPOTENT_FOR, ask_model, deploy, mail, refund

ASKED_FOR = "tests_async"
"""The setting that asks for these tasks."""


async def request(method: str, path: str, body: Row | None = None) -> tuple[int, Any]:
    """Ask the provider, without blocking the loop."""
    address = urlsplit(os.environ[PROVIDER_VARIABLE])
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        data = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.0\r\nContent-Length: {len(data)}\r\nContent-Type: application/json\r\n\r\n"
        writer.write(head.encode() + data)
        await writer.drain()
        answer = await reader.read()
    finally:
        writer.close()
    head, _, content = answer.decode().partition("\r\n\r\n")
    return int(head.split()[1]), json.loads(content)


async def call(kind: str, op: Operation, **fields: Any) -> Outcome[Row]:
    """Let the provider do something."""
    status, row = await request("POST", f"/effects/{kind}", {**fields, "key": op.key, "pid": os.getpid()})
    if status != 200:
        raise RuntimeError(f"the provider answered {status}")
    return Outcome(row["ref"], {"kind": kind, **fields})


async def look_up(kind: str, op: Operation) -> Happened | NotHappened:
    """Ask the provider what became of it."""
    status, row = await request("GET", f"/effects?{urlencode({'key': op.key, 'kind': kind})}")
    return NotHappened("no such key") if status == 404 else Happened(row["ref"])


@effect(name="async_charge", deadline=DEADLINE)
async def charge(op: Operation, customer: str) -> Outcome[Row]:
    """The provider of `charge`: it knows no keys, and can be asked."""
    return await call("charge", op, customer=customer)


@charge.lookup
async def find_charge(op: Operation) -> Happened | NotHappened:
    return await look_up("charge", op)


@effect(name="async_tool", idempotent_for=IDEMPOTENT_FOR, deadline=DEADLINE)
async def tool(op: Operation, argument: str, gated: str = "") -> Outcome[Row]:
    """A tool that may wait at a gate, when it is first called, before it asks the provider."""
    if gated and op.attempt == 1:
        await asyncio.to_thread(gate, gated)
    return await call("tool", op, argument=argument)


@tool.lookup
async def find_tool(op: Operation) -> Happened | NotHappened:
    return await look_up("tool", op)


def add_tasks(app: Celery) -> None:
    """Add the tasks, named `tests.<name>`, if the app's settings ask for them.

    Args:
        app: the application of the tests.
    """
    if not app.conf.get(ASKED_FOR):
        return

    def task(name: str, effects: list[Any]) -> Any:
        return app.task(base=SafeTask, bind=True, shared=False, name=f"tests.{name}", effects=effects)

    @task("async_charge", [charge])
    async def async_charge(self: Any, customer: str) -> Any:
        """One effect."""
        return (await charge(customer)).ref

    @task("async_waits", [charge])
    async def async_waits(self: Any, customer: str, before: float, blocks: bool = False) -> Any:
        """Wait, giving way or not; then one effect."""
        if self.job.attempt == 1:
            if blocks:
                time.sleep(before)  # noqa: ASYNC251
            else:
                await asyncio.sleep(before)
        return (await charge(customer)).ref

    @task("async_many", [tool])
    async def async_many(self: Any, count: int, gated: str) -> Any:
        """Several tools at once, of which every second one waits when it is first called."""
        calls = [tool.step(f"tool-{n}")(f"argument {n}", gated if n % 2 else "") for n in range(count)]
        return [outcome.ref for outcome in await asyncio.gather(*calls)]

    @task("async_agent", [ask_model, tool, mail])
    async def async_agent(self: Any, order: str, changes: bool = False) -> Any:
        """Ask, then three tools, one of them synchronous; a gate after the second."""
        plan = (await asyncio.to_thread(ask_model, order)).result["answer"]
        again = changes and self.job.attempt > 1
        await tool(f"refund {order}{' once more' if again else ''}")
        await asyncio.to_thread(mail, plan)
        if self.job.attempt == 1:
            await asyncio.to_thread(gate, order)
        return (await tool(f"deploy {order}")).ref

    @task("sync_agent", [ask_model, refund, mail, deploy])
    def sync_agent(self: Any, order: str, changes: bool = False) -> Any:
        """The same without a coroutine."""
        plan = ask_model(order).result["answer"]
        refund(f"{order}{' once more' if changes and self.job.attempt > 1 else ''}")
        mail(plan)
        if self.job.attempt == 1:
            gate(order)
        return deploy(order).ref
