"""The delivery process: the socket of its worker, signals, and the end of its life (R8).

It outlives SIGTERM and SIGINT and a `kill -9` of its worker: it ends when its socket ends, after what was complete has
gone out. Only if that hangs, the kernel's alarm ends it.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import os
import signal
import socket
import traceback
from typing import Any, cast

from service.delivery import wire
from service.delivery.delivery import Delivery
from service.settings import Settings
from service.telemetry.logs import configure

FLUSH_S = 3.0  # what is complete may take so long after the worker's end (R8)
BACKSTOP_S = 10  # then the kernel kills, whatever state the loop is in; above FLUSH_S and all stops together
_PR_SET_PDEATHSIG = 1


class _Socket(asyncio.Protocol):
    """Payloads in; the first is the settings."""

    def __init__(self) -> None:
        self.settings: asyncio.Future[Settings] = asyncio.get_running_loop().create_future()
        self.ended = asyncio.Event()
        self.delivery: Delivery | None = None
        self._transport: asyncio.Transport | None = None
        self._splitter = wire.Splitter()
        self._early: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        for payload in self._splitter.feed(data):
            if self.delivery is not None:
                self.delivery.receive(payload)
            elif not self.settings.done():
                self.settings.set_result(Settings.model_validate_json(payload))
            else:
                self._early.append(payload)

    def attach(self, delivery: Delivery) -> None:
        self.delivery = delivery
        for payload in self._early:
            delivery.receive(payload)
        self._early.clear()

    def send(self, payload: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.writelines([wire.length(payload), payload])

    def eof_received(self) -> bool:
        self.ended.set()
        return True  # our side stays open: the last `Ended` still go back

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self.ended.set()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


def survive() -> None:
    """Signals of the terminal and the supervisor are the worker's business. Call before anything slow."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # If the worker dies and the loop does not notice: the alarm's default action is to kill.
    signal.signal(signal.SIGUSR2, lambda *_: signal.alarm(BACKSTOP_S))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGUSR2, 0, 0, 0)


async def serve(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    end = socket.socket(fileno=descriptor)
    end.setblocking(False)
    _, link = await loop.create_unix_connection(_Socket, sock=end)
    ended = loop.create_task(link.ended.wait())
    waits: set[asyncio.Future[Any]] = {ended, link.settings}
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    if not link.settings.done():
        return
    settings = link.settings.result()
    configure(settings, "delivery")
    delivery = Delivery(settings, link.send)
    broken = asyncio.Event()
    delivery.start(broken.set)
    link.attach(delivery)
    gc.collect()
    gc.freeze()  # imports are most of the heap: no collection walks them again
    breaking = loop.create_task(broken.wait())
    await asyncio.wait({ended, breaking}, return_when=asyncio.FIRST_COMPLETED)
    signal.alarm(BACKSTOP_S)
    if ended.done():  # else the worker starts another process, and nothing could go out here
        await delivery.drain(FLUSH_S)
    await delivery.close()
    link.close()
    await asyncio.sleep(0)  # lets the transport write its last bytes


def run(descriptor: int) -> None:
    import uvloop

    code = 1
    try:
        asyncio.Runner(loop_factory=uvloop.new_event_loop).run(serve(descriptor))
        code = 0
    except Exception:
        traceback.print_exc()
    finally:  # at once, the loop left open: threads that wait for a dead store would hold the end up
        logging.shutdown()
        os._exit(code)
