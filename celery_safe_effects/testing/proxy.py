"""A TCP proxy whose connections can be cut, refused, delayed or swallowed."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from types import TracebackType

from celery_safe_effects.testing import _ports

_CHUNK = 65536
# l_onoff = 1, l_linger = 0: close sends a reset, as a crashed peer or a firewall does.
_RESET = struct.pack("ii", 1, 0)


class TcpProxy:
    """Forward TCP connections from a port of ours to a target, and break them on demand.

    Args:
        target_host: where to forward to.
        target_port: its port.
        port: the port to listen on; None takes a free one.

    It keeps its port over `refuse` and `accept`.
    """

    host = "127.0.0.1"

    def __init__(self, target_host: str, target_port: int, port: int | None = None) -> None:
        self._target = (target_host, target_port)
        self.port = port if port is not None else _ports.free_port()
        self._delay = 0.0
        self._open = threading.Event()
        self._open.set()
        self._lock = threading.Lock()
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._listener: socket.socket | None = None
        self.accepted = 0

    def start(self) -> None:
        """Begin to listen; nothing happens if it does already."""
        if self._listener is not None:
            return
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((self.host, self.port))
        listener.listen(128)
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), name="tcp-proxy", daemon=True).start()

    def stop(self) -> None:
        """Stop listening and cut every connection."""
        self.refuse()
        self._open.set()

    def cut(self) -> int:
        """Reset every connection now; new ones are accepted.

        Returns:
            How many were cut.
        """
        with self._lock:
            pairs, self._pairs = self._pairs, set()
        for pair in pairs:
            for end in pair:
                _reset(end)
        return len(pairs)

    def refuse(self) -> None:
        """Cut every connection and refuse new ones until `accept`."""
        listener, self._listener = self._listener, None
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        self.cut()

    def accept(self) -> None:
        """Accept new connections again after `refuse`."""
        self.start()

    def blackhole(self) -> None:
        """Forward nothing more, without closing anything, until `resume`. Held data are forwarded then."""
        self._open.clear()

    def delay(self, seconds: float) -> None:
        """Hold back what is forwarded.

        Args:
            seconds: for each chunk and direction; 0 ends it.
        """
        self._delay = seconds

    def resume(self) -> None:
        """End refusal, blackhole and delay."""
        self._delay = 0.0
        self._open.set()
        self.start()

    @property
    def connections(self) -> int:
        """The number of open connections."""
        with self._lock:
            return len(self._pairs)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            self.accepted += 1
            threading.Thread(target=self._serve, args=(client,), name="tcp-proxy-pair", daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(self._target, timeout=10)
        except OSError:
            _reset(client)
            return
        server.settimeout(None)
        for end in (client, server):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        pair = (client, server)
        with self._lock:
            self._pairs.add(pair)
        back = threading.Thread(target=self._pump, args=(server, client), name="tcp-proxy-back", daemon=True)
        back.start()
        self._pump(client, server)
        back.join()
        with self._lock:
            self._pairs.discard(pair)
        client.close()
        server.close()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while True:
                chunk = source.recv(_CHUNK)
                if self._delay:
                    time.sleep(self._delay)
                self._open.wait()
                if not chunk:
                    break
                target.sendall(chunk)
        except OSError:
            # One end is gone: the other must learn of it.
            _reset(target)
            return
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def __enter__(self) -> TcpProxy:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()


def _reset(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    # shutdown wakes the thread that blocks in recv; close alone does not.
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()
