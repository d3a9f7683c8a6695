"""The pages on a server of their own: on loopback unless told otherwise, and reading only without a token."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import secrets
import signal
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from tornado.httpserver import HTTPServer
from tornado.netutil import bind_sockets
from tornado.web import Application, HTTPError, RedirectHandler, RequestHandler, url

from ...errors import ConfigurationError
from ...words import address
from .handlers import POLICY, STYLE, TEMPLATES, Place, loader, pages

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...app import SafeEffects

LEAST: Final = 16
"""Characters of a token, at least."""
SIGNED_IN: Final = "safe_effects_console"
HOURS: Final = 12
"""For which somebody stays signed in."""
WRONG: Final = 1.0
"""Seconds that a wrong token costs."""


def is_loopback(host: str) -> bool:
    """Whether an address or name is this machine's own."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class Console(Place, RequestHandler):
    """A page's base class on our own server."""

    frame = "frame.html"

    @property
    def safe(self) -> SafeEffects:  # type: ignore[override]
        return self.settings["safe"]  # type: ignore[no-any-return]

    def actor(self) -> str | None:
        name = self.get_signed_cookie(SIGNED_IN, max_age_days=HOURS / 24)
        return None if name is None else name.decode()

    def why_not(self) -> str:
        if self.settings["token"] is None:
            return "Reading only: to change jobs, start the console with SAFE_EFFECTS_CONSOLE_TOKEN or --token-file."
        return f"Reading only: sign in at {self.reverse_url('safe_effects_sign_in')} to change jobs."

    def may_read(self) -> None:
        # A name that somebody else points to this machine must not make a browser read pages for them.
        host = urlsplit(f"//{self.request.host}").hostname or ""
        if self.settings["loopback"] and not is_loopback(host):
            raise HTTPError(403, reason="Not a name of this machine")
        if not self.settings["loopback"] and self.actor() is None:
            self.redirect(self.reverse_url("safe_effects_sign_in"))

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        raised = kwargs.get("exc_info")
        reason = getattr(raised[1], "reason", None) if raised else None
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        self.finish(f"{status_code} {reason or HTTPStatus(status_code).phrase}\n")


class SignIn(Console):
    """A name, which is recorded, and the token."""

    def set_default_headers(self) -> None:
        self.set_header("Content-Security-Policy", POLICY)
        self.set_header("Cache-Control", "no-store")

    def get(self) -> None:
        self._show()

    async def post(self) -> None:
        name = " ".join(self.get_body_argument("name", "").split())
        given, token = self.get_body_argument("token", ""), self.settings["token"]
        if token is None or not hmac.compare_digest(given.encode(), token.encode()):
            await asyncio.sleep(WRONG)
            self.set_status(403)
            self._show("That is not the token.")
        elif not name.isprintable() or not 0 < len(name) <= 80:
            self.set_status(400)
            self._show("Say who you are: it is recorded with what you do.")
        else:
            secure = self.request.protocol == "https"
            self.set_signed_cookie(SIGNED_IN, name, expires_days=None, httponly=True, samesite="Strict", secure=secure)
            self.redirect(self.reverse_url("safe_effects"), status=303)

    def _show(self, error: str | None = None) -> None:
        content = self.render_string("sign_in.html", error=error, closed=self.settings["token"] is None)
        self.render("frame.html", content=content.decode(), title="Sign in", style=STYLE)


def application(safe: SafeEffects, *, host: str, token: str | None) -> Application:
    """The console as a Tornado application.

    Arguments:
        safe: the app's SafeEffects.
        host: where it will listen, which decides whether reading needs the token, too.
        token: the shared secret of those who may change jobs; ``None``: nobody may.

    Raises:
        ConfigurationError: a token that is too short, or none on an address that others can reach.
    """
    if token is not None and len(token) < LEAST:
        raise ConfigurationError(
            f"the console's token has {len(token)} characters; give it at least {LEAST}, for one "
            '`python -c "import secrets; print(secrets.token_urlsafe())"`'
        )
    loopback = is_loopback(host)
    if not loopback and token is None:
        raise ConfigurationError(
            f"the console on {host} can be reached by others: give it a token (SAFE_EFFECTS_CONSOLE_TOKEN or "
            "--token-file), or let it listen on 127.0.0.1"
        )
    return Application(
        [
            url(r"/", RedirectHandler, {"url": "/safe-effects", "permanent": False}),
            url(r"/safe-effects/sign-in", SignIn, name="safe_effects_sign_in"),
            *pages(Console),
        ],
        safe=safe,
        token=token,
        loopback=loopback,
        template_loader=loader(str(TEMPLATES)),
        cookie_secret=secrets.token_hex(32),
        xsrf_cookies=True,
        xsrf_cookie_kwargs={"samesite": "Strict", "httponly": True},
    )


def serve(safe: SafeEffects, *, host: str, port: int, token: str | None, ready: Callable[[str], object]) -> None:
    """Serve until the process is told to end.

    Arguments:
        safe: the app's SafeEffects.
        host, port: where; port 0 takes a free one.
        token: see :func:`application`.
        ready: gets the address once it can be reached.

    Raises:
        ConfigurationError: for a token that will not do, or an address that cannot be listened on.
    """
    made = application(safe, host=host, token=token)
    try:
        sockets = bind_sockets(port, host)
    except OSError as exc:
        raise ConfigurationError(f"cannot listen on {host}:{port}: {exc.strerror or exc}") from None

    async def run() -> None:
        over = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, over.set)
        server = HTTPServer(made)
        server.add_sockets(sockets)
        ready(f"{address(host, sockets[0].getsockname()[1])}/safe-effects")
        await over.wait()
        server.stop()
        await server.close_all_connections()

    asyncio.run(run())
