"""The delivery room in the worker's own loop, behind the same face as the process: for tests and tiny machines.

Lists are encoded and decoded as on the socket, so that both modes behave alike.
"""

from __future__ import annotations

import asyncio

from service.delivery import wire
from service.delivery.child import Listener
from service.delivery.delivery import Delivery
from service.delivery.process import FLUSH_S
from service.settings import Settings


class Inline:
    pid = None
    buffered = 0

    def __init__(self, settings: Settings, listener: Listener) -> None:
        self._listener = listener
        self._delivery = Delivery(settings, self._heard)
        self._ending: asyncio.Task[None] | None = None
        self.gone = asyncio.Event()

    async def start(self) -> None:
        self._delivery.start(self.kill)

    def write(self, payload: bytes) -> None:
        if self._ending is None:
            self._delivery.receive(payload)

    def finish(self) -> None:
        if self._ending is None:
            self._ending = asyncio.get_running_loop().create_task(self._end(FLUSH_S))

    def kill(self) -> None:
        if self._ending is not None and not self.gone.is_set():
            self._ending.cancel()
        if not self.gone.is_set():
            self._ending = asyncio.get_running_loop().create_task(self._end(0.0))

    async def reap(self, timeout_s: float) -> bool:
        if self._ending is None:
            self.finish()
        if self._ending is not None:
            await asyncio.wait({self._ending}, timeout=timeout_s)
        return self.gone.is_set()

    async def _end(self, flush_s: float) -> None:
        await self._delivery.drain(flush_s)
        await self._delivery.close()
        self.gone.set()

    def _heard(self, payload: bytes) -> None:
        self._listener.heard(wire.from_delivery.decode(payload))
