"""How an attempt ends, in R6's order: dead letter and blob → last chunk → terminal and usage record → status record.

Only when the status record is acknowledged does the worker hear `Ended`. Each step starts from the acknowledgement of
the one before; nothing here waits in a loop. The room that sends (core.py) is asked through `Streams`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import orjson

from schemas.errors import ErrorCode
from schemas.names import DEAD_LETTERS
from schemas.records import status_key
from service.delivery import events, records
from service.delivery.attempt import Attempt
from service.delivery.blobs import Blobs, inline_limit, is_stored, is_too_large
from service.delivery.fold import usage_of
from service.delivery.lane import Letter
from service.delivery.replies import Replies
from service.frames import Dead, Delta, End, Ended, Error, Frame, Head, Open, Unanswered
from service.store import StoreUnavailable
from service.telemetry.spans import SendSummary, StoreSummary

log = logging.getLogger(__name__)

# A partial's character may take four bytes, and more when JSON escapes it.
BYTES_PER_CHARACTER = 4


class Streams(Protocol):
    """What endings need of the core."""

    def advance(self, attempt: Attempt) -> None:
        """Comes back with `finish` when the gate is open and the lane has room."""

    def emit(self, attempt: Attempt, deltas: Sequence[Delta]) -> None: ...

    def put(
        self,
        attempt: Attempt,
        kind: str,
        event: events.Event,
        wall: float,
        *,
        urgent: bool,
        done: Callable[[int, int], None] | None = None,
    ) -> Letter: ...

    def buffer(self, size: int) -> None:
        """So many bytes more (or less) are held."""

    def forget(self, attempt: Attempt) -> None: ...

    def settled(self) -> None:
        """One attempt less waits for its records."""


class Tracer(Protocol):
    def ended(self, opened: Open, end: End, sends: SendSummary, store: StoreSummary | None = None) -> None: ...

    def unanswered(self, record: Unanswered) -> None: ...


class Endings:
    def __init__(
        self,
        streams: Streams,
        replies: Replies,
        blobs: Blobs,
        tracer: Tracer,
        reply: Callable[[Frame], None],
        counters: Counter[str],
    ) -> None:
        self._streams = streams
        self._replies = replies
        self._blobs = blobs
        self._tracer = tracer
        self._reply = reply
        self._counters = counters
        self._uploads: set[asyncio.Task[None]] = set()
        self.settling: set[Attempt] = set()  # terminal acknowledged, status record not yet
        self.dead_letters = 0  # without a stream, not yet acknowledged

    # Before the terminal

    def begin(self, attempt: Attempt, end: End) -> None:
        """The worker has ended this attempt; its fold is complete."""
        attempt.end = end
        attempt.kind = end.kind
        self._conclude(attempt, end)
        if end.dead is not None:
            attempt.waits += 1
            self._bury(end.dead, lambda partition, offset: self._buried(attempt, partition, offset))
        self._if_ready(attempt)

    def shrink(self, attempt: Attempt) -> None:
        """The reply topic refused the terminal as too large; its number is free again."""
        attempt.terminal = None
        attempt.ready = False
        attempt.events.seq -= 1
        head = attempt.head
        self._fail(
            attempt,
            ErrorCode.OUTPUT_TOO_LARGE,
            f"reply topic {head.reply_topic} does not take a record with the whole output; lower inline_max_bytes, "
            "or raise the topic's max.message.bytes",
        )
        self._if_ready(attempt)

    def _conclude(self, attempt: Attempt, end: End) -> None:
        """Works out the terminal event's own fields; starts the upload if there is one."""
        if end.answer is not None:  # it lies ready
            attempt.output = end.answer.output
            return
        kind = attempt.kind
        usage = usage_of(end.usage)
        timings = events.timings_of(end.timing, end.usage.completion)
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
            limit = inline_limit(attempt.head) // BYTES_PER_CHARACTER
            attempt.fields = {"partial": attempt.fold.partial(limit), "usage": usage, "timings": timings}

    def _fail(self, attempt: Attempt, code: ErrorCode, message: str, retriable: bool = False) -> None:
        """Turns a completed attempt into a failed one."""
        assert attempt.end is not None
        end = msgspec.structs.replace(attempt.end, kind="failed", error=Error(code, message, retriable), answer=None)
        attempt.end, attempt.kind = end, end.kind
        self._conclude(attempt, end)

    def _store(self, attempt: Attempt, body: bytes) -> None:
        attempt.waits += 1
        self._streams.buffer(len(body))
        task = asyncio.get_running_loop().create_task(self._upload(attempt, body))
        self._uploads.add(task)
        task.add_done_callback(self._uploads.discard)

    async def _upload(self, attempt: Attempt, body: bytes) -> None:
        try:
            attempt.output, attempt.stored = await self._blobs.put(attempt.head, attempt.opened.attempt, body)
        except StoreUnavailable as error:
            self._not_stored(attempt, ErrorCode.STORE_UNAVAILABLE, f"{error}; publish the job again with run + 1")
        except Exception:
            log.exception("upload broke job=%s tenant=%s", attempt.head.job_id, attempt.head.tenant)
            self._not_stored(attempt, ErrorCode.INTERNAL, "the output could not be stored; the worker's log says why")
        else:
            attempt.fields["output"] = attempt.output
        finally:
            self._streams.buffer(-len(body))
        attempt.waits -= 1
        self._if_ready(attempt)

    def _not_stored(self, attempt: Attempt, code: ErrorCode, message: str) -> None:
        if attempt.kind == "completed":  # it may be undeliverable by now
            self._fail(attempt, code, message, retriable=True)

    def _bury(self, dead: Dead, done: Callable[[int, int], None]) -> None:
        self._counters["dead_letters"] += 1
        self._replies.put_dead(Letter(dead.value, dead.key, records.dead_headers(dead), done=done), dead.partition)

    def _buried(self, attempt: Attempt, partition: int, offset: int) -> None:
        if offset >= 0:
            attempt.dead_place = {"topic": DEAD_LETTERS, "partition": partition, "offset": offset}
        attempt.waits -= 1
        self._if_ready(attempt)

    def _if_ready(self, attempt: Attempt) -> None:
        if attempt.waits or attempt.gone or attempt.ready:
            return
        if attempt.vanished and attempt.kind != "undeliverable":
            return  # the link's own end is on its way
        attempt.ready = True
        self._streams.advance(attempt)

    # The terminal and what follows it

    def finish(self, attempt: Attempt) -> None:
        """The last chunk, then the terminal; the usage record beside it."""
        end = attempt.end
        assert end is not None
        if attempt.last and attempt.announced:
            self._streams.emit(attempt, attempt.last)
            attempt.last = []
        wall = time.time()
        self._put_usage(attempt, end, wall)
        if attempt.vanished or (attempt.kind == "abandoned" and not attempt.announced):
            attempt.place = {}
            self.settling.add(attempt)
            self._if_settled(attempt)
            return
        if attempt.kind == "abandoned":
            event = attempt.events.abandoned("the job will run again", wall)
        elif end.answer is not None:
            event = attempt.events.again(attempt.kind, end.answer)
        else:
            if attempt.dead_place is not None and "error" in attempt.fields:
                attempt.fields["error"]["dead_letter"] = attempt.dead_place
            event = attempt.events.terminal(attempt.kind, attempt.fields, wall)
        attempt.terminal = self._streams.put(
            attempt,
            attempt.kind,
            event,
            wall,
            urgent=True,
            done=lambda partition, offset: self._terminal_written(attempt, partition, offset),
        )

    def _put_usage(self, attempt: Attempt, end: End, wall: float) -> None:
        """One usage record an attempt; none for a refusal, which used nothing."""
        if not attempt.opened.announce or attempt.usage_put:
            return
        attempt.usage_put = attempt.usage_due = True
        head = attempt.head
        kind = "failed" if attempt.kind == "undeliverable" else attempt.kind
        value = records.usage_record(
            head, kind=kind, attempt=attempt.opened.attempt, usage=end.usage, timing=end.timing, at=wall
        )
        letter = Letter(value, head.tenant.encode(), [], done=lambda partition, offset: self._usage_written(attempt))
        self._replies.put_usage(letter)

    def _terminal_written(self, attempt: Attempt, partition: int, offset: int) -> None:
        if attempt.gone:
            return
        attempt.acknowledged_at = time.time()
        attempt.place = {"topic": attempt.head.reply_topic, "partition": partition, "offset": offset}
        self.settling.add(attempt)
        self._if_settled(attempt)

    def _usage_written(self, attempt: Attempt) -> None:
        attempt.usage_due = False
        self._if_settled(attempt)

    def _if_settled(self, attempt: Attempt) -> None:
        """Terminal and usage are acknowledged: the status record, which says where the terminal lies, is the last."""
        if attempt.place is None or attempt.usage_due or attempt.gone:
            return
        end, head = attempt.end, attempt.head
        assert end is not None
        if attempt.kind == "abandoned":  # not the end of the job
            self._ended(attempt, None)
            return
        answer = end.answer
        value = records.status(
            head,
            kind=attempt.kind,
            attempt=attempt.opened.attempt if answer is None else answer.attempt,
            usage=usage_of(end.usage) if answer is None else answer.usage,
            code=answer.code if answer is not None else end.error.code if end.error is not None else None,
            terminal=attempt.place or None,
            output=attempt.output,
            at=time.time(),
            repeat=end.repeat,
        )
        # A key of its own: compaction must leave the record of the job's own end (R7).
        key = head.origin.encode() if end.repeat else status_key(head.tenant, head.job_id, head.run)
        letter = Letter(value, key, [], done=lambda partition, offset: self._ended(attempt, offset))
        self._replies.put_status(letter, head.partition)

    def _ended(self, attempt: Attempt, status_offset: int | None) -> None:
        head, end = attempt.head, attempt.end
        assert end is not None
        lane = attempt.lane
        self._streams.forget(attempt)
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
                stored=attempt.stored is not None,
            )
        )
        sends = SendSummary(
            attempt.first_sent,
            attempt.last_sent,
            attempt.acknowledged_at,
            attempt.chunks,
            attempt.bytes,
            head.reply_topic,
            lane.partition if lane is not None else None,
            tuple(attempt.fields.get("finish_reasons") or ()),
            ErrorCode.REPLY_TOPIC_REFUSED if attempt.vanished else None,
        )
        self._tracer.ended(attempt.opened, end, sends, attempt.stored)
        self._streams.settled()

    # A dead letter that alone completes its record

    def bury(self, frame: Dead) -> None:
        self.dead_letters += 1

        def written(partition: int, offset: int) -> None:
            key, value = records.status_of_dead(frame, time.time())
            self._replies.put_status(Letter(value, key, [], done=settled), frame.partition)

        def settled(partition: int, offset: int) -> None:
            self.dead_letters -= 1
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
            self._tracer.unanswered(records.unanswered(frame))
            self._streams.settled()

        self._bury(frame, written)


def _too_large(head: Head, size: int) -> str:
    return (
        f"the output has {size} bytes, inline are at most {inline_limit(head)}, and the job says store: never; "
        "raise inline_max_bytes, or allow the store"
    )
