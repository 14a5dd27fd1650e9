"""The rules for readers (contract.md §3) for one job, pure: events in offset order go in, what they mean for a caller
comes out.

It owns the judgement only: which attempt is current, which terminal event counts. It does no I/O, keeps no text and
knows no clock, so another language can copy it line by line.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from schemas.events import TERMINAL


class Step(Enum):
    """What an event means once the rules are applied."""

    IGNORED = "ignored"  # of another attempt or run, repeated, late, or of a type this reader does not know
    WAITING = "waiting"  # the job is not running yet; says why
    STARTED = "started"  # a new attempt: whatever was shown before is void
    CHUNK = "chunk"  # the next piece of the current attempt
    GAP = "gap"  # numbers are missing: nothing more of this attempt is shown, the result still comes
    ABANDONED = "abandoned"  # the current attempt stops, the job will run again; what was shown stays until it does
    END = "end"  # the terminal event that counts


class Reader:
    """One job's state under the rules.

    `run` is the run the caller asked for: lower ones are ignored, and a higher one, once seen, takes its place (a
    replay by an operator). `attempt` is None while the stream is result-only: no `started` seen, or a gap in it.
    """

    __slots__ = ("attempt", "ended", "next_seq", "run", "tokens")

    def __init__(self, run: int = 0) -> None:
        self._begin(run)

    def _begin(self, run: int) -> None:
        self.run = run
        self.attempt: str | None = None
        self.next_seq = 0
        self.tokens = 0  # of the current attempt, all choices together
        self.ended: Mapping[str, Any] | None = None  # the terminal event of `run`

    def feed(self, event: Mapping[str, Any]) -> Step:
        """Takes the next event of this job in offset order. The caller has checked tenant and job id.

        Raises KeyError or TypeError for an event that lacks what the contract says every event of its type has.
        """
        run = event["run"]
        if run != self.run:
            if run < self.run:
                return Step.IGNORED
            self._begin(run)
        if self.ended is not None:
            return Step.IGNORED
        kind = event["type"]
        if kind == "chunk":
            return self._chunk(event)
        if kind in TERMINAL:
            self.ended = event
            return Step.END
        if kind == "started":
            return self._started(event)
        if kind == "waiting":
            return Step.WAITING
        if kind == "abandoned" and self.attempt is not None and event["attempt"] == self.attempt:
            return Step.ABANDONED
        return Step.IGNORED

    def _started(self, event: Mapping[str, Any]) -> Step:
        attempt: str = event["attempt"]
        if attempt == self.attempt:  # the same record twice: a producer's retry
            return Step.IGNORED
        self.attempt = attempt
        self.next_seq = event["seq"] + 1
        self.tokens = 0
        return Step.STARTED

    def _chunk(self, event: Mapping[str, Any]) -> Step:
        if self.attempt is None or event["attempt"] != self.attempt:
            return Step.IGNORED
        seq = event["seq"]
        if seq < self.next_seq:  # repeated by a producer's retry
            return Step.IGNORED
        if seq > self.next_seq or event["offset"] != self.tokens:
            self.attempt = None
            return Step.GAP
        self.next_seq = seq + 1
        self.tokens += event["tokens"]
        return Step.CHUNK
