"""Status, usage and dead-letter records as bytes (schemas/records.py is their model). Pure."""

from __future__ import annotations

from typing import Any

import orjson

from schemas.keys import tenant_of
from schemas.names import H_ATTEMPTS, H_FAILED_AT, H_MESSAGE, H_ORIGIN, H_REASON, SCHEMA_VERSION
from service.delivery.events import stamp
from service.frames import Dead, Head, Timing, Unanswered, Usage
from service.telemetry.propagation import extract

_OURS = frozenset({H_ORIGIN, H_REASON, H_MESSAGE, H_ATTEMPTS, H_FAILED_AT})


def status(
    head: Head,
    *,
    kind: str,
    attempt: str,
    usage: dict[str, Any] | None,
    code: str | None,
    terminal: dict[str, Any] | None,
    output: dict[str, Any] | None,
    at: float,
    repeat: bool = False,
) -> bytes:
    """`usage` in OpenAI's form. `repeat`: of a further record of the job (R7)."""
    value = {
        "schema_version": SCHEMA_VERSION,
        "tenant": head.tenant,
        "job_id": head.job_id,
        "run": head.run,
        "kind": kind,
        "attempt": attempt,
        "origin": head.origin,
        "digest": head.digest,
        "usage": usage,
        "code": code,
        "terminal": terminal,
        "output": output,
        "at": stamp(at),
    }
    if repeat:
        value["repeat"] = True
    if (place := f"{head.topic}/{head.partition}/{head.offset}") != head.origin:
        value["place"] = place
    return orjson.dumps(value)


def unanswered(dead: Dead) -> Unanswered:
    """What a trace shows of a record that is a dead letter alone. Its value is not looked into."""
    return Unanswered(
        topic=dead.topic,
        partition=dead.partition,
        offset=dead.offset,
        tenant=tenant_of(dead.key),
        job_id="",
        code=dead.code,
        trace=extract(dead.headers),
        broker_time=dead.at,
        at=dead.at,
    )


def status_of_dead(dead: Dead, at: float) -> tuple[bytes, bytes]:
    """(key, value) for a record that is a dead letter alone. It may have no identity: its origin is the key."""
    value: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "tenant": "",
        "job_id": "",
        "run": 0,
        "kind": "dead",
        "attempt": None,
        "origin": dead.origin,
        "digest": "",
        "code": dead.code,
        "at": stamp(at),
    }
    if (place := f"{dead.topic}/{dead.partition}/{dead.offset}") != dead.origin:
        value["place"] = place
    return dead.origin.encode(), orjson.dumps(value)


def usage_record(head: Head, *, kind: str, attempt: str, usage: Usage, timing: Timing, at: float) -> bytes:
    ended = timing.ended or at
    submitted = timing.submitted if timing.submitted is not None else ended
    return orjson.dumps(
        {
            "schema_version": SCHEMA_VERSION,
            "tenant": head.tenant,
            "job_id": head.job_id,
            "run": head.run,
            "attempt": attempt,
            "model": head.model,
            "tier": head.tier,
            "endpoint": head.endpoint,
            "kind": kind,
            "prompt_tokens": usage.prompt,
            "completion_tokens": usage.completion,
            "cached_tokens": usage.cached,
            "reasoning_tokens": usage.reasoning,
            "queued_s": round(max(0.0, submitted - timing.received), 6),
            "running_s": round(max(0.0, ended - submitted), 6),
            "at": stamp(at),
        }
    )


def dead_headers(dead: Dead) -> list[tuple[str, bytes | None]]:
    """The record's own headers, then why it is here (R15). Ours replace those of an earlier dead letter."""
    headers = [(name, value) for name, value in dead.headers if name not in _OURS]
    headers += [
        (H_ORIGIN, dead.origin.encode()),
        (H_REASON, dead.code.encode()),
        (H_MESSAGE, dead.message.encode("utf-8", "replace")),
        (H_ATTEMPTS, str(dead.attempts).encode()),
        (H_FAILED_AT, stamp(dead.at).encode()),
    ]
    return headers
