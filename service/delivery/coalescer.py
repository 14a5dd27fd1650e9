"""When a stream's tokens go out (design.md §9): the first at once, then after 50 ms, 64 tokens or 4 KiB. Pure.

One pending buffer a stream. Without it every token would be a record, 15 times the cost; with a list of buffers
instead of one, a slow broker would fill the memory with chunks instead of making them larger.
"""

from __future__ import annotations

from collections.abc import Sequence

from service.delivery.gather import Gather, weight
from service.frames import Delta


class Coalescer:
    """`interval` in seconds. Times are any monotonic clock's, given by the caller."""

    __slots__ = ("_bytes_limit", "_interval", "_last", "_pending", "_shown", "_tokens_limit", "size")

    def __init__(self, interval: float, tokens: int, size: int) -> None:
        self._interval = interval
        self._tokens_limit = tokens
        self._bytes_limit = size
        self._pending = Gather()
        self._last = float("-inf")  # when the last chunk went out
        self._shown = False  # something visible has gone out
        self.size = 0  # bytes pending, nearly

    @property
    def tokens(self) -> int:
        return self._pending.tokens

    def __bool__(self) -> bool:
        return bool(self._pending.choices)

    def add(self, deltas: Sequence[Delta], now: float) -> float:
        """Takes deltas in; returns when the buffer is to be taken out: `now`, or a later time."""
        if not self._pending.choices and self._last + self._interval < now:
            self._last = now - self._interval if self._shown else now
        self._pending.add(deltas)
        size = self.size
        visible = self._shown
        for delta in deltas:
            size += weight(delta)
            if not visible and (delta.text or delta.reasoning or delta.tool_calls or delta.finish_reason):
                visible = True
        self.size = size
        if visible and not self._shown:  # the first token: at once
            self._shown = True
            return now
        if self._pending.tokens >= self._tokens_limit or size >= self._bytes_limit:
            return now
        return self._last + self._interval

    def take(self, now: float) -> list[Delta]:
        """What is pending, one delta a choice; empties the buffer."""
        deltas = self._pending.deltas()
        self._pending = Gather()
        self.size = 0
        self._last = now
        return deltas
