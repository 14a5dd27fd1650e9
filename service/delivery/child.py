"""One life of the delivery process, from the worker's side: spawned, written to, killed, reaped. Never restarts it."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any, Protocol, cast

from service.delivery import wire
from service.settings import Settings

HIGH_WATER_BYTES = 1 << 20  # on the socket; a list is about 50 KiB at 50,000 tokens/s
REAP_POLL_S = 0.01


class Listener(Protocol):
    """Who hears from it. Called on the loop."""

    def heard(self, frames: list[Any]) -> None: ...

    def full(self) -> None:
        """The socket is over its high-water mark."""

    def roomy(self) -> None:
        """It is below again."""


class Child(asyncio.Protocol):
    def __init__(self, settings: Settings, lock: int, listener: Listener) -> None:
        self._settings = settings
        self._lock = lock
        self._listener = listener
        self._splitter = wire.Splitter()
        self._transport: asyncio.Transport | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self.gone = asyncio.Event()  # its end of the socket is closed

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def buffered(self) -> int:
        """Bytes written to it that the kernel has not taken."""
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    async def start(self) -> None:
        """Raises OSError if it cannot be spawned."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            descriptor = theirs.fileno()
            self._process = subprocess.Popen(  # noqa: ASYNC220 (vfork: milliseconds)
                [sys.executable, "-m", "service.delivery", str(descriptor)],
                stdin=subprocess.DEVNULL,
                pass_fds=(descriptor, self._lock),
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=ours)
        self.write(self._settings.model_dump_json().encode())

    def write(self, payload: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.writelines([wire.length(payload), payload])

    def finish(self) -> None:
        """No more comes: it flushes what is complete, and ends."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write_eof()

    def kill(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()

    async def reap(self, timeout_s: float) -> bool:
        """Kills it if it is not gone by itself within `timeout_s`; then waits for its end. False if it will not go."""
        process = self._process
        if process is None:
            return True
        deadline = time.monotonic() + timeout_s
        while process.poll() is None and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(REAP_POLL_S)
        if process.poll() is None:
            self.kill()
            deadline = time.monotonic() + max(1.0, timeout_s)
            while process.poll() is None and time.monotonic() < deadline:  # noqa: ASYNC110
                await asyncio.sleep(REAP_POLL_S)
        if self._transport is not None:
            self._transport.abort()
        return process.poll() is not None

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(HIGH_WATER_BYTES)

    def data_received(self, data: bytes) -> None:
        for payload in self._splitter.feed(data):
            self._listener.heard(wire.from_delivery.decode(payload))

    def connection_lost(self, error: Exception | None) -> None:
        self.gone.set()

    def pause_writing(self) -> None:
        self._listener.full()

    def resume_writing(self) -> None:
        self._listener.roomy()
