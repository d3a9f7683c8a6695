"""The operators' pages, in Flower and alone: what they show, who may change something, and what forgers get."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import unescape
from pathlib import Path
from typing import Any

import httpx
import pytest
from celery import Celery

from celery_safe_effects import Limits
from celery_safe_effects.testing import eventually
from celery_safe_effects.testing._ports import free_port
from example_project.provider_client import Provider
from tests.support.brokers import Broker
from tests.support.checks import assert_invariants, job, log, wait_status
from tests.support.loud import skip_loudly
from tests.support.names import PROVIDER_VARIABLE
from tests.support.processes import APP, ROOT, Workers, process_environment
from tests.support.services import Sql

TOKEN = "a token of twenty-four.."
EVIL = "<script>alert('x')</script>"


@pytest.fixture
def broker(redis_broker: Broker) -> Broker:
    """The pages read the database."""
    return redis_broker


@pytest.fixture(autouse=True)
def _provider_here(provider: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PROVIDER_VARIABLE, provider.url)


@contextmanager
def serving(command: list[str], conf: dict[str, Any], provider: Provider, folder: Path) -> Iterator[Callable[[], str]]:
    """A process that serves pages; gives what it has printed."""
    out = folder / "served.log"
    with out.open("w") as log_file:
        process = subprocess.Popen(
            [sys.executable, "-m", "celery", "-A", APP, *command],
            env={**os.environ, **process_environment(conf, provider)},
            cwd=ROOT,
            stdout=log_file,
            stderr=subprocess.STDOUT,
        )
        try:

            def printed() -> str:
                assert process.poll() is None, out.read_text()[-3000:]
                return out.read_text()

            yield printed
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) in (0, -signal.SIGTERM, 143)
        finally:
            process.kill()
            process.wait()


@contextmanager
def console(
    conf: dict[str, Any], provider: Provider, folder: Path, token: str | None = TOKEN, host: str = "127.0.0.1"
) -> Iterator[httpx.Client]:
    command = ["safe-effects", "console", "--host", host, "--port", "0", "--json"]
    if token is not None:
        (folder / "token").write_text(f"{token}\n")
        command += ["--token-file", str(folder / "token")]
    with serving(command, conf, provider, folder) as printed:
        found = eventually(lambda: re.search(r'^\{"url".*\}$', printed(), re.MULTILINE), 30)
        assert found is not None
        told = json.loads(found.group())
        assert told["writes"] == (token is not None)
        base = told["url"].removesuffix("/safe-effects").replace(host, "127.0.0.1")
        with httpx.Client(base_url=base, timeout=30) as client:
            yield client


@contextmanager
def flower(
    conf: dict[str, Any], provider: Provider, folder: Path, *options: str, prefix: str = ""
) -> Iterator[httpx.Client]:
    (folder / "flowerconfig.py").write_text("from celery_safe_effects.contrib.flower import install; install()\n")
    port = free_port()
    command = ["flower", f"--conf={folder / 'flowerconfig.py'}", "--address=127.0.0.1", f"--port={port}", *options]
    if prefix:
        command.append(f"--url_prefix={prefix}")
    base = f"http://127.0.0.1:{port}" + (f"/{prefix}" if prefix else "")
    with serving(command, conf, provider, folder) as printed, httpx.Client(base_url=base, timeout=30) as client:

        def up() -> bool:
            printed()
            try:
                return client.get("/healthcheck").status_code < 500
            except httpx.TransportError:
                return False

        eventually(up, 30)
        yield client


def text(answer: httpx.Response) -> str:
    return unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", re.sub(r"(?s)<style.*?</style>", " ", answer.text))))


def token_of(answer: httpx.Response) -> str:
    (found, *_) = re.findall(r'name="_xsrf" value="([^"]+)"', answer.text)
    return str(found)


def sign_in(client: httpx.Client, name: str = "Ada", token: str = TOKEN) -> httpx.Response:
    form = client.get("/safe-effects/sign-in")
    return client.post("/safe-effects/sign-in", data={"_xsrf": token_of(form), "name": name, "token": token})


def parked(app: Celery, provider: Provider) -> str:
    """A job of whose effect nobody knows."""
    provider.control(kind="charge_plain", drop_reply=True, times=1)
    return str(app.tasks["tests.charge_plain"].apply((EVIL, 5)).id)


def act(client: httpx.Client, job_id: str, action: str, **fields: str) -> httpx.Response:
    page = client.get(f"/safe-effects/job/{job_id}")
    assert page.status_code == 200
    return client.post(f"/safe-effects/{action}/{job_id}", data={"_xsrf": token_of(page), **fields})


def test_alone(
    app: Celery, app_conf: dict[str, Any], provider: Provider, sql: Sql, tmp_path: Path, workers: Workers
) -> None:
    safe: Any = app.__dict__["_safe_effects"]
    safe.set_limits(Limits(tenant_queued=2), tenant="acme")
    open_job = parked(app, provider)
    waits = app.tasks["tests.pure"].apply_async((1,), tenant="acme", countdown=3600).id
    failed = app.tasks["tests.charge"].apply(("cus_1",)).id
    assert (job(sql, open_job)["status"], job(sql, failed)["status"]) == ("unknown", "failed")
    with console(app_conf, provider, tmp_path) as client:
        # Anybody on this machine reads, by a name of this machine.
        assert client.get("/").headers["Location"] == "/safe-effects"
        page = client.get("/safe-effects")
        for words in (f"{open_job}:1", "charge_plain", "tenant:acme", "tenant_queued", "sweep_stale", "Reading only"):
            assert words in text(page)
        for name, value in {
            "Content-Security-Policy": "frame-ancestors 'none'",
            "X-Frame-Options": "DENY",
            "Cache-Control": "no-store",
        }.items():
            assert value in page.headers[name]
        assert client.get("/safe-effects", headers={"Host": "evil.example"}).status_code == 403
        story = client.get(f"/safe-effects/job/{open_job}")
        assert EVIL not in story.text
        assert EVIL in unescape(story.text)
        for words in ("intent_recorded", "leased", "unknown", "Time line", "Open questions"):
            assert words in text(story)
        assert '<form class="act"' not in story.text
        listed = client.get("/safe-effects/jobs", params={"status": "queued", "tenant": "acme"})
        assert waits in listed.text
        assert open_job not in listed.text
        assert client.get("/safe-effects/jobs", params={"status": "odd"}).status_code == 400
        assert client.get("/safe-effects/job/nobody's").status_code == 404

        # Nobody writes without the token, and nobody by a forged request.
        before = sql("SELECT count(*) AS n FROM transitions")
        assert client.post(f"/safe-effects/cancel/{waits}", data={"reason": "no token"}).status_code == 403
        form = client.get("/safe-effects/sign-in")
        unsigned = client.post(f"/safe-effects/cancel/{waits}", data={"_xsrf": token_of(form), "reason": "unsigned"})
        assert unsigned.status_code == 403
        assert sign_in(client, token="wrong").status_code == 403
        assert sign_in(client, name=" ").status_code == 400
        assert sign_in(client).headers["Location"] == "/safe-effects"
        page = client.get(f"/safe-effects/job/{waits}")
        good = {"_xsrf": token_of(page), "reason": "forged"}
        forged: list[tuple[dict[str, str], dict[str, str]]] = [
            ({"reason": "no token of the form"}, {}),
            ({**good, "_xsrf": "2|00000000|00000000000000000000000000000000|0"}, {}),
            (good, {"Origin": "http://evil.example"}),
            (good, {"Sec-Fetch-Site": "cross-site"}),
        ]
        for data, headers in forged:
            answer = client.post(f"/safe-effects/cancel/{waits}", data=data, headers=headers)
            assert answer.status_code == 403, (data, headers)
        assert sql("SELECT count(*) AS n FROM transitions") == before

        # With a reason, and as who signed in.
        refused = act(client, waits, "cancel", reason="  ")
        assert (refused.status_code, job(sql, waits)["status"]) == (409, "queued")
        assert "say why" in text(refused)
        done = act(client, waits, "cancel", reason="the customer left")
        assert (done.status_code, job(sql, waits)["status"]) == (303, "cancelled")
        assert "is cancelled, or asked to stop" in text(client.get(done.headers["Location"]))
        assert sql("SELECT actor, reason FROM transitions WHERE job_id = %s AND to_status = 'cancelled'", waits) == [
            {"actor": "operator:Ada", "reason": "the customer left"}
        ]
        again = act(client, failed, "retry", reason="the arguments are right now")
        assert (again.status_code, job(sql, failed)["status"]) == (303, "queued")
        too_late = client.post(
            f"/safe-effects/retry/{failed}", data={"_xsrf": token_of(client.get(f"/safe-effects/job/{open_job}")),
                                                   "reason": "twice"}
        )  # fmt: skip
        assert (too_late.status_code, "only failed and cancelled jobs" in text(too_late)) == (409, True)

        key = f"{open_job}:1"
        for fields, said in {
            "happened without its reference": ({"verdict": "happened"}, "give the provider's reference"),
            "what is not JSON": ({"verdict": "happened", "ref": "r", "result": "{"}, "is not JSON"),
            "refused without words": ({"verdict": "refused"}, "in which words"),
        }.values():
            answer = act(client, open_job, "resolve", key=key, reason="seen", **fields)
            assert (answer.status_code, said in text(answer)) == (409, True), said
        answer = act(client, open_job, "resolve", key=f"{failed}:1", verdict="not_happened", reason="mixed up")
        assert answer.status_code == 404
        assert job(sql, open_job)["status"] == "unknown"
        (happened,) = provider.ledger(key=key)
        found = act(
            client, open_job, "resolve", key=key, verdict="happened", ref=happened["ref"], reason="on their list",
            result='{"kind": "charge_plain"}',
        )  # fmt: skip
        assert found.status_code == 303
        workers("a")
        assert wait_status(sql, open_job, "succeeded")["outcome_ref"] == happened["ref"]
        assert "1 unknown > outcome_confirmed #1 (on their list)" in log(sql, open_job)
        wait_status(sql, failed, "failed")
        assert len(provider.ledger(key=key)) == 1
        client.cookies.delete("safe_effects_console")
        assert "Reading only" in text(client.get("/safe-effects"))
    assert_invariants(sql, provider)


def test_alone_without_a_token_it_only_reads(
    app: Celery, app_conf: dict[str, Any], provider: Provider, sql: Sql, tmp_path: Path
) -> None:
    open_job = parked(app, provider)
    with console(app_conf, provider, tmp_path, token=None) as client:
        assert f"{open_job}:1" in client.get("/safe-effects").text
        sign = client.get("/safe-effects/sign-in")
        assert "reads only" in text(sign)
        assert "start the console with" in text(client.get(f"/safe-effects/job/{open_job}"))


def test_where_others_reach_it_nobody_reads_without_the_token(
    app: Celery, app_conf: dict[str, Any], provider: Provider, sql: Sql, tmp_path: Path
) -> None:
    open_job = parked(app, provider)
    with console(app_conf, provider, tmp_path, host="0.0.0.0") as client:
        for path in ("", "/jobs", f"/job/{open_job}"):
            refused = client.get(f"/safe-effects{path}")
            assert (refused.status_code, refused.headers["Location"]) == (302, "/safe-effects/sign-in")
            assert open_job not in refused.text
        form = client.get("/safe-effects/sign-in")
        client.post(f"/safe-effects/cancel/{open_job}", data={"_xsrf": token_of(form), "reason": "unsigned"})
        assert job(sql, open_job)["cancel_requested_at"] is None
        assert sign_in(client).status_code == 303
        assert f"{open_job}:1" in client.get("/safe-effects", headers={"Host": "ops.example"}).text


@pytest.mark.parametrize(
    ("arguments", "token", "words"),
    [
        (["--host", "0.0.0.0"], None, "can be reached by others"),
        ([], "short", "has 5 characters"),
        (["--host", "192.0.2.1"], TOKEN, "cannot listen"),
    ],
)
def test_what_it_does_not_serve(
    app: Celery, app_conf: dict[str, Any], provider: Provider, arguments: list[str], token: str | None, words: str
) -> None:
    env = {**os.environ, **process_environment(app_conf, provider)}
    if token is not None:
        env["SAFE_EFFECTS_CONSOLE_TOKEN"] = token
    done = subprocess.run(
        [sys.executable, "-m", "celery", "-A", APP, "safe-effects", "console", "--port", "0", *arguments],
        env=env, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, words in done.stderr) == (1, True), done.stderr


def test_in_flower(
    app: Celery, app_conf: dict[str, Any], provider: Provider, sql: Sql, tmp_path: Path, workers: Workers
) -> None:
    """Under its login, beside its own pages; a parked job is UNKNOWN there, with its reason."""
    open_job = parked(app, provider)
    with flower(app_conf, provider, tmp_path, "--basic-auth=grace:secret", prefix="ops") as client:
        assert client.get("/safe-effects").status_code == 401
        client.auth = httpx.BasicAuth("grace", "secret")
        page = client.get("/safe-effects")
        assert f"{open_job}:1" in text(page)
        assert "Workers" in text(page), "Flower's navigation"
        # Every page of Flower's has the link, below its prefix.
        assert 'href="/ops/safe-effects"' in client.get("/workers").text
        assert client.get("/tasks").status_code == 200
        story = client.get(f"/safe-effects/job/{open_job}")
        assert EVIL in unescape(story.text)
        assert EVIL not in story.text

        key = f"{open_job}:1"
        fields = {"key": key, "verdict": "not_happened", "reason": "asked the bank"}
        assert client.post(f"/safe-effects/resolve/{open_job}", data=fields).status_code == 403
        good = {**fields, "_xsrf": token_of(story)}
        forged = client.post(f"/safe-effects/resolve/{open_job}", data=good, headers={"Sec-Fetch-Site": "cross-site"})
        assert forged.status_code == 403
        assert job(sql, open_job)["status"] == "unknown"
        done = client.post(f"/safe-effects/resolve/{open_job}", data=good)
        assert done.status_code == 303
        assert done.headers["Location"].startswith(f"/ops/safe-effects/job/{open_job}")
        (row,) = sql("SELECT resolved_by FROM operations WHERE key = %s", key)
        assert row["resolved_by"] == "operator:grace"

        # A parked job in Flower's own list and page.
        workers("a")
        wait_status(sql, open_job, "succeeded")
        provider.control(kind="charge_plain", drop_reply=True, times=1)
        sent = app.tasks["tests.charge_plain"].delay("cus_2", 7)
        wait_status(sql, sent.id, "unknown")

        def shown() -> str:
            found = client.get(f"/api/task/info/{sent.id}")
            assert found.status_code == 200
            assert found.json()["state"] == "UNKNOWN"
            return str(found.json()["exception"])

        assert "outcome_unknown" in eventually(shown, 20)
        assert "UNKNOWN" in text(client.get(f"/task/{sent.id}"))


def test_in_flower_without_a_login_it_only_reads(
    app: Celery, app_conf: dict[str, Any], provider: Provider, sql: Sql, tmp_path: Path
) -> None:
    open_job = parked(app, provider)
    with flower(app_conf, provider, tmp_path) as client:
        page = client.get(f"/safe-effects/job/{open_job}")
        assert "Flower has no login" in text(page)
        assert "_xsrf" not in page.text
        token = client.cookies.get("_xsrf")
        for data in ({"reason": "no"}, {"reason": "no", "_xsrf": token or ""}):
            assert client.post(f"/safe-effects/cancel/{open_job}", data=data).status_code == 403
        assert job(sql, open_job)["cancel_requested_at"] is None


def test_in_flower_under_oauth(
    app: Celery, app_conf: dict[str, Any], provider: Provider, sql: Sql, tmp_path: Path
) -> None:
    """Who signed in with the provider that Flower asks, and is on its list, may act, under that name."""
    from tornado.web import create_signed_value

    def signed(user: str, secret: str = "of this test") -> dict[str, str]:
        """What Flower sets when the provider has named somebody."""
        return {"user": create_signed_value(secret, "user", user).decode()}

    open_job = parked(app, provider)
    options = (
        "--auth=ada@example.com", "--auth_provider=flower.views.auth.GoogleAuth2LoginHandler", "--oauth2_key=k",
        "--oauth2_secret=s", "--oauth2_redirect_uri=http://127.0.0.1/login", "--cookie_secret=of this test",
    )  # fmt: skip
    with flower(app_conf, provider, tmp_path, *options) as client:
        for cookies in ({}, signed("eve@example.com"), signed("ada@example.com", "another secret")):
            client.cookies.clear()
            client.cookies.update(cookies)
            page = client.get(f"/safe-effects/job/{open_job}")
            assert (page.status_code, "/login" in page.headers["Location"]) == (302, True)
            assert client.post(f"/safe-effects/cancel/{open_job}", data={"reason": "no"}).status_code == 403
        client.cookies.clear()
        client.cookies.update(signed("ada@example.com"))
        story = client.get(f"/safe-effects/job/{open_job}")
        assert (story.status_code, "Reading only" in story.text) == (200, False)
        fields = {"key": f"{open_job}:1", "verdict": "not_happened", "reason": "asked the bank"}
        assert client.post(f"/safe-effects/resolve/{open_job}", data=fields).status_code == 403
        # A header that names somebody is no login here, and lets nobody past the form's token.
        forged = client.post(
            f"/safe-effects/resolve/{open_job}", data=fields, headers={"Authorization": "Basic ZXZlOng="}
        )
        assert (forged.status_code, job(sql, open_job)["status"]) == (403, "unknown")
        done = client.post(f"/safe-effects/resolve/{open_job}", data={**fields, "_xsrf": token_of(story)})
        assert done.status_code == 303
    (row,) = sql("SELECT resolved_by FROM operations WHERE job_id = %s", open_job)
    assert row["resolved_by"] == "operator:ada@example.com"


# -- in a browser ------------------------------------------------------------------------------------------------------


@pytest.fixture
def browser(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """A real one without a window."""
    chromium, driver = (shutil.which(name) for name in ("chromium", "chromedriver"))
    if chromium is None or driver is None:
        skip_loudly(request, "needs Chromium and its driver: apt-get install chromium chromium-driver")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for switch in (
        "headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking",
        "disable-component-update", "disable-sync", f"user-data-dir={tmp_path / 'chromium'}", "window-size=1280,1600",
    ):  # fmt: skip
        options.add_argument(f"--{switch}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    made = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    made.set_page_load_timeout(30)
    yield made
    made.quit()


def complaints(browser: Any) -> list[str]:
    """What the browser found wrong: what the page's policy forbids, what is missing."""
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


def shows(browser: Any, selector: str, words: str) -> None:
    """Wait for words on a page: what a click leads to takes the place of what is read."""
    from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException
    from selenium.webdriver.common.by import By

    def seen() -> bool:
        try:
            return words in browser.find_element(By.CSS_SELECTOR, selector).text
        except (NoSuchElementException, StaleElementReferenceException):
            return False

    eventually(seen, message=f"{selector} shows {words!r}")


@pytest.mark.parametrize("where", ["alone", "flower"])
def test_in_a_browser(
    app: Celery, app_conf: dict[str, Any], provider: Provider, sql: Sql, tmp_path: Path, browser: Any, where: str
) -> None:
    """A verdict is given by hand: from the first page to the job's, and into the form."""
    from selenium.webdriver.common.by import By

    open_job = parked(app, provider)
    place = (
        console(app_conf, provider, tmp_path)
        if where == "alone"
        else flower(app_conf, provider, tmp_path, "--basic-auth=grace:secret")
    )
    with place as client:
        base = str(client.base_url).rstrip("/")
        if where == "alone":
            browser.get(f"{base}/safe-effects")
            browser.find_element(By.LINK_TEXT, "sign in").click()
            browser.find_element(By.NAME, "name").send_keys("grace")
            browser.find_element(By.NAME, "token").send_keys(TOKEN)
            browser.find_element(By.TAG_NAME, "button").click()
        else:
            browser.get(f"{base.replace('http://', 'http://grace:secret@')}/workers")
            browser.find_element(By.LINK_TEXT, "Safe effects").click()
        shows(browser, "h1", "Pressure")
        browser.find_element(By.LINK_TEXT, f"{open_job}:1").click()
        shows(browser, "details", EVIL)
        browser.find_element(By.CSS_SELECTOR, "input[value=happened]").click()
        browser.find_element(By.NAME, "ref").send_keys("ch_1")
        browser.find_element(By.CSS_SELECTOR, "form.act input[name=reason]").send_keys("seen on their page")
        browser.find_element(By.XPATH, "//button[text()='Record the verdict']").click()
        shows(browser, "[role=status]", "The verdict is recorded")
        assert sql("SELECT provider_ref, resolved_by FROM operations WHERE job_id = %s", open_job) == [
            {"provider_ref": "ch_1", "resolved_by": "operator:grace"}
        ]
        # Nothing is wider than the window, on a telephone's neither.
        browser.set_window_size(500, 900)
        assert browser.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")
        assert complaints(browser) == []
        assert browser.save_screenshot(str(tmp_path / "page.png"))
