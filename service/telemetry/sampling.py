"""Which attempts' spans are kept: decided after the end, when it is known how it went (design.md §10).

Pure. `keep` returns the reason, which the process span carries, or None.
"""

from __future__ import annotations

from schemas.names import H_TRACEPARENT
from service.frames import End, Head, Open
from service.settings import TelemetrySettings
from service.telemetry.propagation import SAMPLED, parse_traceparent, trace_ids

# The right-most 56 bits of a trace id are random (W3C trace context, level 2): all services that sample by them keep
# the same traces.
_RANDOM_HEX_DIGITS = 14
_RANDOM_RANGE = 1 << 56

_ALWAYS = frozenset({"failed", "expired", "abandoned"})


def keep(opened: Open, end: End, settings: TelemetrySettings) -> str | None:
    """Why an attempt is kept: failed, expired, abandoned, retried, slow, publisher, ratio; None = it is not."""
    if end.kind in _ALWAYS:
        return end.kind
    if opened.number > 1:
        return "retried"
    timing = end.timing
    if timing.ended is not None and timing.ended - timing.received > settings.slow_s:
        return "slow"
    if _publisher_sampled(opened.head):
        return "publisher"
    return "ratio" if _within_ratio(trace_ids(opened.head, opened.attempt)[0], settings.sample) else None


def likely(head: Head, trace_id: str, settings: TelemetrySettings) -> bool:
    """What can be said when an attempt begins: the sampled flag of the context that its replies carry."""
    return _publisher_sampled(head) or _within_ratio(trace_id, settings.sample)


def _publisher_sampled(head: Head) -> bool:
    parent = parse_traceparent(head.trace.get(H_TRACEPARENT, ""))
    return parent is not None and bool(parent[2] & SAMPLED)


def _within_ratio(trace_id: str, share: float) -> bool:
    return int(trace_id[-_RANDOM_HEX_DIGITS:], 16) < share * _RANDOM_RANGE
