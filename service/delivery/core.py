"""The delivery room's centre: frames of the worker in, numbered events out. No sockets, no Kafka of its own.

    Open → started → chunk … → End → endings.py → Ended

Everything an attempt sends on its reply topic passes `_advance`, which asks the gate (R5) and the lane's room first; an
attempt that may not send is parked, and its one buffer grows meanwhile.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from schemas.errors import ErrorCode
from service.delivery import endings, events
from service.delivery.alarms import Alarms
from service.delivery.attempt import Attempt
from service.delivery.barrier import BarrierClock
from service.delivery.blobs import Blobs
from service.delivery.endings import Endings
from service.delivery.events import Event
from service.delivery.gate import Gate
from service.delivery.lane import Lane, Letter
from service.delivery.parking import Parking
from service.delivery.replies import Replies
from service.frames import (
    Barrier,
    BarrierDone,
    Broken,
    Dead,
    Delta,
    Deltas,
    End,
    Error,
    Frame,
    Head,
    Lease,
    Open,
    Release,
    Timing,
    Unanswered,
    Usage,
    Vanished,
    Waiting,
)
from service.settings import Settings

log = logging.getLogger(__name__)


class Tracer(endings.Tracer, Protocol):
    def traceparent(self, head: Head, attempt: str) -> str: ...


class Core:
    """`reply(frame)` takes what goes back to the worker."""

    def __init__(self, settings: Settings, blobs: Blobs, tracer: Tracer, reply: Callable[[Frame], None]) -> None:
        self._settings = settings.delivery
        self._worker = settings.worker
        self._tracer = tracer
        self._reply = reply
        self.counters: Counter[str] = Counter()
        self.gate = Gate()
        self.replies = Replies(
            settings,
            may_send=lambda: self.gate.open(time.monotonic()),
            on_topic=self._on_topic,
            on_room=self._on_room,
            on_landed=self.settled,
        )
        self._endings = Endings(self, self.replies, blobs, tracer, reply, self.counters)
        self._attempts: dict[int, Attempt] = {}
        self._parking = Parking()
        self._alarms = Alarms(self._ring)
        self._barrier_clock = BarrierClock(
            is_quiet=lambda: not self.replies.airborne and not self._endings.settling,
            answer=lambda number: reply(BarrierDone(number)),
        )
        self._buffered = 0  # bytes in coalescers and uploads
        self._handlers: dict[type, Callable[[Any], None]] = {
            Open: self._open,
            End: self._end,
            Waiting: self._waiting,
            Dead: self._endings.bury,
            Unanswered: tracer.unanswered,
            Lease: self._lease,
            Barrier: self._barrier,
            Release: self._release,
        }

    @property
    def unacknowledged(self) -> int:
        """Bytes of output that are not known to be written (R10)."""
        return self._buffered + self.replies.unacknowledged

    @property
    def unsettled(self) -> int:
        """Attempts and dead letters that are complete but not wholly acknowledged."""
        return sum(1 for a in self._attempts.values() if a.end is not None) + self._endings.dead_letters

    def receive(self, frames: list[Any]) -> None:
        """One list of frames, in order. Unknown streams are ignored: they broke, or were released."""
        now, deltas, handlers = time.monotonic(), self._deltas, self._handlers
        for frame in frames:
            if type(frame) is Deltas:
                deltas(frame, now)
            else:
                handlers[type(frame)](frame)

    def drop_unfinished(self) -> None:
        """The worker is gone (R8): only what is complete still goes out."""
        for attempt in list(self._attempts.values()):
            if attempt.end is None:
                self.forget(attempt)

    # Frames

    def _open(self, frame: Open) -> None:
        attempt = Attempt(self, frame, self._tracer.traceparent(frame.head, frame.attempt), self._settings)
        self._attempts[frame.stream] = attempt
        self._locate(attempt)
        self._advance(attempt, time.monotonic())

    def _deltas(self, frame: Deltas, now: float) -> None:
        attempt = self._attempts.get(frame.stream)
        if attempt is None or attempt.vanished:
            return
        buffer = attempt.buffer
        if buffer is None:
            attempt.fold.add(frame.deltas)
            return
        before = buffer.size
        due = buffer.add(frame.deltas, now)
        self._buffered += buffer.size - before
        if due <= now:
            self._advance(attempt, now)
        else:
            self._alarms.set(attempt, due)

    def _end(self, frame: End) -> None:
        attempt = self._attempts.get(frame.stream)
        if attempt is None or attempt.place is not None:
            return
        if attempt.vanished and frame.kind != "undeliverable":
            return  # it was on its way when the topic vanished
        if attempt.buffer is not None:
            self._buffered -= attempt.buffer.size
            attempt.last += attempt.buffer.take(time.monotonic())
            attempt.fold.add(attempt.last)
        try:
            self._endings.begin(attempt, frame)
        except Exception:
            self._spoil(attempt)

    def _waiting(self, frame: Waiting) -> None:
        head = frame.head
        if not head.progress:
            return
        key = head.job_id.encode()
        lane = self.replies.lane(head.reply_topic, head.reply_partition, key)
        if lane is None:
            self._parking.seek(head.reply_topic, frame)
        elif self.replies.knows(head.reply_topic, head.reply_partition) and lane.room:
            value, headers = events.waiting(head, frame.reason, frame.since, time.time())
            self.counters["events_waiting"] += 1
            self.replies.put(lane, Letter(value, key, headers))

    def _lease(self, frame: Lease) -> None:
        was_open = self.gate.open(time.monotonic())
        self.gate.lease(frame.until_monotonic)
        if not was_open:
            self._reopen()

    def _barrier(self, frame: Barrier) -> None:
        self.gate.close(frame.number)
        self._barrier_clock.begin(frame.number)

    def _release(self, frame: Release) -> None:
        self._barrier_clock.stop()
        lost = {(topic, partition) for topic, partition in frame.lost}
        if lost:
            for attempt in list(self._attempts.values()):
                if (attempt.head.topic, attempt.head.partition) in lost:
                    self._drop(attempt)
        if self.gate.release(frame.number):
            self._reopen()

    def settled(self) -> None:
        """A barrier is answered once nothing is in flight and no terminal waits for its status record."""
        self._barrier_clock.check()

    # The way out

    def advance(self, attempt: Attempt) -> None:
        self._advance(attempt, time.monotonic())

    def _locate(self, attempt: Attempt) -> None:
        head = attempt.head
        lane = self.replies.lane(head.reply_topic, head.reply_partition, attempt.key)
        if lane is None:
            self._parking.seek(head.reply_topic, attempt)
        elif not self.replies.knows(head.reply_topic, head.reply_partition):
            self._vanish(attempt, f"reply topic {head.reply_topic} has no partition {head.reply_partition}")
        else:
            attempt.lane = lane
            lane.users += 1

    def _advance(self, attempt: Attempt, now: float) -> None:
        try:
            self._send_due(attempt, now)
        except Exception:
            self._spoil(attempt)

    def _send_due(self, attempt: Attempt, now: float) -> None:
        """Sends what the attempt has to send, or parks it until it may."""
        if attempt.parked or attempt.gone:
            return
        lane = attempt.lane
        if lane is None and not attempt.vanished:
            return  # `_on_topic` comes back
        if not self.gate.open(now):
            self._parking.hold(attempt)
            return
        if lane is None:
            if attempt.ready and attempt.place is None:
                self._endings.finish(attempt)
            return
        if not lane.room:
            self._parking.crowd(lane, attempt)
            return
        opened = attempt.opened
        if not attempt.announced and opened.announce and attempt.kind != "abandoned":
            attempt.announced = True
            wall = time.time()
            event = attempt.events.started(self._worker, attempt.trace_id, opened.prompt_tokens, wall)
            self.put(attempt, "started", event, wall, urgent=True)
        if attempt.end is not None:
            if attempt.ready and attempt.terminal is None and attempt.place is None:
                self._endings.finish(attempt)
            return
        buffer = attempt.buffer
        if buffer:
            self._buffered -= buffer.size
            deltas = buffer.take(now)
            attempt.fold.add(deltas)
            self.emit(attempt, deltas)

    def emit(self, attempt: Attempt, deltas: Sequence[Delta]) -> None:
        """One chunk, or several if it were too large; an attempt's first does not wait for company."""
        wall = time.time()
        urgent = attempt.chunks == 0
        offset = attempt.events.offset
        for event in attempt.events.chunk(deltas, wall):
            attempt.chunks += 1
            self.put(attempt, "chunk", event, wall, urgent=urgent)
        self.counters["tokens"] += attempt.events.offset - offset

    def put(
        self,
        attempt: Attempt,
        kind: str,
        event: Event,
        wall: float,
        *,
        urgent: bool,
        done: Callable[[int, int], None] | None = None,
    ) -> Letter:
        value, headers = event
        letter = Letter(value, attempt.key, headers, attempt, done)
        attempt.sent(len(value), wall)
        self.counters["events_" + kind] += 1
        self.counters["event_bytes"] += len(value)
        assert attempt.lane is not None
        self.replies.put(attempt.lane, letter, urgent)
        return letter

    def buffer(self, size: int) -> None:
        self._buffered += size

    def _ring(self, attempt: Attempt, now: float) -> None:
        if attempt.buffer and attempt.end is None:
            self._advance(attempt, now)

    # What goes wrong

    def _spoil(self, attempt: Attempt) -> None:
        """What this attempt was given cannot be written: it fails alone, instead of taking the process with it."""
        log.exception("output cannot be written job=%s tenant=%s", attempt.head.job_id, attempt.head.tenant)
        if attempt.spoiled:
            raise RuntimeError("a failure that cannot be written either")
        attempt.spoiled = True
        attempt.last = []
        attempt.terminal = None
        attempt.ready = False
        if attempt.buffer is not None:
            self._buffered -= attempt.buffer.size
            attempt.buffer = None
        end = attempt.end
        self._endings.begin(
            attempt,
            End(
                stream=attempt.opened.stream,
                kind="failed",
                usage=end.usage if end is not None else Usage(prompt=attempt.opened.prompt_tokens),
                timing=end.timing if end is not None else Timing(attempt.opened.at, ended=time.time()),
                error=Error(ErrorCode.INTERNAL, "the output cannot be written; the worker's log says why"),
                repeat=end is not None and end.repeat,
            ),
        )

    def attempt_broken(self, attempt: Attempt) -> None:
        """R9: this attempt is over, the link opens a new one."""
        if not attempt.gone:
            self.counters["broken"] += 1
            self.forget(attempt)
            self._reply(Broken(attempt.opened.stream))

    def attempt_refused(self, attempt: Attempt, letter: Letter) -> None:
        """The reply topic does not take records of this size: a terminal shrinks, anything else ends the stream."""
        if attempt.gone:
            return
        if letter is attempt.terminal and attempt.kind == "completed" and attempt.output is None:
            self._endings.shrink(attempt)
        else:
            self._vanish(attempt, f"reply topic {attempt.head.reply_topic} refuses records of {letter.size} bytes")

    def _vanish(self, attempt: Attempt, message: str) -> None:
        if attempt.gone or attempt.vanished or attempt.place is not None:
            return
        attempt.vanished = True
        attempt.parked = attempt.ready = False
        attempt.terminal = None
        attempt.last = []
        self._unburden(attempt)
        self.counters["vanished"] += 1
        self._reply(Vanished(attempt.opened.stream, message))

    def _drop(self, attempt: Attempt) -> None:
        """Its partition is lost: `abandoned` takes the place of what was held; a terminal in flight may settle."""
        if attempt.place is not None:
            return
        lane = attempt.lane
        if attempt.terminal is not None:
            if lane is None or not lane.withdraw(attempt.terminal):
                return
            attempt.events.seq -= 1
        if attempt.announced and lane is not None:
            value, headers = attempt.events.abandoned("the partition went to another worker", time.time())
            self.counters["events_abandoned"] += 1
            self.replies.put(lane, Letter(value, attempt.key, headers))
        self.forget(attempt)

    def forget(self, attempt: Attempt) -> None:
        attempt.gone = True
        self._attempts.pop(attempt.opened.stream, None)
        self._endings.settling.discard(attempt)
        self._unburden(attempt)

    def _unburden(self, attempt: Attempt) -> None:
        if attempt.buffer is not None:
            self._buffered -= attempt.buffer.size
            attempt.buffer = None
        if attempt.lane is not None:
            attempt.lane.users -= 1
            attempt.lane = None

    # What opens again

    def _on_topic(self, topic: str, found: bool) -> None:
        if not found:
            self._parking.vanished(topic)
            for attempt in list(self._attempts.values()):
                if attempt.head.reply_topic == topic:
                    self._vanish(attempt, f"reply topic {topic} does not exist, or may not be written")
            return
        now = time.monotonic()
        for one in self._parking.found(topic):
            if isinstance(one, Waiting):
                self._waiting(one)
            elif not one.gone:
                self._locate(one)
                self._advance(one, now)

    def _on_room(self, lane: Lane) -> None:
        if lane.room:
            now = time.monotonic()
            for attempt in self._parking.roomy(lane):
                self._advance(attempt, now)

    def _reopen(self) -> None:
        now = time.monotonic()
        if not self.gate.open(now):
            return
        for attempt in self._parking.opened():
            self._advance(attempt, now)
        self.replies.release_all()
