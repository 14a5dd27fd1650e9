"""W3C trace context of a job: read leniently from record headers, written for replies, and ids for untraced jobs.

Owns the text forms (`traceparent`, `tracestate`, `baggage`) and the ids of our own spans. Never raises on input, never
trusts baggage, never touches a span.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from urllib.parse import unquote

from schemas.names import H_BAGGAGE, H_TRACEPARENT, H_TRACESTATE
from service.frames import Head

# version-trace-parent-flags; later versions may append fields, which are ignored.
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_TRACESTATE_MEMBER = re.compile(
    r"([a-z0-9][a-z0-9_\-*/]{0,255}|[a-z0-9][a-z0-9_\-*/]{0,240}@[a-z][a-z0-9_\-*/]{0,13})"
    r"=([\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e])"
)
_BAGGAGE_KEY = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]{1,256}")

# What a record may make us carry through frames and spans (the W3C limits are of the same order).
MAX_TRACESTATE_CHARS = 512
MAX_TRACESTATE_MEMBERS = 32
MAX_BAGGAGE_CHARS = 8192
MAX_BAGGAGE_VALUE_CHARS = 256

SAMPLED = 0x01


@dataclass(frozen=True, slots=True)
class Remote:
    """The publisher's span: what our first span is a child of."""

    trace_id: int
    span_id: int
    sampled: bool
    state: tuple[tuple[str, str], ...] = ()


def extract(headers: Iterable[tuple[str, bytes | str | None]]) -> dict[str, str]:
    """The trace headers of a record, as they go into `Head.trace`: only valid ones, within limits.

    The first valid value of a repeated header wins. A `tracestate` without a valid `traceparent` is dropped, as the
    recommendation says; baggage stands alone.
    """
    found: dict[str, str] = {}
    for name, raw in headers:
        name = name.lower()
        if name in found or name not in (H_TRACEPARENT, H_TRACESTATE, H_BAGGAGE) or not raw:
            continue
        text = raw if isinstance(raw, str) else raw.decode("latin-1")
        text = text.strip()
        if name == H_TRACEPARENT:
            parent = parse_traceparent(text)
            if parent is None:
                continue
            text = format_traceparent(*parent)
        elif name == H_TRACESTATE:
            state = parse_tracestate(text)
            if not state:
                continue
            text = ",".join(f"{key}={value}" for key, value in state)
        elif len(text) > MAX_BAGGAGE_CHARS or not parse_baggage(text):
            continue
        found[name] = text
    if H_TRACEPARENT not in found:
        found.pop(H_TRACESTATE, None)
    return found


def remote(trace: Mapping[str, str]) -> Remote | None:
    """The publisher's span context in `Head.trace`; None for an untraced job."""
    parent = parse_traceparent(trace.get(H_TRACEPARENT, ""))
    if parent is None:
        return None
    trace_id, span_id, flags = parent
    return Remote(trace_id, span_id, bool(flags & SAMPLED), parse_tracestate(trace.get(H_TRACESTATE, "")))


def parse_traceparent(text: str) -> tuple[int, int, int] | None:
    """(trace id, span id, flags), or None if the text is not a usable traceparent."""
    match = _TRACEPARENT.fullmatch(text.strip().lower())
    if match is None:
        return None
    version, trace_id, span_id, flags, rest = match.groups()
    if version == "ff" or (version == "00" and rest is not None):
        return None
    ids = int(trace_id, 16), int(span_id, 16)
    return (*ids, int(flags, 16)) if all(ids) else None


def format_traceparent(trace_id: int, span_id: int, flags: int) -> str:
    return f"00-{trace_id:032x}-{span_id:016x}-{flags:02x}"


def parse_tracestate(text: str) -> tuple[tuple[str, str], ...]:
    """The vendor list; one malformed or repeated member, or too many of them, and all of it is dropped."""
    if len(text) > MAX_TRACESTATE_CHARS:
        return ()
    pairs: dict[str, str] = {}
    for member in text.split(","):
        member = member.strip(" \t")
        if not member:
            continue
        match = _TRACESTATE_MEMBER.fullmatch(member)
        if match is None or match[1] in pairs:
            return ()
        pairs[match[1]] = match[2]
    return tuple(pairs.items()) if len(pairs) <= MAX_TRACESTATE_MEMBERS else ()


def parse_baggage(text: str) -> dict[str, str]:
    """Keys and values without their properties; malformed members are left out."""
    pairs: dict[str, str] = {}
    for member in text[:MAX_BAGGAGE_CHARS].split(","):
        key, equals, value = member.partition(";")[0].partition("=")
        key = key.strip()
        if equals and _BAGGAGE_KEY.fullmatch(key):
            pairs[key] = unquote(value.strip(), errors="replace")[:MAX_BAGGAGE_VALUE_CHARS]
    return pairs


def trace_ids(head: Head, attempt: str) -> tuple[str, str]:
    """(trace id, process span id) of an attempt as lower-case hex, known before any span exists.

    The trace is the publisher's. An untraced job gets one from its identity and its record's first place, so that all
    its attempts, on whichever worker, lie in one trace. The span id comes from trace and attempt.
    """
    parent = parse_traceparent(head.trace.get(H_TRACEPARENT, ""))
    if parent is not None:
        trace_id = f"{parent[0]:032x}"
    else:
        trace_id = own_trace(head.tenant, head.job_id, head.run, head.origin, head.digest)
    return trace_id, span_id(trace_id, attempt)


def span_id(trace_id: str, attempt: str, part: str = "process") -> str:
    """The id of one of our spans, as hex; never all zero."""
    digest = blake2b(f"{trace_id}/{attempt}/{part}".encode(), digest_size=8).hexdigest()
    return digest if int(digest, 16) else "0000000000000001"


def own_trace(tenant: str, job_id: str, run: int, origin: str, content_digest: str) -> str:
    """The trace id, as hex, of a job that came without one."""
    text = f"{tenant}/{job_id}/{run}/{origin}/{content_digest}"
    digest = blake2b(text.encode("utf-8", "replace"), digest_size=16).hexdigest()
    return digest if int(digest, 16) else f"{1:032x}"
