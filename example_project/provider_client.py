"""A thin client of the fake provider."""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import urlencode, urlsplit

Row = dict[str, Any]


class ProviderError(Exception):
    """The provider answered with an error that leaves open what happened. Arguments: status and text."""

    @property
    def status(self) -> int:
        """The HTTP status."""
        return int(self.args[0])


class Declined(Exception):
    """The provider said no (402), and did nothing."""


class Provider:
    """Calls to the provider.

    Args:
        url: its address.
        timeout: seconds for a call that does not give its own.
    """

    def __init__(self, url: str, timeout: float = 30.0) -> None:
        self.url = url
        self.timeout = timeout

    def call(
        self,
        kind: str,
        key: str | None,
        payload: Row | None = None,
        timeout: float | None = None,
    ) -> Row:
        """Ask for an effect.

        Args:
            kind: what, e.g. "charge".
            key: idempotency key; None sends none.
            payload: further fields of the request.
            timeout: seconds until TimeoutError.

        Returns:
            The ledger's row: `ref`, `key`, `kind`, `body`, `at`, and `deduplicated`.

        Raises:
            Declined: on 402.
            ProviderError: on any other status but 200.
            ConnectionRefusedError: if nothing listens: the request was not sent.
            ConnectionError: if the connection broke: the request may have been accepted.
            TimeoutError: likewise.
        """
        status, body = self._request("POST", f"/effects/{kind}", {**(payload or {}), "key": key}, timeout)
        if status == 402:
            raise Declined(body.get("error", "declined"))
        if status != 200:
            raise ProviderError(status, body.get("error", ""))
        return dict(body)

    def lookup(self, key: str, kind: str | None = None, timeout: float | None = None) -> Row | None:
        """Ask what became of a key.

        Args:
            key: idempotency key.
            kind: restrict to this kind.
            timeout: seconds until TimeoutError.

        Returns:
            The ledger's row, or None if the provider knows of none (it may lag).

        Raises:
            ProviderError: on a status other than 200 and 404.
        """
        query = {"key": key, **({"kind": kind} if kind else {})}
        status, body = self._request("GET", f"/effects?{urlencode(query)}", None, timeout)
        if status == 404:
            return None
        if status != 200:
            raise ProviderError(status, body.get("error", ""))
        return dict(body)

    def ledger(self, key: str | None = None, kind: str | None = None) -> list[Row]:
        """Read the ledger.

        Args:
            key: rows of this key alone.
            kind: rows of this kind alone.

        Returns:
            Its rows, oldest first.
        """
        rows = self._expect("GET", "/ledger")
        return [r for r in rows if (key is None or r["key"] == key) and (kind is None or r["kind"] == kind)]

    def control(self, *, kind: str | None = None, times: int | None = None, **faults: Any) -> None:
        """Set faults, as `example_project.provider.FAULTS` lists them.

        Args:
            kind: for requests of this kind alone.
            times: for so many requests; None means until changed.
            **faults: name and value; None ends one.
        """
        self._expect("POST", "/control", {"faults": faults, "kind": kind, "times": times})

    def stats(self) -> Row:
        """Read the counters.

        Returns:
            `totals` (received, accepted, deduplicated, refused, lookups), `effects` (the same by kind and
            key), `lookups` (by key).
        """
        return dict(self._expect("GET", "/stats"))

    def received(self, kind: str, key: str | None = None) -> int:
        """Count the requests that arrived, accepted or not.

        Args:
            kind: of this kind.
            key: of this key alone.

        Returns:
            Their number.
        """
        by_key = self.stats()["effects"].get(kind, {})
        return sum(n.get("received", 0) for k, n in by_key.items() if key is None or k == key)

    def reset(self) -> None:
        """Empty the ledger and end all faults; requests under way leave no row."""
        self._expect("POST", "/reset", {})

    def _expect(self, method: str, path: str, body: Row | None = None) -> Any:
        status, answer = self._request(method, path, body, None)
        if status != 200:
            raise ProviderError(status, answer.get("error", ""))
        return answer

    def _request(self, method: str, path: str, body: Row | None, timeout: float | None) -> tuple[int, Any]:
        address = urlsplit(self.url)
        connection = http.client.HTTPConnection(
            str(address.hostname),
            address.port,
            timeout=timeout if timeout is not None else self.timeout,
        )
        try:
            data = json.dumps(body).encode() if body is not None else None
            connection.request(method, path, data, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()
