"""The worker's side of delivery: opens streams, survives the delivery process, and replays to its successor.

Owns what must not be lost: every stream and dead letter that is not acknowledged yet (R8, R9). Holds no rules about
jobs: how an attempt ends is said by whoever ends its stream.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from typing import Any

from ulid import ULID

from schemas.errors import ErrorCode
from service.delivery.child import Child
from service.delivery.handover import Handover
from service.delivery.inline import Inline
from service.delivery.lock import NameLock
from service.delivery.stream import Stream
from service.frames import (
    Barrier,
    BarrierDone,
    Broken,
    Dead,
    End,
    Ended,
    Error,
    Head,
    Lease,
    Pressure,
    Release,
    Timing,
    Unanswered,
    Usage,
    Vanished,
    Waiting,
)
from service.job import Record
from service.settings import Settings

log = logging.getLogger(__name__)

LOCK_S = 15.0  # an old delivery process of this name is gone by then (R8: 3 s of flushing, 10 s at the very most)
CONNECT_S = 30.0  # from spawn to the broker, at the worker's start
STUCK_S = 5.0  # without a report, which comes every 0.5 s
START_STUCK_S = 30.0  # before the first report: imports, on a busy machine
WATCH_S = 0.5
REAP_S = 2.0
BARRIER_S = 1.5  # the process answers within 1 s (R5)
RESTART_FIRST_S, RESTART_MOST_S = 0.1, 5.0  # doubling; from the start again after a life of 30 s
LIFE_S = 30.0
FLUSH_POLL_S = 0.01


class DeliveryDown(Exception):
    """The delivery process cannot start, or does not reach the broker."""


class Link:
    """`on_ended(ended)`: all that a record asked for is acknowledged (R6). `on_pressure(pressure)`: every 0.5 s.

    An `Ended` of kind `undeliverable` may come for a stream that has not been ended: its reply topic vanished (R16).
    """

    def __init__(
        self, settings: Settings, on_ended: Callable[[Ended], None], on_pressure: Callable[[Pressure], None]
    ) -> None:
        self._settings = settings
        self._on_ended = on_ended
        self._on_pressure = on_pressure
        self._lock = NameLock(settings.state_dir, settings.worker)
        self._handover = Handover(settings.delivery.handover_ms / 1000, self._write, self._is_open)
        self._ids = itertools.count(1)
        self._streams: dict[int, Stream] = {}
        self._deads: dict[tuple[str, int, int, int], Dead] = {}
        self._lease = float("-inf")
        self._barrier: Barrier | None = None
        self._barriers = itertools.count(1)
        self._barrier_done: asyncio.Future[None] | None = None
        self._peer: Child | Inline | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._connected = asyncio.Event()
        self._stopping = False
        self._heard_at = 0.0
        self._reported = 0
        self.restarts = 0

    # Life

    async def start(self) -> None:
        """Returns when the delivery process has reached the broker. Raises NameTaken, DeliveryDown."""
        if self._settings.delivery.mode == "process":
            await self._lock.acquire(LOCK_S)
        self._keeper = asyncio.create_task(self._keep())
        try:
            async with asyncio.timeout(CONNECT_S):
                await self._connected.wait()
        except TimeoutError:
            await self.stop(REAP_S)
            raise DeliveryDown(
                f"the delivery process did not reach the broker at {self._settings.kafka.bootstrap} and its service "
                f"topics within {CONNECT_S:g} s; its log lines say why"
            ) from None
        except BaseException:
            await self.stop(REAP_S)
            raise

    async def flush(self, deadline_s: float) -> bool:
        """Waits until everything that has ended is acknowledged; False if that took longer than `deadline_s`."""
        deadline = time.monotonic() + deadline_s
        self._handover.flush()
        while self._unsettled():
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(FLUSH_POLL_S)
        return True

    async def stop(self, deadline_s: float) -> None:
        """Ends the delivery process: what is complete goes out (≤ 3 s), the rest is dropped. Never hangs."""
        self._stopping = True
        peer = self._peer
        if peer is not None:
            self._handover.flush()
            peer.finish()
            try:
                async with asyncio.timeout(max(0.0, deadline_s - REAP_S / 2)):
                    await peer.gone.wait()
            except TimeoutError:
                log.warning("delivery does not end, killing it pid=%s", peer.pid)
                peer.kill()
            await peer.reap(REAP_S)
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait({self._keeper}, timeout=REAP_S)
        self._lock.release()

    @property
    def up(self) -> bool:
        """Whether a delivery process is there and reports."""
        return self._peer is not None and time.monotonic() - self._heard_at < STUCK_S

    @property
    def pid(self) -> int | None:
        return self._peer.pid if self._peer is not None else None

    @property
    def unacknowledged(self) -> int:
        """Bytes of output that are not known to be written (R10)."""
        buffered = self._peer.buffered if self._peer is not None else 0
        return self._reported + buffered + self._handover.bytes

    # What the worker says

    def open(
        self, head: Head, *, announce: bool, prompt_tokens: int, number: int = 1, record: Record | None = None
    ) -> Stream:
        """A new attempt. `record` makes the dead letter if the reply topic vanishes (R16)."""
        stream = Stream(
            self._handover, head, announce=announce, prompt_tokens=prompt_tokens, number=number, record=record
        )
        self._name(stream)
        self._handover.put(next(stream.frames()), urgent=True)
        return stream

    def waiting(self, head: Head, reason: str, since: float) -> None:
        """A `waiting` event; lost if the delivery process dies, the next one says the same."""
        self._handover.put(Waiting(head=head, reason=reason, since=since))

    def dead(self, dead: Dead) -> None:
        """A dead letter that alone completes its record."""
        self._deads[dead.topic, dead.partition, dead.offset, dead.epoch] = dead
        self._handover.put(dead, urgent=True)

    def unanswered(self, record: Unanswered) -> None:
        """The span of a record that nobody is told about; lost if the delivery process dies."""
        self._handover.put(record)

    def lease(self, until_monotonic: float) -> None:
        self._lease = until_monotonic
        self._handover.put(Lease(until_monotonic), urgent=True)

    async def barrier(self) -> None:
        """Returns when nothing is in flight, or after 1.5 s; from then on nothing goes out until `release` (R5)."""
        self._barrier = Barrier(next(self._barriers))
        done = self._barrier_done = asyncio.get_running_loop().create_future()
        self._handover.put(self._barrier, urgent=True)
        self._handover.flush()
        await asyncio.wait({done}, timeout=BARRIER_S)

    def release(self, lost: set[tuple[str, int]]) -> None:
        """Streams and dead letters of lost (topic, partition) are dropped, without a word to `on_ended`."""
        number = self._barrier.number if self._barrier is not None else next(self._barriers)
        self._barrier = None
        for stream in [s for s in self._streams.values() if (s.head.topic, s.head.partition) in lost]:
            self._drop(stream)
        for place in [place for place in self._deads if place[:2] in lost]:
            del self._deads[place]
        self._handover.put(Release(number, sorted(lost)), urgent=True)

    # What the process says (Listener)

    def heard(self, frames: list[Any]) -> None:
        self._heard_at = time.monotonic()
        for frame in frames:
            match frame:
                case Ended():
                    self._ended(frame)
                case Pressure():
                    self._pressure(frame)
                case Broken():
                    stream = self._streams.pop(frame.stream, None)
                    if stream is not None:
                        log.warning("attempt broken, going on under a new one job=%s", stream.head.job_id)
                        self._renew(stream)
                case Vanished():
                    self._vanished(frame)
                case BarrierDone():
                    done = self._barrier_done
                    if self._barrier is not None and frame.number == self._barrier.number and done and not done.done():
                        done.set_result(None)

    def full(self) -> None:
        self._handover.pause()

    def roomy(self) -> None:
        if self._peer is not None:
            self._handover.resume()

    # Inside

    def _write(self, payload: bytes) -> None:
        if self._peer is not None:
            self._peer.write(payload)

    def _is_open(self, stream: int) -> bool:
        found = self._streams.get(stream)
        return found is not None and found.ended is None

    def _unsettled(self) -> bool:
        return bool(self._deads) or any(stream.ended is not None for stream in self._streams.values())

    def _name(self, stream: Stream) -> None:
        stream.id = next(self._ids)
        stream.attempt = str(ULID())
        stream.at = time.time()
        self._streams[stream.id] = stream

    def _renew(self, stream: Stream) -> None:
        """The same output under a new attempt."""
        self._handover.forget(stream)
        stream.number += 1
        self._name(stream)
        for frame in stream.frames():
            self._handover.put(frame, urgent=True)

    def _drop(self, stream: Stream) -> None:
        stream.live = False
        self._handover.forget(stream)
        self._streams.pop(stream.id, None)

    def _ended(self, frame: Ended) -> None:
        if frame.stream is None:
            self._deads.pop((frame.topic, frame.partition, frame.offset, frame.epoch), None)
        else:
            stream = self._streams.get(frame.stream)
            if stream is not None:
                self._drop(stream)
        try:
            self._on_ended(frame)
        except Exception:  # a fault up there is not the delivery process's death
            log.exception("taking an end in failed place=%s/%d/%d", frame.topic, frame.partition, frame.offset)

    def _pressure(self, frame: Pressure) -> None:
        self._reported = frame.unacknowledged
        if frame.counters.pop("connected", 0.0):
            self._connected.set()
        try:
            self._on_pressure(frame)
        except Exception:
            log.exception("taking a report in failed")

    def _vanished(self, frame: Vanished) -> None:
        stream = self._streams.get(frame.stream)
        if stream is None:
            return
        head, record, former = stream.head, stream.record, stream.ended
        log.warning("reply topic vanished job=%s tenant=%s cause=%s", head.job_id, head.tenant, frame.message)
        now = time.time()
        dead = None
        if record is not None:
            dead = Dead(
                topic=head.topic,
                partition=head.partition,
                offset=head.offset,
                epoch=head.epoch,
                key=record.key,
                value=record.value,
                headers=list(record.headers),
                origin=head.origin,
                code=ErrorCode.REPLY_TOPIC_REFUSED,
                message=frame.message,
                attempts=stream.number,
                at=now,
            )
        stream.finish(
            End(
                stream=stream.id,
                kind="undeliverable",
                usage=former.usage if former else Usage(stream.prompt_tokens, stream.tokens),
                timing=former.timing if former else Timing(received=stream.at, ended=now),
                error=Error(ErrorCode.REPLY_TOPIC_REFUSED, frame.message),
                dead=dead,
                repeat=former.repeat if former else False,
            )
        )

    # Supervision

    async def _keep(self) -> None:
        delay = RESTART_FIRST_S
        while not self._stopping:
            born = self._heard_at = time.monotonic()
            peer = self._peer = self._peer_of_mode()
            try:
                await peer.start()
                self._replay()
                await self._watch(peer)
            except OSError as error:
                log.error("delivery process cannot be spawned: %s", error)
            except Exception:  # whatever it is, the next life may do better; without one nothing goes out any more
                log.exception("delivery process cannot be served pid=%s", peer.pid)
            self._peer = None
            self._handover.clear()
            if self._stopping:
                return
            peer.kill()
            if not await peer.reap(REAP_S):
                log.error("delivery process cannot be killed pid=%s", peer.pid)
            self.restarts += 1
            if time.monotonic() - born > LIFE_S:
                delay = RESTART_FIRST_S
            log.error("delivery process ended, starting another: streams go on under new attempts pid=%s", peer.pid)
            await asyncio.sleep(delay)
            delay = min(delay * 2, RESTART_MOST_S)

    def _peer_of_mode(self) -> Child | Inline:
        if self._settings.delivery.mode == "inline":
            return Inline(self._settings, self)
        return Child(self._settings, self._lock.descriptor, self)

    async def _watch(self, peer: Child | Inline) -> None:
        """Returns when it is gone, or stuck: no report although this loop has had its turns."""
        gone = asyncio.ensure_future(peer.gone.wait())
        born, silent = self._heard_at, 0
        try:
            while not gone.done():
                await asyncio.wait({gone}, timeout=WATCH_S)
                limit = START_STUCK_S if self._heard_at == born else STUCK_S
                # Twice in a row: a worker that was frozen itself finds reports waiting on the socket.
                silent = silent + 1 if time.monotonic() - self._heard_at > limit else 0
                if silent > 1:
                    log.error("delivery process is stuck, killing it pid=%s", peer.pid)
                    return
        finally:
            gone.cancel()

    def _replay(self) -> None:
        """Everything that is not acknowledged, in the old order, under new attempts (R8)."""
        self._handover.clear()  # what came while there was no process is part of it
        handover = self._handover
        handover.put(Lease(self._lease))
        if self._barrier is not None:
            handover.put(self._barrier)
        for dead in self._deads.values():
            handover.put(dead)
        handover.resume()
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            if self.restarts:
                self._renew(stream)
                handover.flush()
            else:  # opened before the first process was there
                self._streams[stream.id] = stream
                for frame in stream.frames():
                    handover.put(frame, urgent=True)
