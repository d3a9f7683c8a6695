"""A page *Safe effects* inside Flower 2, under its login. Needs Flower and the extra ``console``.

One line in ``flowerconfig.py``::

    from celery_safe_effects.contrib.flower import install; install()
"""

from __future__ import annotations

from base64 import b64decode
from binascii import Error as NotBase64
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import flower.urls as flower_urls
from flower.views import BaseHandler
from tornado.template import Template
from tornado.web import HTTPError

from ..glue.task import of
from .console.handlers import Beside, Place, pages

if TYPE_CHECKING:
    from ..app import SafeEffects

LINK: Final = """<li class="nav-item"><a class="nav-link{% if active_tab == 'safe_effects' %} active{% end %}"
 href="{{ reverse_url('safe_effects') }}">Safe effects</a></li>"""


class Flower(Place, BaseHandler):
    """A page's base class inside Flower."""

    frame = "safe_effects_flower.html"

    @property
    def safe(self) -> SafeEffects:  # type: ignore[override]
        return of(self.application.capp)

    def actor(self) -> str | None:
        """Flower's user. Where it knows none, anybody may have come."""
        user, options = self.current_user, self.application.options
        if isinstance(user, bytes):
            user = user.decode()
        if isinstance(user, str):
            return user
        return self._basic_user() if user and options.basic_auth else None

    def _basic_user(self) -> str | None:
        scheme, _, credentials = self.request.headers.get("Authorization", "").partition(" ")
        try:
            return b64decode(credentials).decode().partition(":")[0] if scheme.lower() == "basic" else None
        except (NotBase64, UnicodeDecodeError):
            return None

    def why_not(self) -> str:
        return (
            "Reading only: Flower has no login. Start it with --basic-auth or --auth to resolve, cancel and retry here."
        )

    def may_read(self) -> None:
        if not self.current_user:
            if self.request.method != "GET":
                raise HTTPError(403)
            self.redirect(self.get_login_url())


class _Loader(Beside):
    """Flower's own templates, its navigation with a link more."""

    def _create_template(self, name: str) -> Any:
        if name != "navbar.html":
            return super()._create_template(name)
        text = (Path(self.root) / name).read_text("utf-8")
        before, end, after = text.partition("</ul>")
        return Template(before + LINK + end + after if end else text, name=name, loader=self)


def install() -> None:
    """Add the page to Flower: call it once, in ``flowerconfig.py``."""
    settings: dict[str, Any] = flower_urls.settings
    if "template_loader" in settings:
        return
    settings["template_loader"] = _Loader(settings["template_path"])
    catch_all = len(flower_urls.handlers) - 1
    flower_urls.handlers[catch_all:catch_all] = pages(Flower)
