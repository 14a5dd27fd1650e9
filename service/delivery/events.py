"""Reply events of one attempt as bytes, numbered. Plain dicts: models would cost 20 times more. Pure.

Owns `seq` and `offset`. Whoever calls a method must send what it returns, in that order.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import orjson

from schemas.names import CHAT, H_ATTEMPT, H_SEQ, H_TRACEPARENT, H_TYPE, SCHEMA_VERSION
from service.delivery.chunks import Chunks
from service.delivery.gather import split
from service.frames import Answer, Delta, Head, Open, Timing

Headers = list[tuple[str, bytes]]
Event = tuple[bytes, Headers]

_NUMBERS = [str(i).encode() for i in range(1024)]  # spares an encode per chunk
_second: tuple[int, str] = (-1, "")


def stamp(seconds: float) -> str:
    """RFC 3339 in UTC with milliseconds."""
    global _second
    ms = int(seconds * 1000)
    whole, rest = divmod(ms, 1000)
    if _second[0] != whole:
        _second = (whole, time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole)))
    return f"{_second[1]}.{rest:03d}Z"


def response_id(endpoint: str, attempt: str) -> str:
    return ("chatcmpl-" if endpoint == CHAT else "cmpl-") + attempt


def waiting(head: Head, reason: str, since: float, at: float) -> Event:
    event = {
        "schema_version": SCHEMA_VERSION,
        "type": "waiting",
        "job_id": head.job_id,
        "run": head.run,
        "tenant": head.tenant,
        "at": stamp(at),
        "reason": reason,
        "since": stamp(since),
    }
    if head.metadata:
        event["metadata"] = head.metadata
    return orjson.dumps(event), [(H_TYPE, b"waiting")]


def timings_of(timing: Timing, completion_tokens: int) -> dict[str, float | None]:
    """Stage durations in milliseconds; None = the attempt never got there. Never negative (R14: wall clocks step)."""
    per_token = None
    if timing.first_token is not None and timing.last_token is not None and completion_tokens > 1:
        per_token = _ms(timing.first_token, timing.last_token, completion_tokens - 1)
    return {
        "queue_ms": _ms(timing.received, timing.admitted),
        "admission_ms": _ms(timing.admitted, timing.submitted),
        "prefill_ms": _ms(timing.scheduled, timing.first_token),
        "first_token_ms": _ms(timing.received, timing.first_token),
        "per_token_ms": per_token,
        "total_ms": _ms(timing.received, timing.ended or time.time()),
    }


def _ms(start: float | None, end: float | None, parts: int = 1) -> float | None:
    if start is None or end is None:
        return None
    return round(max(0.0, end - start) * 1000 / parts, 3)


class Events:
    """The numbered events of one attempt."""

    __slots__ = ("_attempt", "_base", "_head", "_identity", "_max_bytes", "_model", "_trace", "chunks", "offset", "seq")

    def __init__(self, opened: Open, traceparent: str, max_bytes: int) -> None:
        head = opened.head
        self._head = head
        self._attempt = (H_ATTEMPT, opened.attempt.encode())
        self._identity = opened.attempt
        self._trace = (H_TRACEPARENT, traceparent.encode())
        self._max_bytes = max_bytes
        self.chunks = Chunks(head.endpoint, response_id(head.endpoint, opened.attempt), int(opened.at), head.model)
        self.seq = 0
        self.offset = 0  # tokens that went out in chunks

    def started(self, worker: str, trace_id: str, prompt_tokens: int, at: float) -> Event:
        event = self._event("started", at)
        event["model"] = self._head.model
        event["worker"] = worker
        event["trace_id"] = trace_id
        event["prompt_tokens"] = prompt_tokens
        if self._head.metadata:
            event["metadata"] = self._head.metadata
        return orjson.dumps(event), self._headers(b"started", traced=True)

    def chunk(self, deltas: Sequence[Delta], at: float) -> list[Event]:
        """One event, or several if it were over the limit."""
        event = self._event("chunk", at)
        tokens = 0
        for delta in deltas:
            tokens += delta.tokens
        event["offset"] = self.offset
        event["tokens"] = tokens
        event["chunk"] = self.chunks.chunk(deltas)
        value = orjson.dumps(event)
        if len(value) > self._max_bytes:
            parts = _divide(deltas, len(value) // self._max_bytes + 1)
            if len(parts) > 1:
                return [event for part in parts for event in self.chunk(part, at)]
        self.chunks.sent(deltas)
        self.offset += tokens
        return [(value, self._headers(b"chunk"))]

    def terminal(self, kind: str, fields: dict[str, Any], at: float) -> Event:
        """`fields` are the type's own, in contract order."""
        event = self._event(kind, at)
        event.update(fields)
        if self._head.metadata:
            event["metadata"] = self._head.metadata
        return orjson.dumps(event), self._headers(kind.encode(), traced=True)

    def again(self, kind: str, answer: Answer) -> Event:
        """The terminal event of the job's first copy, under its own attempt and number (R7)."""
        headers = [(H_TYPE, kind.encode()), (H_ATTEMPT, answer.attempt.encode()), (H_SEQ, str(answer.seq).encode())]
        return answer.event, [*headers, self._trace]

    def abandoned(self, reason: str, at: float) -> Event:
        event = self._event("abandoned", at)
        event["reason"] = reason
        return orjson.dumps(event), self._headers(b"abandoned")

    def _event(self, kind: str, at: float) -> dict[str, Any]:
        head = self._head
        return {
            "schema_version": SCHEMA_VERSION,
            "type": kind,
            "job_id": head.job_id,
            "run": head.run,
            "tenant": head.tenant,
            "at": stamp(at),
            "attempt": self._identity,
            "seq": self.seq,
        }

    def _headers(self, kind: bytes, traced: bool = False) -> Headers:
        seq = self.seq
        self.seq = seq + 1
        headers = [
            (H_TYPE, kind),
            self._attempt,
            (H_SEQ, _NUMBERS[seq] if seq < 1024 else str(seq).encode()),
        ]
        if traced:
            headers.append(self._trace)
        return headers


def _divide(deltas: Sequence[Delta], parts: int) -> list[Sequence[Delta]]:
    """Choices first, then the pieces of one choice; a single part if there is nothing left to divide."""
    if len(deltas) > 1:
        return [[delta] for delta in deltas]
    return [[piece] for piece in split(deltas[0], parts + 1)]
