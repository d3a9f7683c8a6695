"""A stand-in for a payment, e-mail or deployment provider, with a ledger of its own and faults on demand.

Run `python -m example_project.provider --port 0 --ledger ledger.jsonl`; the first line is its address.
The ledger is the independent judge: a row is what really happened, whatever the caller learnt of it.

| request                  | answer                                                                    |
|--------------------------|---------------------------------------------------------------------------|
| `POST /effects/<kind>`   | body `{"key": …, …}`: 200 with `ref`; the first result again for a known key |
| `GET /effects?key=…`     | 200 with the row, or 404                                                  |
| `GET /ledger`            | every row                                                                 |
| `POST /control`          | `{"faults": {name: value}, "kind": …, "times": …}`, see `FAULTS`          |
| `GET /stats`             | what was received, accepted, de-duplicated, refused and looked up, per key |
| `POST /reset`            | empty ledger, no faults                                                   |
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import socket
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

Row = dict[str, Any]

EFFECT_FAULTS = {
    "delay_before": "seconds before accepting; what is under way is accepted even if the caller has gone",
    "delay_after": "seconds between accepting and answering",
    "drop_reply": "accept, then close the connection without an answer",
    "status_after": "accept, then answer with this status, e.g. 500",
    "refuse": "answer with this status, e.g. 402, and accept nothing; a known key gets its first result all the same",
    "forget_after": "seconds after which an accepted key is no longer known for de-duplication",
    "dedupe": "False: a provider that ignores keys and accepts every request",
}
LOOKUP_FAULTS = {
    "lookup_lag": "seconds until an accepted row shows in look-ups",
    "lookup_status": "answer look-ups with this status, e.g. 503",
    "lookup_hang": "seconds before a look-up is answered",
}
SERVER_FAULTS = {"down": "stop listening for so many seconds"}
FAULTS = {**EFFECT_FAULTS, **LOOKUP_FAULTS, **SERVER_FAULTS}


@dataclass
class _Rule:
    value: Any
    kind: str | None
    times: int | None


@dataclass
class _State:
    """All that the provider knows. `lock` guards everything but the waiting."""

    path: Path
    lock: threading.Lock = field(default_factory=threading.Lock)
    rows: list[Row] = field(default_factory=list)
    rules: dict[str, list[_Rule]] = field(default_factory=dict)
    counts: dict[tuple[str, str, str | None], int] = field(default_factory=Counter)
    key_locks: dict[tuple[str, str], threading.Lock] = field(default_factory=dict)
    generation: int = 0

    def load(self) -> None:
        if self.path.exists():
            for line in self.path.read_text().splitlines():
                with contextlib.suppress(ValueError):  # a crash may have left half a line
                    self.rows.append(json.loads(line))

    def take(self, names: dict[str, str], kind: str | None) -> dict[str, Any]:
        """The faults that apply to one request; each use counts against `times`."""
        chosen: dict[str, Any] = {}
        for name in names:
            rules = self.rules.get(name, [])
            fitting = [r for r in rules if r.kind in {None, kind}]
            if fitting:
                # A rule for this kind goes before one for all.
                rule = max(fitting, key=lambda r: r.kind is not None)
                chosen[name] = rule.value
                if rule.times is not None:
                    rule.times -= 1
                    if rule.times <= 0:
                        rules.remove(rule)
        return chosen

    def set_rules(self, faults: dict[str, Any], kind: str | None, times: int | None) -> None:
        unknown = sorted(set(faults) - set(FAULTS))
        if unknown:
            raise ValueError(f"no such fault: {', '.join(unknown)}; there are {', '.join(FAULTS)}")
        for name, value in faults.items():
            others = [r for r in self.rules.get(name, []) if r.kind != kind]
            # None ends a fault. False and 0 are values: `dedupe` is turned off by False.
            self.rules[name] = others if value is None else [*others, _Rule(value, kind, times)]

    def append(self, kind: str, key: str | None, body: Row, received_at: float) -> Row:
        row: Row = {
            "id": len(self.rows) + 1,
            "kind": kind,
            "key": key,
            "body": body,
            "received_at": received_at,
            "at": time.time(),
            "ref": f"{kind}_{len(self.rows) + 1}_{random.randrange(16**6):06x}",
        }
        with self.path.open("a") as ledger:
            ledger.write(json.dumps(row) + "\n")
            ledger.flush()
            os.fsync(ledger.fileno())
        self.rows.append(row)
        return row

    def known(self, kind: str, key: str, retention: float | None) -> Row | None:
        for row in reversed(self.rows):
            if row["kind"] == kind and row["key"] == key:
                fresh = retention is None or time.time() - row["at"] < retention
                return row if fresh else None
        return None

    def count(self, what: str, kind: str, key: str | None) -> None:
        self.counts[what, kind, key] = self.counts.get((what, kind, key), 0) + 1

    def key_lock(self, kind: str, key: str) -> threading.Lock:
        with self.lock:
            return self.key_locks.setdefault((kind, key), threading.Lock())

    def reset(self) -> None:
        # A request that is still under way belongs to the time before and leaves no row.
        self.generation += 1
        self.rows.clear()
        self.rules.clear()
        self.counts.clear()
        self.path.write_text("")

    def stats(self) -> Row:
        totals: Counter[str] = Counter()
        effects: dict[str, dict[str, dict[str, int]]] = {}
        lookups: Counter[str] = Counter()
        for (what, kind, key), number in self.counts.items():
            totals[what] += number
            if what == "lookups":
                lookups[str(key)] += number
            else:
                effects.setdefault(kind, {}).setdefault(str(key), {})[what] = number
        names = ("received", "accepted", "deduplicated", "refused", "lookups")
        return {"totals": {n: totals[n] for n in names}, "effects": effects, "lookups": dict(lookups)}


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], provider: Provider) -> None:
        self.provider = provider
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        # The base class looks up the host's name, which can take seconds on a machine without a resolver.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = "localhost", self.socket.getsockname()[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A caller that was killed is what this provider is for: no traceback."""


class Provider:
    """The provider's server.

    Args:
        port: the TCP port; 0 takes a free one.
        ledger: the file of the ledger, one JSON object a line; rows of an earlier run count.
        host: the address to listen on.
    """

    def __init__(self, port: int, ledger: Path, host: str = "127.0.0.1") -> None:
        self.state = _State(ledger)
        self.state.load()
        self.host = host
        self._server = _listen(port, self)
        self.port: int = self._server.server_port
        self._down_until = 0.0

    @property
    def url(self) -> str:
        """The address to call."""
        return f"http://{self.host}:{self.port}"

    def serve(self) -> None:
        """Serve until the process ends."""
        while True:
            self._server.serve_forever(poll_interval=0.05)
            # `down` ended the loop. In-flight requests go on, as a load balancer's failure would leave them.
            self._server.server_close()
            time.sleep(max(0.0, self._down_until - time.monotonic()))
            self._server = _Server((self.host, self.port), self)

    def go_down(self, seconds: float) -> None:
        """Refuse connections for a while; requests under way go on.

        Args:
            seconds: how long.
        """
        self._down_until = time.monotonic() + seconds
        threading.Thread(target=self._server.shutdown, daemon=True).start()


def _listen(port: int, provider: Provider) -> _Server:
    if port:
        return _Server((provider.host, port), provider)
    # Not the kernel's ephemeral range: while we are `down`, a caller's retry could be given our own port.
    for _ in range(100):
        with contextlib.suppress(OSError):
            return _Server((provider.host, random.randrange(16000, 32000)), provider)
    return _Server((provider.host, 0), provider)


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """The ledger and the counters are the log."""

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        state = self.server.provider.state
        if url.path == "/effects":
            self._lookup(state, query)
        elif url.path == "/ledger":
            with state.lock:
                rows = list(state.rows)
            self._answer(200, rows)
        elif url.path == "/stats":
            with state.lock:
                stats = state.stats()
            self._answer(200, stats)
        elif url.path == "/health":
            self._answer(200, {"ok": True})
        else:
            self._answer(404, {"error": "no such page"})

    def do_POST(self) -> None:
        try:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        except ValueError:
            body = None
        if not isinstance(body, dict):
            self._answer(400, {"error": "the body must be a JSON object"})
            return
        url = urlsplit(self.path)
        state = self.server.provider.state
        if url.path.startswith("/effects/"):
            self._effect(state, url.path.removeprefix("/effects/"), body)
        elif url.path == "/control":
            self._control(state, body)
        elif url.path == "/reset":
            with state.lock:
                state.reset()
            self._answer(200, {"ok": True})
        else:
            self._answer(404, {"error": "no such page"})

    @staticmethod
    def _answers_again(state: _State, faults: Row, kind: str, key: Any) -> bool:
        """Whether this request is one that was accepted before: a provider that knows keys does not refuse it now."""
        if key is None or not faults.get("dedupe", True):
            return False
        return state.known(kind, str(key), faults.get("forget_after")) is not None

    def _effect(self, state: _State, kind: str, body: Row) -> None:
        received_at = time.time()
        key = body.get("key")
        with state.lock:
            generation = state.generation
            faults = state.take(EFFECT_FAULTS, kind)
            state.count("received", kind, key)
            refuses = faults.get("refuse") and not self._answers_again(state, faults, kind, key)
            if refuses:
                state.count("refused", kind, key)
        if refuses:
            time.sleep(faults.get("delay_before") or 0)
            self._answer(int(faults["refuse"]), {"error": "declined", "kind": kind, "key": key})
            return
        dedupe = key is not None and faults.get("dedupe", True)
        # One key at a time: a second request waits for the first's result instead of racing it.
        with state.key_lock(kind, str(key)) if dedupe else contextlib.nullcontext():
            time.sleep(faults.get("delay_before") or 0)
            with state.lock:
                if state.generation != generation:
                    self._answer(410, {"error": "the provider was reset"})
                    return
                row = state.known(kind, str(key), faults.get("forget_after")) if dedupe else None
                replayed = row is not None
                if row is None:
                    row = state.append(kind, key, body, received_at)
                state.count("deduplicated" if replayed else "accepted", kind, key)
        time.sleep(faults.get("delay_after") or 0)
        if faults.get("drop_reply"):
            self._hang_up()
        elif faults.get("status_after"):
            self._answer(int(faults["status_after"]), {"error": "failed after accepting"})
        else:
            self._answer(200, {**row, "deduplicated": replayed})

    def _lookup(self, state: _State, query: dict[str, str]) -> None:
        key, kind = query.get("key", ""), query.get("kind")
        with state.lock:
            rows = [r for r in state.rows if r["key"] == key and kind in {None, r["kind"]}]
            kind = kind or (rows[0]["kind"] if rows else None)
            faults = state.take(LOOKUP_FAULTS, kind)
            state.count("lookups", kind or "", key)
        asked_at = time.time()
        time.sleep(faults.get("lookup_hang") or 0)
        if faults.get("lookup_status"):
            self._answer(int(faults["lookup_status"]), {"error": "look-ups are down"})
            return
        visible = [r for r in rows if asked_at - r["at"] >= (faults.get("lookup_lag") or 0)]
        if visible:
            self._answer(200, visible[0])
        else:
            self._answer(404, {"error": "not found", "key": key})

    def _control(self, state: _State, body: Row) -> None:
        faults = dict(body.get("faults") or {})
        down = faults.pop("down", None)
        try:
            with state.lock:
                state.set_rules(faults, body.get("kind"), body.get("times"))
        except ValueError as error:
            self._answer(400, {"error": str(error)})
            return
        self._answer(200, {"ok": True})
        if down:
            self.server.provider.go_down(float(down))

    def _answer(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        with contextlib.suppress(ConnectionError):
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    def _hang_up(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(prog="python -m example_project.provider", description="A fake provider.")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=0, help="TCP port; 0 takes a free one")
    parser.add_argument("--ledger", type=Path, required=True, help="file of the ledger, one JSON object a line")
    options = parser.parse_args()
    provider = Provider(options.port, options.ledger, options.host)
    print(provider.url, flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        provider.serve()


if __name__ == "__main__":
    main()
