"""Free TCP ports that stay ours while a server is down."""

from __future__ import annotations

import contextlib
import errno
import random
import socket
from pathlib import Path


def _candidates() -> range:
    # Below the ephemeral range: a client that retries a stopped server's port inside that range can be given
    # the port as its own source, connect to itself, and keep the server from ever coming back.
    low = 32768
    with contextlib.suppress(OSError, ValueError, IndexError):
        low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    return range(16000, low) if low > 18000 else range(20000, 60000)


def free_port(host: str = "127.0.0.1") -> int:
    """Find a TCP port on which nothing listens.

    Args:
        host: the address to bind.

    Returns:
        The port. It is not reserved: another process may take it first.
    """
    candidates = _candidates()
    for _ in range(200):
        port = random.choice(candidates)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((host, port))
            except OSError as error:
                if error.errno in {errno.EADDRINUSE, errno.EACCES}:
                    continue
                raise
            return port
    raise OSError(errno.EADDRINUSE, f"no free TCP port found on {host}")


def answers(port: int, host: str = "127.0.0.1", timeout: float = 0.5) -> bool:
    """Tell whether something accepts connections on a port.

    Args:
        port: the TCP port.
        host: the address.
        timeout: seconds to wait for the connection.

    Returns:
        Whether a connection was accepted.
    """
    try:
        with socket.create_connection((host, port), timeout=timeout):
            return True
    except OSError:
        return False
