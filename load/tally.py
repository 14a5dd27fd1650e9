"""Counts what comes back: jobs ended, lost and doubled, gaps in the numbering, delays and rates. Pure.

It judges the raw log and not a reader's view of it: repeats and further terminals that a reader would ignore are
counted too. Times are seconds of one monotonic clock, the caller's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from schemas.events import TERMINAL


class Seen:
    """One job. `terminals` holds (run, partition) of each raw terminal event."""

    __slots__ = (
        "attempts",
        "chunks",
        "completion",
        "ended",
        "first",
        "load",
        "prompt",
        "published",
        "started",
        "terminals",
        "tokens",
    )

    def __init__(self, load: int, published: float) -> None:
        self.load = load
        self.published = published
        self.started: float | None = None
        self.first: float | None = None  # first chunk
        self.ended: float | None = None
        self.attempts: dict[str, int] = {}  # next number expected
        self.chunks = 0
        self.tokens = 0  # in chunks
        self.prompt = 0
        self.completion = 0
        self.terminals: list[tuple[int, int]] = []


class Tally:
    """`loads` names the parts of the load, one each."""

    def __init__(self, loads: Sequence[str]) -> None:
        self._loads = list(loads)
        self._jobs: dict[str, Seen] = {}
        self.ended = 0
        self.gaps = 0  # numbers missing within an attempt
        self.repeats = 0  # numbers seen before within their attempt
        self.events = 0
        self.bytes = 0
        self.kinds: Counter[str] = Counter()
        self.codes: Counter[str] = Counter()

    def published(self, job_id: str, load: int, now: float) -> None:
        self._jobs[job_id] = Seen(load, now)

    def knows(self, job_id: str) -> bool:
        return job_id in self._jobs

    @property
    def jobs(self) -> int:
        return len(self._jobs)

    def take(self, event: Mapping[str, Any], partition: int, size: int, now: float) -> int | None:
        """Counts an event; the number of the load part if this was the job's first terminal, else None."""
        seen = self._jobs.get(event["job_id"])
        if seen is None:
            return None
        self.events += 1
        self.bytes += size
        kind: str = event["type"]
        if kind == "waiting":
            return None
        expected = seen.attempts.get(event["attempt"], 0)
        seq: int = event["seq"]
        if seq < expected:
            self.repeats += 1
        else:
            self.gaps += seq - expected
            seen.attempts[event["attempt"]] = seq + 1
        if kind == "chunk":
            seen.chunks += 1
            seen.tokens += event["tokens"]
            if seen.first is None:
                seen.first = now
            return None
        if kind == "started":
            if seen.started is None:
                seen.started = now
            return None
        if kind not in TERMINAL:
            return None
        seen.terminals.append((event["run"], partition))
        if seen.ended is not None:
            return None
        seen.ended = now
        self.ended += 1
        self.kinds[kind] += 1
        if kind == "failed":
            self.codes[(event.get("error") or {}).get("code", "")] += 1
        usage = event.get("usage") or {}
        seen.prompt = usage.get("prompt_tokens") or 0
        seen.completion = usage.get("completion_tokens") or 0
        return seen.load

    def report(self) -> dict[str, Any]:
        """One object for a JSON line. Delays in milliseconds, rates per second of wall time from first publish to
        last end.
        """
        jobs = list(self._jobs.values())
        return {
            **_part(jobs),
            "completed": self.kinds["completed"],
            "failed": self.kinds["failed"],
            "cancelled": self.kinds["cancelled"],
            "expired": self.kinds["expired"],
            "codes": dict(self.codes),
            "lost": sum(not seen.terminals for seen in jobs),
            "duplicated": sum(doubled(seen.terminals) for seen in jobs),
            "suppressed": sum(max(0, len(seen.terminals) - 1) for seen in jobs),
            "reruns": sum(max(0, len(seen.attempts) - 1) for seen in jobs),
            "seq_gaps": self.gaps,
            "seq_repeats": self.repeats,
            "events": self.events,
            "bytes": self.bytes,
            "tenants": {
                name: _part([seen for seen in jobs if seen.load == number]) for number, name in enumerate(self._loads)
            },
        }


def doubled(terminals: Sequence[tuple[int, int]]) -> bool:
    """Whether a reader following the rules could deliver two: ends of one run on partitions without a common order."""
    places: dict[int, int] = {}
    return any(places.setdefault(run, partition) != partition for run, partition in terminals)


def _part(jobs: Sequence[Seen]) -> dict[str, Any]:
    ended = [seen for seen in jobs if seen.ended is not None]
    begins = min((seen.published for seen in jobs), default=0.0)
    wall = max((seen.ended - begins for seen in ended if seen.ended is not None), default=0.0)
    tokens = sum(seen.completion for seen in ended)
    return {
        "jobs": len(jobs),
        "ended": len(ended),
        "prompt_tokens": sum(seen.prompt for seen in ended),
        "completion_tokens": tokens,
        "chunks": sum(seen.chunks for seen in jobs),
        "wall_s": round(wall, 3),
        "jobs_per_s": round(len(ended) / wall, 2) if wall else None,
        "tokens_per_s": round(tokens / wall, 1) if wall else None,
        "started_ms": delays([seen.started - seen.published for seen in jobs if seen.started is not None]),
        "first_token_ms": delays([seen.first - seen.published for seen in jobs if seen.first is not None]),
        "total_ms": delays([seen.ended - seen.published for seen in ended if seen.ended is not None]),
        "per_token_ms": delays(
            [
                (seen.ended - seen.first) / (seen.completion - 1)
                for seen in ended
                if seen.first is not None and seen.ended is not None and seen.completion > 1
            ]
        ),
    }


def delays(seconds: Sequence[float]) -> dict[str, float] | None:
    """Percentiles in milliseconds (nearest rank); None when there is nothing to tell."""
    if not seconds:
        return None
    ordered = sorted(seconds)

    def rank(share: float) -> float:
        return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1e3, 3)

    return {"p50": rank(0.5), "p95": rank(0.95), "p99": rank(0.99), "max": rank(1.0), "count": len(ordered)}
