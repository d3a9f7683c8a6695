"""The pages as Tornado's request handlers, on top of whichever base class the place has for them."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import psycopg
from tornado import template
from tornado.ioloop import IOLoop
from tornado.web import HTTPError, MissingArgumentError, RequestHandler, url

from ... import words
from ...errors import NotAllowed, NotFound, SafeEffectsError
from ...values import Happened, NotHappened, Refused
from . import looks

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...app import SafeEffects

logger = logging.getLogger(__name__)

TEMPLATES: Final = Path(__file__).parent / "templates"
STYLE: Final = (TEMPLATES / "style.css").read_text("utf-8")
DONE: Final = {
    "resolve": "The verdict is recorded; the job goes on from there.",
    "cancel": "The job is cancelled, or asked to stop at its next checkpoint or effect.",
    "retry": "The job is queued again; what its effects achieved is remembered.",
}
"""What a page says after an action; a link cannot make it say anything else."""
POLICY: Final = (
    "default-src 'none'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; font-src 'self'; script-src 'self';"
    " connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)


class Place:
    """What differs between Flower and a server of our own; a handler's base class mixes it in."""

    safe: SafeEffects
    """The app's SafeEffects."""
    frame = "frame.html"
    """The template around the pages."""

    def actor(self) -> str | None:
        """Who is signed in; ``None`` may read only."""
        raise NotImplementedError

    def why_not(self) -> str:
        """Why this reader may not change anything, and what would let them."""
        raise NotImplementedError

    def may_read(self) -> None:
        """Refuse, or send to where one signs in, who may not even read."""
        raise NotImplementedError


def loader(folder: str) -> template.Loader:
    """The templates of a folder."""
    return template.Loader(folder, autoescape="xhtml_escape", whitespace="single")


class Beside(template.Loader):
    """Our templates by their prefix, and all others from the folder of somebody else."""

    PREFIX = "safe_effects_"

    def resolve_path(self, name: str, parent_path: str | None = None) -> str:
        return name

    def _create_template(self, name: str) -> template.Template:
        if not name.startswith(self.PREFIX):
            return super()._create_template(name)
        text = (TEMPLATES / name.removeprefix(self.PREFIX)).read_text("utf-8")
        return template.Template(text, name=name, loader=self)


def pages(base: type[Any]) -> list[Any]:
    """The pages' addresses and handlers.

    Arguments:
        base: a :class:`Place` and a Tornado request handler in one class.

    Returns:
        Tornado's URL specifications, below ``/safe-effects``.
    """

    class Page(base):
        def prepare(self) -> Any:
            result = super().prepare()
            self.may_read()
            return result

        def set_default_headers(self) -> None:
            super().set_default_headers()
            self.set_header("Content-Security-Policy", POLICY)
            self.set_header("X-Frame-Options", "DENY")
            self.set_header("X-Content-Type-Options", "nosniff")
            self.set_header("Referrer-Policy", "same-origin")
            self.set_header("Cache-Control", "no-store")

        async def ask(self, look: Callable[..., Any], *args: Any) -> Any:
            """Ask the database in a thread: a page that waits for it holds up no other."""
            try:
                return await IOLoop.current().run_in_executor(None, look, *args)
            except NotFound as exc:
                raise HTTPError(404, reason="Not Found") from exc
            except (SafeEffectsError, psycopg.Error) as exc:
                logger.warning("%s cannot be answered: %s", self.request.path, exc)
                self.set_status(503)
                self.show("trouble", code=getattr(exc, "code", "database"))
                return None

        def show(self, name: str, /, **values: Any) -> None:
            actor = self.actor()
            form = self.xsrf_form_html() if actor else ""
            content = _content.load(f"{name}.html").generate(
                **values,
                **self.words(),
                actor=actor,
                why_not=None if actor else self.why_not(),
                xsrf=form,
            )
            title = values.get("title") or "Safe effects"
            self.render(self.frame, content=content.decode(), title=title, style=STYLE)

        def words(self) -> dict[str, Any]:
            def at(name: str, *args: str) -> str:
                return str(self.reverse_url(f"safe_effects{name}", *args))

            return {
                "at": at,
                "ago": looks.ago,
                "moment": words.moment,
                "clock": looks.clock,
                "shown": _shown,
            }

        def text(self, name: str) -> str | None:
            """A form's field, without the blanks around it; ``None`` if it is empty."""
            return self.get_body_argument(name, "").strip() or None

    class Overview(Page):
        async def get(self) -> None:
            found = await self.ask(looks.pressure, self.safe)
            if found is not None:
                self.show("overview", found=found)

    class Jobs(Page):
        async def get(self) -> None:
            wanted = {name: self.get_query_argument(name, "").strip() or None for name in ("status", "tenant", "task")}
            if wanted["status"] not in (None, *looks.states()):
                raise HTTPError(400, reason="no such status")
            found = await self.ask(lambda: self.safe.jobs(**wanted, limit=looks.LISTED + 1))
            if found is not None:
                more = len(found) > looks.LISTED
                self.show("jobs", jobs=found[: looks.LISTED], more=more, wanted=wanted, statuses=looks.states())

    class OneJob(Page):
        async def tell(self, job_id: str, *, done: str | None = None, error: str | None = None) -> None:
            found = await self.ask(looks.story, self.safe, job_id)
            if found is not None:
                self.show("job", found=found, done=done, error=error, title=f"Job {job_id}")

    class Job(OneJob):
        async def get(self, job_id: str) -> None:
            await self.tell(job_id, done=DONE.get(self.get_query_argument("done", "")))

    class Act(OneJob):
        """What changes something: only for who is signed in, with a reason, and from a form of ours."""

        async def post(self, action: str, job_id: str) -> None:
            self.of_our_form()
            actor = self.actor()
            if actor is None:
                raise HTTPError(403, reason="Sign in to change something")
            try:
                reason = self.text("reason")
                if reason is None:
                    raise NotAllowed("say why: the reason is recorded; nothing was changed")
                act = self.action(action, job_id, reason, actor)
                await IOLoop.current().run_in_executor(None, act)
            except MissingArgumentError as exc:
                raise HTTPError(400, reason="a field is missing") from exc
            except NotFound as exc:
                raise HTTPError(404, reason="Not Found") from exc
            except SafeEffectsError as exc:
                self.set_status(409 if isinstance(exc, NotAllowed) else 503)
                await self.tell(job_id, error=exc.message)
                return
            except psycopg.Error as exc:
                logger.warning("%s was not done: %s", self.request.path, exc)
                self.set_status(503)
                await self.tell(job_id, error="the database did not do it; the log of this process says more")
                return
            self.redirect(f"{self.reverse_url('safe_effects_job', job_id)}?done={action}", status=303)

        def of_our_form(self) -> None:
            """The token that the page put into its form, and the browser's own word that the form was on this site."""
            origin = self.request.headers.get("Origin")
            if origin is not None and urlsplit(origin).netloc != self.request.host:
                raise HTTPError(403, reason="Cross-origin request forbidden")
            if self.request.headers.get("Sec-Fetch-Site", "same-origin") != "same-origin":
                raise HTTPError(403, reason="Cross-site request forbidden")
            RequestHandler.check_xsrf_cookie(self)  # Tornado's own: a base class may make exceptions from it

        def action(self, action: str, job_id: str, reason: str, actor: str) -> Callable[[], object]:
            safe = self.safe
            if action == "cancel":
                return lambda: safe.cancel(job_id, reason, actor=actor)
            if action == "retry":
                return lambda: safe.retry(job_id, reason, actor=actor)
            key, verdict = self.get_body_argument("key"), self.verdict()

            def resolve() -> None:
                if safe.operation(key).job_id != job_id:
                    raise NotAllowed(f"operation {key} is of another job; nothing was changed")
                safe.resolve(key, verdict, actor, reason)

            return resolve

        def verdict(self) -> Happened | NotHappened | Refused:
            said = self.get_body_argument("verdict")
            if said == "happened":
                ref = self.text("ref")
                if ref is None:
                    raise NotAllowed("give the provider's reference for what happened; nothing was changed")
                return Happened(ref, self.result())
            if said == "refused":
                words = self.text("words")
                if words is None:
                    raise NotAllowed("say in which words the provider refused; nothing was changed")
                return Refused(words)
            if said != "not_happened":
                raise HTTPError(400, reason="no such verdict")
            return NotHappened()

        def result(self) -> Any:
            given = self.text("result")
            try:
                return None if given is None else json.loads(given)
            except ValueError as exc:
                raise NotAllowed(f"the result is not JSON ({exc}); nothing was changed") from exc

    job = r"(?P<job_id>[^/]+)"
    return [
        url(r"/safe-effects", Overview, name="safe_effects"),
        url(r"/safe-effects/jobs", Jobs, name="safe_effects_jobs"),
        url(rf"/safe-effects/job/{job}", Job, name="safe_effects_job"),
        url(rf"/safe-effects/(?P<action>resolve|cancel|retry)/{job}", Act, name="safe_effects_act"),
    ]


def _shown(value: Any) -> str:
    """A recorded value as text; long ones are cut."""
    if isinstance(value, dict) and isinstance(value.get("text"), str):
        value = value["text"]  # a recorded error
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=1, default=str)
    return text if len(text) <= 2000 else f"{text[:2000]}…"


_content = loader(str(TEMPLATES))
