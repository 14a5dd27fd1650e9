"""The codec of a commit's metadata (R3): what is unfinished above the watermark, as text that the broker keeps.

Layout, before it becomes latin-1 text (the broker counts characters, so 4,096 of them carry 4,096 bytes):

    version  1 byte     1
    crc      4 bytes    CRC-32 of the rest, seeded with the committed offset: valid beside its own offset only
    flags    1 byte     bit 0 = clean stop, bit 1 = entries are of runs
    writer   4 bytes    who wrote it (a random number per process), so that a process knows its own commits (R4)
    next     varint     highest offset read + 1, less the watermark
    status   varint     first offset of the status partition that may hold news
    entries  varints    per unfinished offset: gap to the one before × 2 + (1 if a start count follows), start count
             or         per run of them: gap × 4 + (2 if it is longer than 1) + (1 as above), start count, length - 2

Never does I/O and never raises on what it reads: unreadable metadata means the plain offset.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

Key = tuple[str, int]  # (topic, partition)

VERSION = 1
LIMIT = 4096  # characters; the broker's default offset.metadata.max.bytes
HEADER = 30  # bytes at most before the entries: 10 fixed and two varints of 64-bit numbers
CLEAN, RUNS = 1, 2  # flags


class Commit(NamedTuple):
    """What the group's offset store holds for one partition."""

    offset: int
    metadata: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A partition's state as a commit tells it. `unfinished`: offset → unclean starts (R11), ascending."""

    watermark: int
    next: int
    status_next: int = 0
    clean: bool = False
    writer: int = 0
    unfinished: dict[int, int] = field(default_factory=dict)

    @classmethod
    def plain(cls, offset: int) -> Snapshot:
        """Nothing known but the offset: everything from it on is read, and run, again."""
        return cls(watermark=offset, next=offset)

    def within(self, begin: int, end: int) -> Snapshot:
        """This snapshot cut to a log that holds [begin, end).

        Retention may have removed what is unfinished; an unclean leader election may have removed what was read,
        and its offsets are given out anew. A watermark beyond the end means another log: Kafka's rule for an offset
        out of range, the beginning, holds.
        """
        if self.watermark > end:
            return Snapshot(watermark=begin, next=begin, status_next=self.status_next, writer=self.writer)
        unfinished = {offset: starts for offset, starts in self.unfinished.items() if begin <= offset < end}
        following = max(begin, min(self.next, end))
        return Snapshot(
            watermark=next(iter(unfinished), following),
            next=following,
            status_next=self.status_next,
            clean=self.clean,
            writer=self.writer,
            unfinished=unfinished,
        )


def pack(watermark: int, following: int, unfinished: Iterable[tuple[int, int]], room: int) -> tuple[bytes, int]:
    """Unfinished (offset, starts), ascending, as entries of at most `room` bytes, and the `next` they are good for.

    What does not fit is cut off by a lower `next`: those offsets are read again after a restart, never lost.
    """
    entries = bytearray()
    before = watermark - 1
    for offset, starts in unfinished:
        value = (offset - before - 1) << 1 | (starts > 0)
        mark = len(entries)
        while value > 127:
            entries.append(value & 127 | 128)
            value >>= 7
        entries.append(value)
        if starts:
            _put(entries, starts)
        if len(entries) > room:
            del entries[mark:]
            return bytes(entries), offset
        before = offset
    return bytes(entries), following


def pack_runs(watermark: int, following: int, runs: Iterable[tuple[int, int, int]], room: int) -> tuple[bytes, int]:
    """As `pack`, of runs (first offset, length, starts of each), ascending: for many unfinished in few runs (R12)."""
    entries = bytearray()
    end = watermark
    for offset, length, starts in runs:
        mark = len(entries)
        _put(entries, (offset - end) << 2 | (length > 1) << 1 | (starts > 0))
        if starts:
            _put(entries, starts)
        if length > 1:
            _put(entries, length - 2)
        if len(entries) > room:
            del entries[mark:]
            return bytes(entries), offset
        end = offset + length
    return bytes(entries), following


def encode(
    watermark: int,
    following: int,
    status_next: int,
    entries: bytes,
    *,
    clean: bool = False,
    runs: bool = False,
    writer: int = 0,
) -> str:
    """The metadata text beside the committed offset `watermark`. `runs`: the entries are those of `pack_runs`."""
    body = bytearray(((CLEAN if clean else 0) | (RUNS if runs else 0),))
    body += writer.to_bytes(4, "big")
    _put(body, following - watermark)
    _put(body, status_next)
    body += entries
    crc = zlib.crc32(body, watermark & 0xFFFFFFFF)
    return (bytes((VERSION,)) + crc.to_bytes(4, "big") + body).decode("latin-1")


def decode(commit: Commit) -> Snapshot:
    """What a commit says. Unreadable, foreign or damaged metadata: the plain offset."""
    plain = Snapshot.plain(commit.offset)
    try:
        data = commit.metadata.encode("latin-1")
    except UnicodeEncodeError:
        return plain
    if len(data) < 10 or data[0] != VERSION:
        return plain
    body = data[5:]
    if zlib.crc32(body, commit.offset & 0xFFFFFFFF) != int.from_bytes(data[1:5], "big"):
        return plain
    try:
        span, at = _get(body, 5)
        status_next, at = _get(body, at)
        unfinished = _runs(body, at, commit.offset) if body[0] & RUNS else _offsets(body, at, commit.offset)
    except IndexError:
        return plain
    following = commit.offset + span
    if unfinished and next(reversed(unfinished)) >= following:
        return plain
    return Snapshot(
        watermark=commit.offset,
        next=following,
        status_next=status_next,
        clean=bool(body[0] & CLEAN),
        writer=int.from_bytes(body[1:5], "big"),
        unfinished=unfinished,
    )


def _offsets(body: bytes, at: int, watermark: int) -> dict[int, int]:
    unfinished: dict[int, int] = {}
    before = watermark - 1
    while at < len(body):
        value, at = _get(body, at)
        starts = 0
        if value & 1:
            starts, at = _get(body, at)
        before += (value >> 1) + 1
        unfinished[before] = starts
    return unfinished


def _runs(body: bytes, at: int, watermark: int) -> dict[int, int]:
    unfinished: dict[int, int] = {}
    end = watermark
    while at < len(body):
        value, at = _get(body, at)
        starts, length = 0, 1
        if value & 1:
            starts, at = _get(body, at)
        if value & 2:
            length, at = _get(body, at)
            length += 2
        first = end + (value >> 2)
        end = first + length
        unfinished.update(dict.fromkeys(range(first, end), starts))
    return unfinished


def _put(out: bytearray, value: int) -> None:
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)


def _get(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
