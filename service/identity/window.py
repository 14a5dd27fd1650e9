"""Which jobs ended lately: a fingerprint of each identity, and where its status record lies (R7). Pure.

A hint, never the truth: whoever finds something here reads the status record and looks at the identity in it. So 64
bits are enough, and a table of fixed size is: `WAYS` places a row, the row chosen by the fingerprint, the oldest place
of a full row given up. Its memory is taken once, at the start, and never grows.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

Identity = tuple[str, str, int]  # tenant, job id, run (contract.md)

WAYS = 16
# Places for each job the window is meant to hold: at 1.5 one row in twenty overflows when the window is full.
ROOM = 1.5

_LOW = (1 << 48) - 1  # an offset; the partition number is above it


class Spot(NamedTuple):
    """A status record: the partition's number and the offset."""

    number: int
    offset: int


class Window:
    """`span_s`: seconds an end is remembered; `most`: how many (20 bytes each, and half as much again)."""

    def __init__(self, span_s: float, most: int) -> None:
        self._span = span_s
        self._rows = max(1, int(most * ROOM) // WAYS)
        size = self._rows * WAYS
        self._prints = array("Q", bytes(8 * size))  # 0 = free
        self._spots = array("Q", bytes(8 * size))
        self._times = array("I", bytes(4 * size))  # seconds since the epoch

    def add(self, identity: Identity, spot: Spot, at: float) -> None:
        """This identity ended at `at` (wall clock), as the status record at `spot` tells. The newest end counts."""
        mark = _print(identity)
        base = mark % self._rows * WAYS
        row = self._prints[base : base + WAYS]
        when = max(0, int(at))
        if mark in row:
            place = base + row.index(mark)
            if self._times[place] > when:
                return
        elif 0 in row:
            place = base + row.index(0)
        else:
            times = self._times[base : base + WAYS]
            place = base + times.index(min(times))
            if self._times[place] > when:
                return
        self._prints[place] = mark
        self._spots[place] = spot.number << 48 | spot.offset & _LOW
        self._times[place] = when

    def find(self, identity: Identity, now: float) -> Spot | None:
        """Where its status record lies, if it ended within the window before `now`."""
        mark = _print(identity)
        base = mark % self._rows * WAYS
        row = self._prints[base : base + WAYS]
        if mark not in row:
            return None
        place = base + row.index(mark)
        if self._times[place] < now - self._span:
            return None
        packed = self._spots[place]
        return Spot(packed >> 48, packed & _LOW)


def _print(identity: Identity) -> int:
    """64 bits, other ones in each process, so that nobody can choose jobs that meet in one row. Never 0."""
    return hash(identity) & 0xFFFF_FFFF_FFFF_FFFF or 1
