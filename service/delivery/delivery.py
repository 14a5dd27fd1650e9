"""The delivery room whole: core, store, tracer and reports to the worker. Process and inline mode run it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from service.delivery import wire
from service.delivery.blobs import Blobs
from service.delivery.core import Core
from service.frames import Frame, Pressure
from service.settings import Settings
from service.store import Store
from service.telemetry.tracer import JobTracer

log = logging.getLogger(__name__)

PRESSURE_S = 0.5
SETTLE_POLL_S = 0.01  # while draining
TRACER_S = 1.0
PROBE_EVERY_S = 1.0  # while the store is away


class Delivery:
    """`send(payload)` takes encoded lists for the worker."""

    def __init__(self, settings: Settings, send: Callable[[bytes], None]) -> None:
        self._send = send
        self._out: list[Frame] = []
        self._scheduled = False
        self._store = Store(settings.store)
        self._tracer = JobTracer(settings)
        self._blobs = Blobs(settings.store, self._store)
        self._core = Core(settings, self._blobs, self._tracer, self._reply)
        self._reported: dict[str, float] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, on_broken: Callable[[], None]) -> None:
        """The broker is reached in the background; what comes meanwhile waits.

        `on_broken`: a part of it has died, and nothing would go out any more; a new room must take over.
        """
        loop = asyncio.get_running_loop()
        parts = {"producer": self._core.replies.start(), "reports": self._report(), "store probe": self._probe()}
        for name, part in parts.items():
            task = loop.create_task(part, name=name)
            task.add_done_callback(lambda task: self._over(task, on_broken))
            self._tasks.append(task)

    def receive(self, payload: bytes) -> None:
        self._core.receive(wire.to_delivery.decode(payload))

    async def drain(self, deadline_s: float) -> None:
        """The worker is gone or stopping: what is complete goes out, for at most `deadline_s` seconds (R8)."""
        self._core.drop_unfinished()
        end = time.monotonic() + deadline_s
        while self._core.unsettled and time.monotonic() < end:  # noqa: ASYNC110
            await asyncio.sleep(SETTLE_POLL_S)
        self._flush()

    async def close(self) -> None:
        """Frees everything; never hangs."""
        for task in self._tasks:
            task.cancel()
        await self._core.replies.stop()
        self._store.close()
        await asyncio.to_thread(self._tracer.close, TRACER_S)

    def _over(self, task: asyncio.Task[None], on_broken: Callable[[], None]) -> None:
        """Without this a part dies in silence, while the reports go on and say that all is well."""
        if not task.cancelled() and (problem := task.exception()) is not None:
            log.error("delivery's part failed part=%s", task.get_name(), exc_info=problem)
            on_broken()

    def _reply(self, frame: Frame) -> None:
        self._out.append(frame)
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._scheduled = False
        if self._out:
            out, self._out = self._out, []
            self._send(wire.encode(out))

    async def _report(self) -> None:
        while True:
            self._reply(
                Pressure(unacknowledged=self._core.unacknowledged, counters=self._counters(), store=self._store.away)
            )
            self._core.replies.sweep()
            await asyncio.sleep(PRESSURE_S)

    async def _probe(self) -> None:
        """While the store is away and no upload tries it, something else must: nothing is admitted meanwhile."""
        while True:
            await asyncio.sleep(PROBE_EVERY_S)
            if self._store.away is not None and not self._blobs.under_way:
                await self._store.probe()

    def _counters(self) -> dict[str, float]:
        """Changes since the last report; `connected` is a state."""
        totals = {
            **self._core.counters,
            "send_failures": float(self._core.replies.failures),
            "blob_puts": float(self._blobs.puts),
            "blob_bytes": float(self._blobs.bytes),
            "blob_failures": float(self._blobs.failures),
        }
        reported, self._reported = self._reported, totals
        changes = {name: total - reported.get(name, 0) for name, total in totals.items()}
        found = {name: change for name, change in changes.items() if change}
        found.update(self._tracer.counters())
        found["connected"] = float(self._core.replies.connected)
        return found
