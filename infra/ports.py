"""Free TCP ports on the loopback address."""

from __future__ import annotations

import random
import socket
from collections.abc import Collection

HOST = "127.0.0.1"
# Below the kernel's range for outgoing connections (32768 and up), so that no client's own port can take one between
# two starts of the stack; above the registered ports of common servers.
LOWEST = 20_000
HIGHEST = 32_767


def free(port: int) -> bool:
    """Whether a server could listen on `port` now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As servers do: a connection of the former run that lingers in TIME_WAIT does not count as taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def pick(taken: Collection[int] = (), *, companion: int = 0) -> int:
    """A free port that is not in `taken`; with `companion`, `port + companion` is free and in range too.

    Starts at random, so that two stacks that come up at the same moment hardly ever meet. Raises OSError: all taken.
    """
    span = HIGHEST - LOWEST + 1 - companion
    start = random.randrange(span)
    for step in range(span):
        port = LOWEST + (start + step) % span
        wanted = (port, port + companion) if companion else (port,)
        if all(each not in taken and free(each) for each in wanted):
            return port
    raise OSError(f"no free port between {LOWEST} and {HIGHEST}")


def answers(port: int, timeout_s: float = 0.5) -> bool:
    """Whether something accepts connections on `port`."""
    try:
        socket.create_connection((HOST, port), timeout_s).close()
    except OSError:
        return False
    return True
