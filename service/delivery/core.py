"""The delivery room's centre: frames of the worker in, records out, in R6's order. No sockets, no Kafka of its own.

    Open → started → chunk … → End → dead letter, blob → last chunk → terminal ┐
                                                                  usage record ┴→ status record → Ended

Everything an attempt sends on its reply topic passes `_advance`, which asks the gate (R5) and the lane's room first; an
attempt that may not send is parked, and its one buffer grows meanwhile.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import orjson

from schemas.errors import ErrorCode
from schemas.names import DEAD_LETTERS
from schemas.records import status_key
from service.delivery import events, records
from service.delivery.attempt import Attempt
from service.delivery.blobs import Blobs, inline_limit, is_stored, is_too_large
from service.delivery.events import Event, timings_of
from service.delivery.fold import usage_of
from service.delivery.gate import Gate
from service.delivery.lane import Lane, Letter
from service.delivery.replies import Replies
from service.frames import (
    Barrier,
    BarrierDone,
    Broken,
    Dead,
    Deltas,
    End,
    Ended,
    Error,
    Frame,
    Head,
    Lease,
    Open,
    Release,
    Vanished,
    Waiting,
)
from service.settings import Settings
from service.store import StoreUnavailable
from service.telemetry.spans import SendSummary, StoreSummary

log = logging.getLogger(__name__)

BARRIER_S = 1.0  # what is in flight may take so long; the revoked callback waits for it (R5)
RECORDS_MOST = 4096  # frames of one list handled before other callbacks get their turn


class Tracer(Protocol):
    def ended(self, opened: Open, end: End, sends: SendSummary, store: StoreSummary | None = None) -> None: ...

    def traceparent(self, head: Head, attempt: str) -> str: ...


class Core:
    """`reply(frame)` takes what goes back to the worker."""

    def __init__(self, settings: Settings, blobs: Blobs, tracer: Tracer, reply: Callable[[Frame], None]) -> None:
        self._settings = settings.delivery
        self._worker = settings.worker
        self._blobs = blobs
        self._tracer = tracer
        self._reply = reply
        self.gate = Gate()
        self.replies = Replies(
            settings,
            may_send=lambda: self.gate.open(time.monotonic()),
            on_topic=self._on_topic,
            on_room=self._on_room,
            on_landed=self._check_barrier,
        )
        self._attempts: dict[int, Attempt] = {}
        self._held: list[Attempt] = []  # parked at the gate
        self._crowded: dict[Lane, list[Attempt]] = {}  # parked until their lane has room
        self._unlocated: dict[str, list[Attempt]] = {}  # by reply topic that is being looked up
        self._unlocated_waiting: dict[str, list[Waiting]] = {}
        self._settling: set[Attempt] = set()  # terminal acknowledged, status not yet
        self._dead_waits = 0  # dead letters without a stream under way
        self._timers: list[tuple[float, int, Attempt]] = []
        self._order = itertools.count()
        self._tick: asyncio.TimerHandle | None = None
        self._tick_at = float("inf")
        self._barrier_timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._buffered = 0  # bytes in coalescers and uploads
        self.counters: dict[str, float] = {}
        self._handlers: dict[type, Callable[[Any], None]] = {
            Open: self._open,
            End: self._end,
            Waiting: self._waiting,
            Dead: self._dead,
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
        return sum(1 for attempt in self._attempts.values() if attempt.end is not None) + self._dead_waits

    def receive(self, frames: list[Any]) -> None:
        """One list of frames, in order. Unknown streams are ignored: they broke, or were released."""
        now = time.monotonic()
        deltas, handlers = self._deltas, self._handlers
        for frame in frames:
            if type(frame) is Deltas:
                deltas(frame, now)
            else:
                handlers[type(frame)](frame)

    def drop_unfinished(self) -> None:
        """The worker is gone (R8): only what is complete still goes out."""
        for attempt in list(self._attempts.values()):
            if attempt.end is None:
                self._forget(attempt)

    # Frames

    def _open(self, frame: Open) -> None:
        head = frame.head
        attempt = Attempt(self, frame, self._tracer.traceparent(head, frame.attempt), self._settings)
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
        elif not attempt.timed:
            self._time(attempt, due)

    def _end(self, frame: End) -> None:
        attempt = self._attempts.get(frame.stream)
        if attempt is None or attempt.place is not None:
            return
        attempt.end = frame
        attempt.kind = frame.kind
        if attempt.buffer is not None:
            self._buffered -= attempt.buffer.size
            attempt.last = attempt.buffer.take(time.monotonic())
            attempt.fold.add(attempt.last)
        if frame.dead is not None:
            attempt.waits += 1
            self._bury(frame.dead, lambda partition, offset: self._buried(attempt, partition, offset))
        self._conclude(attempt, frame)
        self._if_ready(attempt)

    def _waiting(self, frame: Waiting) -> None:
        head = frame.head
        if not head.progress:
            return
        lane = self.replies.lane(head.reply_topic, head.reply_partition, head.job_id.encode())
        if lane is None:
            self._unlocated_waiting.setdefault(head.reply_topic, []).append(frame)
            return
        if not self.replies.knows(head.reply_topic, head.reply_partition):
            return
        value, headers = events.waiting(head, frame.reason, frame.since, time.time())
        self._count("events_waiting", 1)
        self.replies.put(lane, Letter(value, head.job_id.encode(), headers))

    def _dead(self, frame: Dead) -> None:
        """A dead letter that alone completes its record."""
        self._dead_waits += 1

        def written(partition: int, offset: int) -> None:
            key, value = records.status_of_dead(frame, time.time())
            self.replies.put_status(Letter(value, key, [], done=settled), frame.partition)

        def settled(partition: int, offset: int) -> None:
            self._dead_waits -= 1
            self._reply(
                Ended(
                    stream=None,
                    topic=frame.topic,
                    partition=frame.partition,
                    offset=frame.offset,
                    epoch=frame.epoch,
                    kind="dead",
                    status_offset=offset,
                )
            )

        self._bury(frame, written)

    def _lease(self, frame: Lease) -> None:
        was_open = self.gate.open(time.monotonic())
        self.gate.lease(frame.until_monotonic)
        if not was_open:
            self._reopen()

    def _barrier(self, frame: Barrier) -> None:
        self.gate.close(frame.number)
        if self._barrier_timer is not None:
            self._barrier_timer.cancel()
        self._barrier_timer = asyncio.get_running_loop().call_later(BARRIER_S, self._barrier_done, frame.number)
        self._check_barrier()

    def _check_barrier(self) -> None:
        """Answers once nothing is in flight and no terminal waits for its status record."""
        if self._barrier_timer is not None and not self.replies.airborne and not self._settling:
            assert self.gate.barrier is not None
            self._barrier_done(self.gate.barrier)

    def _barrier_done(self, number: int) -> None:
        if self._barrier_timer is not None:
            self._barrier_timer.cancel()
            self._barrier_timer = None
            self._reply(BarrierDone(number))

    def _release(self, frame: Release) -> None:
        if self._barrier_timer is not None:
            self._barrier_timer.cancel()
            self._barrier_timer = None
        lost = {(topic, partition) for topic, partition in frame.lost}
        if lost:
            for attempt in list(self._attempts.values()):
                if (attempt.head.topic, attempt.head.partition) in lost:
                    self._drop(attempt)
        if self.gate.release(frame.number):
            self._reopen()

    # The way out

    def _locate(self, attempt: Attempt) -> None:
        head = attempt.head
        lane = self.replies.lane(head.reply_topic, head.reply_partition, attempt.key)
        if lane is None:
            self._unlocated.setdefault(head.reply_topic, []).append(attempt)
        elif not self.replies.knows(head.reply_topic, head.reply_partition):
            self._vanish(attempt, f"reply topic {head.reply_topic} has no partition {head.reply_partition}")
        else:
            attempt.lane = lane
            lane.users += 1

    def _advance(self, attempt: Attempt, now: float) -> None:
        """Sends what the attempt has to send, or parks it until it may."""
        if attempt.parked or attempt.gone:
            return
        lane = attempt.lane
        if lane is None and not attempt.vanished:
            return  # `_on_topic` comes back
        if not self.gate.open(now):
            attempt.parked = True
            self._held.append(attempt)
            return
        if lane is None:
            if attempt.ready:
                self._finish_undeliverable(attempt)
            return
        if not lane.room:
            attempt.parked = True
            self._crowded.setdefault(lane, []).append(attempt)
            return
        opened = attempt.opened
        if not attempt.announced and opened.announce:
            attempt.announced = True
            wall = time.time()
            event = attempt.events.started(self._worker, attempt.trace_id, opened.prompt_tokens, wall)
            self._put(attempt, "started", event, wall, urgent=True)
        if attempt.end is not None:
            if attempt.ready and attempt.terminal is None:
                self._finish(attempt)
            return
        buffer = attempt.buffer
        if buffer:
            self._buffered -= buffer.size
            deltas = buffer.take(now)
            attempt.fold.add(deltas)
            self._emit(attempt, deltas)

    def _emit(self, attempt: Attempt, deltas: list[Any]) -> None:
        wall = time.time()
        urgent = attempt.chunks == 0
        offset = attempt.events.offset
        for event in attempt.events.chunk(deltas, wall):
            attempt.chunks += 1
            self._put(attempt, "chunk", event, wall, urgent)
        self._count("tokens", attempt.events.offset - offset)

    def _put(self, attempt: Attempt, kind: str, event: Event, wall: float, urgent: bool, **letter: Any) -> Letter:
        value, headers = event
        sent = Letter(value, attempt.key, headers, owner=attempt, **letter)
        attempt.bytes += len(value)
        attempt.last_sent = wall
        if attempt.first_sent is None:
            attempt.first_sent = wall
        counters = self.counters
        name = "events_" + kind
        counters[name] = counters.get(name, 0) + 1
        counters["event_bytes"] = counters.get("event_bytes", 0) + len(value)
        assert attempt.lane is not None
        self.replies.put(attempt.lane, sent, urgent)
        return sent

    def _time(self, attempt: Attempt, due: float) -> None:
        attempt.timed = True
        heapq.heappush(self._timers, (due, next(self._order), attempt))
        if due < self._tick_at:
            self._arm(due)

    def _arm(self, due: float) -> None:
        if self._tick is not None:
            self._tick.cancel()
        self._tick_at = due
        delay = max(0.0, due - time.monotonic())
        self._tick = asyncio.get_running_loop().call_later(delay, self._on_tick)

    def _on_tick(self) -> None:
        """Streams whose 50 ms are over. Those due in the next 2 ms go along: one timer for many."""
        self._tick, self._tick_at = None, float("inf")
        now = time.monotonic()
        timers = self._timers
        while timers and timers[0][0] <= now + 0.002:
            attempt = heapq.heappop(timers)[2]
            attempt.timed = False
            if attempt.buffer and attempt.end is None:
                self._advance(attempt, now)
        if timers:
            self._arm(timers[0][0])

    # The end of an attempt

    def _conclude(self, attempt: Attempt, end: End) -> None:
        """Works out the terminal event's own fields; starts the upload if there is one."""
        kind = attempt.kind
        usage = usage_of(end.usage)
        timings = timings_of(end.timing, end.usage.completion)
        if kind == "completed":
            head, opened = attempt.head, attempt.opened
            identity = events.response_id(head.endpoint, opened.attempt)
            body = orjson.dumps(attempt.fold.response(identity, int(opened.at), head.model, usage))
            attempt.fields = {
                "finish_reasons": attempt.fold.finish_reasons(),
                "usage": usage,
                "timings": timings,
                "text_sha256": attempt.fold.digests(),
            }
            if is_too_large(head, len(body)):
                self._fail(attempt, ErrorCode.OUTPUT_TOO_LARGE, _too_large(head, len(body)))
            elif is_stored(head, len(body)):
                self._store(attempt, body)
            else:
                attempt.fields["response"] = orjson.Fragment(body)
        elif kind == "failed":
            error = end.error or Error(ErrorCode.INTERNAL, "the job failed without a reason", True)
            attempt.fields = {
                "error": {"code": error.code, "message": error.message, "retriable": error.retriable},
                "usage": usage,
                "timings": timings,
            }
        elif kind in ("cancelled", "expired"):
            limit = inline_limit(attempt.head) // 4  # a character may take four bytes and more
            attempt.fields = {"partial": attempt.fold.partial(limit), "usage": usage, "timings": timings}

    def _fail(self, attempt: Attempt, code: ErrorCode, message: str, retriable: bool = False) -> None:
        """Turns a completed attempt into a failed one, before its terminal is made."""
        assert attempt.end is not None
        error = Error(code, message, retriable)
        attempt.end = end = msgspec.structs.replace(attempt.end, kind="failed", error=error)
        attempt.kind = "failed"
        self._conclude(attempt, end)

    def _store(self, attempt: Attempt, body: bytes) -> None:
        attempt.waits += 1
        self._buffered += len(body)
        task = asyncio.get_running_loop().create_task(self._upload(attempt, body))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _upload(self, attempt: Attempt, body: bytes) -> None:
        try:
            attempt.output, attempt.stored = await self._blobs.put(attempt.head, attempt.opened.attempt, body)
        except StoreUnavailable as error:
            if attempt.kind == "completed":
                self._fail(attempt, ErrorCode.STORE_UNAVAILABLE, f"{error}; publish the job again with run + 1", True)
        except Exception:
            log.exception("upload broke job=%s tenant=%s", attempt.head.job_id, attempt.head.tenant)
            if attempt.kind == "completed":
                self._fail(attempt, ErrorCode.INTERNAL, "the output could not be stored; see the worker's log", True)
        else:
            attempt.fields["output"] = attempt.output
        finally:
            self._buffered -= len(body)
        attempt.waits -= 1
        self._if_ready(attempt)

    def _bury(self, dead: Dead, done: Callable[[int, int], None]) -> None:
        self._count("dead_letters", 1)
        letter = Letter(dead.value, dead.key, records.dead_headers(dead), done=done)
        self.replies.put_dead(letter, dead.partition)

    def _buried(self, attempt: Attempt, partition: int, offset: int) -> None:
        if offset >= 0:
            attempt.dead_place = {"topic": DEAD_LETTERS, "partition": partition, "offset": offset}
        attempt.waits -= 1
        self._if_ready(attempt)

    def _if_ready(self, attempt: Attempt) -> None:
        if attempt.waits == 0 and not attempt.gone and not attempt.ready:
            attempt.ready = True
            self._advance(attempt, time.monotonic())

    def _finish(self, attempt: Attempt) -> None:
        """The last chunk, then the terminal; the usage record beside it."""
        end = attempt.end
        assert end is not None
        if attempt.last and attempt.announced:
            self._emit(attempt, attempt.last)
            attempt.last = []
        wall = time.time()
        if attempt.kind == "abandoned":
            event = attempt.events.abandoned("the job will run again", wall)
        else:
            if attempt.dead_place is not None and "error" in attempt.fields:
                attempt.fields["error"]["dead_letter"] = attempt.dead_place
            event = attempt.events.terminal(attempt.kind, attempt.fields, wall)
        attempt.terminal = self._put(
            attempt,
            attempt.kind,
            event,
            wall,
            urgent=True,
            done=lambda partition, offset: self._terminal_written(attempt, partition, offset),
        )
        self._put_usage(attempt, end, wall)

    def _finish_undeliverable(self, attempt: Attempt) -> None:
        end = attempt.end
        assert end is not None
        self._settling.add(attempt)
        self._put_usage(attempt, end, time.time())
        attempt.ready = False
        attempt.place = {}
        self._if_settled(attempt)

    def _put_usage(self, attempt: Attempt, end: End, wall: float) -> None:
        if not attempt.opened.announce or attempt.usage_due:
            return
        attempt.usage_due = True
        kind = "failed" if attempt.kind == "undeliverable" else attempt.kind
        value = records.usage_record(
            attempt.head, kind=kind, attempt=attempt.opened.attempt, usage=end.usage, timing=end.timing, at=wall
        )
        key = attempt.head.tenant.encode()
        self.replies.put_usage(Letter(value, key, [], done=lambda partition, offset: self._usage_written(attempt)))

    def _terminal_written(self, attempt: Attempt, partition: int, offset: int) -> None:
        if attempt.gone:
            return
        attempt.acknowledged_at = time.time()
        attempt.place = {"topic": attempt.head.reply_topic, "partition": partition, "offset": offset}
        self._settling.add(attempt)
        self._if_settled(attempt)

    def _usage_written(self, attempt: Attempt) -> None:
        attempt.usage_due = False
        self._if_settled(attempt)

    def _if_settled(self, attempt: Attempt) -> None:
        """Terminal and usage are acknowledged: the status record, which says where the terminal lies, is the last."""
        if attempt.place is None or attempt.usage_due or attempt.gone:
            return
        if attempt.kind == "abandoned":
            self._ended(attempt, None)
            return
        end, head = attempt.end, attempt.head
        assert end is not None
        value = records.status(
            head,
            kind=attempt.kind,
            attempt=attempt.opened.attempt,
            usage=end.usage,
            code=end.error.code if end.error is not None else None,
            terminal=attempt.place or None,
            output=attempt.output,
            at=time.time(),
        )
        key = status_key(head.tenant, head.job_id, head.run)
        letter = Letter(value, key, [], done=lambda partition, offset: self._ended(attempt, offset))
        self.replies.put_status(letter, head.partition)

    def _ended(self, attempt: Attempt, status_offset: int | None) -> None:
        end, head = attempt.end, attempt.head
        assert end is not None
        self._forget(attempt)
        self._reply(
            Ended(
                stream=attempt.opened.stream,
                topic=head.topic,
                partition=head.partition,
                offset=head.offset,
                epoch=head.epoch,
                kind=attempt.kind,
                status_offset=status_offset,
                bytes=attempt.bytes,
                chunks=attempt.chunks,
                stored=attempt.output is not None,
            )
        )
        self._trace(attempt, end)
        self._check_barrier()

    def _trace(self, attempt: Attempt, end: End) -> None:
        reasons = attempt.fields.get("finish_reasons") or ()
        sends = SendSummary(
            attempt.first_sent,
            attempt.last_sent,
            attempt.acknowledged_at,
            attempt.chunks,
            attempt.bytes,
            attempt.head.reply_topic,
            attempt.lane.partition if attempt.lane is not None else None,
            tuple(reasons),
            ErrorCode.REPLY_TOPIC_REFUSED if attempt.vanished else None,
        )
        self._tracer.ended(attempt.opened, end, sends, attempt.stored)

    # What goes wrong

    def attempt_broken(self, attempt: Attempt) -> None:
        """R9: this attempt is over, the link opens a new one."""
        if not attempt.gone:
            self._count("broken", 1)
            self._forget(attempt)
            self._reply(Broken(attempt.opened.stream))

    def attempt_refused(self, attempt: Attempt, letter: Letter) -> None:
        """The reply topic does not take records of this size: a terminal shrinks, anything else ends the stream."""
        if attempt.gone:
            return
        if letter is attempt.terminal and attempt.kind == "completed" and attempt.output is None:
            attempt.terminal = None
            attempt.events.seq -= 1  # the refused one's number is free again
            attempt.ready = False
            self._fail(attempt, ErrorCode.OUTPUT_TOO_LARGE, _topic_too_small(attempt.head))
            self._if_ready(attempt)
            return
        self._vanish(attempt, f"reply topic {attempt.head.reply_topic} refuses records of {letter.size} bytes")

    def _vanish(self, attempt: Attempt, message: str) -> None:
        if attempt.gone or attempt.vanished or attempt.place is not None:
            return
        attempt.vanished = True
        if attempt.lane is not None:
            attempt.lane.users -= 1
            attempt.lane = None
        attempt.ready = False
        attempt.terminal = None
        if attempt.buffer is not None:
            self._buffered -= attempt.buffer.size
            attempt.buffer = None
        self._count("vanished", 1)
        self._reply(Vanished(attempt.opened.stream, message))

    def _drop(self, attempt: Attempt) -> None:
        """Its partition is lost: `abandoned` takes the place of what was held; a terminal in flight may settle."""
        if attempt.place is not None:
            return
        if attempt.terminal is not None:
            if attempt.lane is None or not attempt.lane.withdraw(attempt.terminal):
                return
            attempt.events.seq -= 1
        if attempt.announced and attempt.lane is not None:
            wall = time.time()
            value, headers = attempt.events.abandoned("the partition went to another worker", wall)
            self._count("events_abandoned", 1)
            self.replies.put(attempt.lane, Letter(value, attempt.key, headers))
        self._forget(attempt)

    def _forget(self, attempt: Attempt) -> None:
        attempt.gone = True
        self._attempts.pop(attempt.opened.stream, None)
        self._settling.discard(attempt)
        if attempt.buffer is not None:
            self._buffered -= attempt.buffer.size
            attempt.buffer = None
        if attempt.lane is not None:
            attempt.lane.users -= 1

    # What opens again

    def _on_topic(self, topic: str, found: bool) -> None:
        attempts = self._unlocated.pop(topic, [])
        waiting = self._unlocated_waiting.pop(topic, [])
        now = time.monotonic()
        if found:
            for attempt in attempts:
                if not attempt.gone:
                    self._locate(attempt)
                    self._advance(attempt, now)
            for frame in waiting:
                self._waiting(frame)
            return
        for attempt in list(self._attempts.values()):
            if attempt.head.reply_topic == topic:
                self._vanish(attempt, f"reply topic {topic} does not exist, or may not be written")

    def _on_room(self, lane: Lane) -> None:
        if lane.room:
            for attempt in self._crowded.pop(lane, ()):
                attempt.parked = False
                self._advance(attempt, time.monotonic())

    def _reopen(self) -> None:
        now = time.monotonic()
        if not self.gate.open(now):
            return
        held, self._held = self._held, []
        for attempt in held:
            attempt.parked = False
            self._advance(attempt, now)
        self.replies.release_all()

    def _count(self, name: str, value: float) -> None:
        self.counters[name] = self.counters.get(name, 0) + value


def _too_large(head: Head, size: int) -> str:
    return (
        f"the output has {size} bytes, inline are at most {inline_limit(head)}, and the job says store: never; "
        "raise inline_max_bytes, or allow the store"
    )


def _topic_too_small(head: Head) -> str:
    return (
        f"reply topic {head.reply_topic} does not take a record with the whole output; "
        "lower inline_max_bytes, or raise the topic's max.message.bytes"
    )
