"""Sums usage records exactly once, and what they cost. Pure: records in, rows out; memory does not grow with records.

A record may lie on the topic twice (a failed send may have been written), and a job may have ended in two attempts (its
worker died between the answer and its status record). So an attempt counts once; of a job's ended attempts the first
one, which is the one that readers deliver. What other attempts generated is summed apart.

Records of one tenant lie on one partition: call `partition` before each, and what was seen of the former is forgotten.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import orjson

# What rows may be told apart by; a time is the beginning of its UTC minute, hour, day or month.
FIELDS = ("tenant", "model", "tier", "endpoint")
BUCKETS = {"minute": (16, ":00Z"), "hour": (13, ":00:00Z"), "day": (10, ""), "month": (7, "")}
OUTCOMES = ("completed", "failed", "cancelled", "expired")
MILLION = 1_000_000


@dataclass(slots=True)
class Sums:
    """Of one row. Tokens of jobs are those of the attempts that count; `other` are abandoned and repeated ones."""

    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    expired: int = 0
    prompt: int = 0
    cached: int = 0  # part of prompt
    output: int = 0
    reasoning: int = 0  # part of output
    completed_output: int = 0  # of completed jobs alone
    other_attempts: int = 0
    other_prompt: int = 0
    other_output: int = 0
    queued_s: float = 0.0
    running_s: float = 0.0

    @property
    def jobs(self) -> int:
        return self.completed + self.failed + self.cancelled + self.expired

    def add(self, kind: str, counts: bool, tokens: tuple[int, int, int, int], times: tuple[float, float]) -> None:
        """`tokens`: prompt, cached, output, reasoning; `times`: queued, running."""
        prompt, cached, output, reasoning = tokens
        self.queued_s += times[0]
        self.running_s += times[1]
        if not counts:
            self.other_attempts += 1
            self.other_prompt += prompt
            self.other_output += output
            return
        setattr(self, kind, getattr(self, kind) + 1)
        self.prompt += prompt
        self.cached += cached
        self.output += output
        self.reasoning += reasoning
        if kind == "completed":
            self.completed_output += output

    def merge(self, other: Sums) -> None:
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(frozen=True, slots=True)
class Prices:
    """Per million tokens. Every attempt that counts is charged, completed or not."""

    prompt: float = 0.0
    cached: float = 0.0
    output: float = 0.0

    def cost(self, sums: Sums) -> float:
        fresh = sums.prompt - sums.cached
        return (fresh * self.prompt + sums.cached * self.cached + sums.output * self.output) / MILLION


@dataclass(frozen=True, slots=True)
class Machines:
    """Whole machine time of the window, idle, failed and repeated work included: completed output bears all of it."""

    total: float  # cost of one hour × machines × hours of the window
    completed_output: int  # of all rows

    def cost(self, sums: Sums) -> float:
        return self.total * sums.completed_output / self.completed_output if self.completed_output else 0.0


Price = Prices | Machines


@dataclass(slots=True)
class Window:
    """Records with `at` in [since, until), wall-clock seconds."""

    since: float
    until: float


class Usage:
    """`by`: names of FIELDS and at most one of BUCKETS. Only records of these tenants and models, if any are named."""

    def __init__(
        self, by: Sequence[str], window: Window, *, tenant: str | None = None, model: str | None = None
    ) -> None:
        self._by = list(by)
        self._window = window
        self._tenant, self._model = tenant, model
        self._seen = Fingerprints()
        self._rows: dict[tuple[str, ...], Sums] = {}
        self.records = 0  # read, of the window
        self.doubled = 0  # further copies of a record
        self.unreadable = 0

    def partition(self) -> None:
        """The next records are of another partition."""
        self._seen = Fingerprints()

    def take(self, value: bytes | None) -> None:
        """One record. Those before the window only make known which attempts and jobs it must not count again."""
        try:
            record = orjson.loads(value or b"")
            tenant, job, kind = record["tenant"], (record["tenant"], record["job_id"], record["run"]), record["kind"]
            at = datetime.fromisoformat(record["at"]).timestamp()
            if (self._tenant is not None and tenant != self._tenant) or at >= self._window.until:
                return
            inside = at >= self._window.since
            self.records += inside
            if not self._seen.add((*job, record["attempt"])):
                self.doubled += inside
                return
            counts = kind in OUTCOMES and self._seen.add(job)
            if not inside or (self._model is not None and record["model"] != self._model):
                return
            key = tuple([self._label(record, name) for name in self._by])
            tokens = (
                record["prompt_tokens"],
                record["cached_tokens"],
                record["completion_tokens"],
                record.get("reasoning_tokens") or 0,
            )
            times = (record["queued_s"], record["running_s"])
            sum((*tokens, *times))  # numbers all of them, before the first is added anywhere
        except (ValueError, KeyError, TypeError):
            self.unreadable += 1
            return
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = Sums()
        row.add(kind, counts, tokens, times)

    @staticmethod
    def _label(record: dict[str, Any], name: str) -> str:
        bucket = BUCKETS.get(name)
        if bucket is None:
            return str(record.get(name) or "")
        length, rest = bucket
        return str(record["at"])[:length] + rest

    def rows(self) -> Iterator[tuple[dict[str, str], Sums]]:
        """In order of their labels, each with what it is of."""
        for key in sorted(self._rows):
            yield dict(zip(self._by, key, strict=True)), self._rows[key]

    def total(self) -> Sums:
        total = Sums()
        for row in self._rows.values():
            total.merge(row)
        return total


class Fingerprints:
    """A set of things by 64 bits each, 11 to 22 bytes a member: open addressing in one array, at most ¾ full."""

    def __init__(self) -> None:
        self._marks = array("Q", bytes(8 * 1024))
        self._mask = 1023
        self._count = 0

    def add(self, thing: object) -> bool:
        """Whether it was new."""
        mark = hash(thing) & 0xFFFF_FFFF_FFFF_FFFF or 1  # 0 = free
        if not self._put(self._marks, self._mask, mark):
            return False
        self._count += 1
        if 4 * self._count > 3 * self._mask:
            self._grow()
        return True

    @staticmethod
    def _put(marks: array[int], mask: int, mark: int) -> bool:
        place = (mark ^ mark >> 32) & mask
        while (there := marks[place]) != mark:
            if not there:
                marks[place] = mark
                return True
            place = (place + 1) & mask
        return False

    def _grow(self) -> None:
        mask = 2 * self._mask + 1
        marks = array("Q", bytes(8 * (mask + 1)))
        for mark in self._marks:
            if mark:
                self._put(marks, mask, mark)
        self._marks, self._mask = marks, mask


def row_of(sums: Sums, price: Price | None) -> dict[str, Any]:
    """One row as it is written, with its cost if there is a price; a cost per nothing is null."""
    row: dict[str, Any] = {
        "jobs": sums.jobs,
        **{outcome: getattr(sums, outcome) for outcome in OUTCOMES},
        "prompt_tokens": sums.prompt,
        "cached_tokens": sums.cached,
        "completion_tokens": sums.output,
        "reasoning_tokens": sums.reasoning,
        "other_attempts": sums.other_attempts,
        "other_prompt_tokens": sums.other_prompt,
        "other_completion_tokens": sums.other_output,
        "queued_s": round(sums.queued_s, 3),
        "running_s": round(sums.running_s, 3),
    }
    if price is not None:
        cost = price.cost(sums)
        row["cost"] = round(cost, 6)
        row["cost_per_completed_job"] = round(cost / sums.completed, 9) if sums.completed else None
        row["cost_per_million_output_tokens"] = (
            round(cost * MILLION / sums.completed_output, 6) if sums.completed_output else None
        )
    return row
