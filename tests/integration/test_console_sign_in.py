"""The console's sign-in: how long it lasts, and what a wrong token costs whom."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from celery import Celery
from tornado.httpserver import HTTPServer
from tornado.netutil import bind_sockets
from tornado.web import create_signed_value

from celery_safe_effects import SafeEffects
from celery_safe_effects.contrib.console import server

TOKEN = "a token of twenty-four.."


@pytest.fixture
def safe(database_url: str) -> Iterator[SafeEffects]:
    app = Celery("console", broker="memory://", set_as_current=False)
    app.conf.safe_effects_database_url = database_url
    made = SafeEffects(app)
    yield made
    made.close()
    app.close()


@pytest.fixture
def served(safe: SafeEffects) -> Iterator[tuple[httpx.Client, Any]]:
    """A client, and the application in this process."""
    made = server.application(safe, host="127.0.0.1", token=TOKEN)
    (socket,) = bind_sockets(0, "127.0.0.1")
    up, over = threading.Event(), asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def run() -> None:
        loops.append(asyncio.get_running_loop())
        http = HTTPServer(made)
        http.add_sockets([socket])
        up.set()
        await over.wait()
        http.stop()
        await http.close_all_connections()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    try:
        assert up.wait(10)
        with httpx.Client(base_url=f"http://127.0.0.1:{socket.getsockname()[1]}", timeout=20) as client:
            yield client, made
    finally:
        loops[0].call_soon_threadsafe(over.set)
        thread.join()


def form(client: httpx.Client, token: str) -> dict[str, str]:
    page = client.get("/safe-effects/sign-in")
    (xsrf,) = re.findall(r'name="_xsrf" value="([^"]+)"', page.text)
    return {"_xsrf": xsrf, "name": "Ada", "token": token}


@pytest.mark.parametrize(("minutes", "lasts"), [(12 * 60 - 1, True), (12 * 60 + 1, False)])
def test_a_sign_in_ends_after_twelve_hours(served: tuple[httpx.Client, Any], minutes: int, lasts: bool) -> None:
    client, app = served
    signed = client.post("/safe-effects/sign-in", data=form(client, TOKEN))
    assert (signed.status_code, "Reading only" in client.get("/safe-effects").text) == (303, False)
    older = create_signed_value(
        app.settings["cookie_secret"], server.SIGNED_IN, "Ada", clock=lambda: time.time() - minutes * 60
    )
    client.cookies.set(server.SIGNED_IN, older.decode(), domain="127.0.0.1", path="/")
    assert len([c for c in client.cookies.jar if c.name == server.SIGNED_IN]) == 1
    assert ("Reading only" in client.get("/safe-effects").text) is not lasts
    acted = client.post("/safe-effects/cancel/nobody", data={**form(client, TOKEN), "reason": "late"})
    assert (acted.status_code == 403) is not lasts


def test_a_wrong_token_has_to_wait_and_holds_up_nobody(
    served: tuple[httpx.Client, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, _ = served
    waits, go_on = threading.Event(), threading.Event()
    asked: list[float] = []

    async def sleep(seconds: float) -> None:
        asked.append(seconds)
        waits.set()
        await asyncio.to_thread(go_on.wait, 20)

    data = form(client, "a wrong token of some length")
    monkeypatch.setattr(server, "asyncio", SimpleNamespace(sleep=sleep))
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.post, "/safe-effects/sign-in", data=data)
        try:
            assert waits.wait(10)
            assert asked == [server.WRONG]
            assert server.WRONG >= 1
            assert client.get("/safe-effects").status_code == 200, "others are served meanwhile"
            assert not answer.done()
        finally:
            go_on.set()
        assert answer.result(20).status_code == 403
    signed = client.post("/safe-effects/sign-in", data={**data, "token": TOKEN})
    assert (signed.status_code, len(asked)) == (303, 1), "the right one waits for nothing"
