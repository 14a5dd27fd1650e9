"""The list of frames for the delivery process, handed over every few milliseconds. Never blocks, never waits.

At once if something urgent is in it and the last hand-over is 2 ms ago. While the socket is over its high-water mark
nothing is written and deltas gather per stream, so that a stuck delivery process costs memory by output, not by token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from service.delivery import wire
from service.delivery.gather import Gather, weight, whole
from service.delivery.stream import Stream
from service.frames import Delta, Deltas, End, Frame

URGENT_S = 0.002  # shortest distance of two hand-overs
BACKLOG = 64  # raw deltas of a stream before they are gathered


class Handover:
    """`write(payload)` takes an encoded list. `is_open(stream)`: whether more may come for it."""

    def __init__(self, interval_s: float, write: Callable[[bytes], None], is_open: Callable[[int], bool]) -> None:
        self._interval = interval_s
        self._write = write
        self._is_open = is_open
        self._frames: list[Frame] = []
        self._backlogged: dict[Stream, None] = {}
        self._carried: dict[int, dict[int, str]] = {}  # half surrogate pairs, by stream and choice
        self._timer: asyncio.TimerHandle | None = None
        self._urgent = False  # the timer is set for the earliest moment
        self._last = float("-inf")
        self._open = False  # there is a socket, and it is below its mark
        self.bytes = 0  # in backlogs

    # What goes in

    def put(self, frame: Frame, urgent: bool = False) -> None:
        self._frames.append(frame)
        if urgent:
            self._hurry()
        elif self._timer is None:
            self._arm(self._interval)

    def deltas(self, stream: Stream, deltas: list[Delta]) -> None:
        if not self._open:
            stream.backlog += deltas
            self._backlogged[stream] = None
            self.bytes += sum(map(weight, deltas))
            if len(stream.backlog) > BACKLOG:
                self.bytes -= sum(map(weight, stream.backlog))
                stream.backlog = Gather(stream.backlog).deltas()
                self.bytes += sum(map(weight, stream.backlog))
            return
        self._frames.append(Deltas(stream.id, deltas))
        if stream.fresh:
            stream.fresh = False
            self._hurry()
        elif self._timer is None:
            self._arm(self._interval)

    def end(self, stream: Stream, frame: End) -> None:
        if stream in self._backlogged:
            del self._backlogged[stream]
            self._catch_up(stream)
        self.put(frame, urgent=True)

    # The socket

    def resume(self) -> None:
        """The socket takes more."""
        if self._open:
            return
        self._open = True
        backlogged, self._backlogged = self._backlogged, {}
        for stream in backlogged:
            self._catch_up(stream)
        if self._frames:
            self._hurry()

    def pause(self) -> None:
        self._open = False

    def clear(self) -> None:
        """The delivery process is gone: a replay will hold everything."""
        self._open = False
        self._frames.clear()
        for stream in self._backlogged:
            stream.backlog = []
        self._backlogged.clear()
        self._carried.clear()
        self.bytes = 0

    def forget(self, stream: Stream) -> None:
        """This stream begins anew, or is over."""
        if stream in self._backlogged:
            del self._backlogged[stream]
            self.bytes -= sum(map(weight, stream.backlog))
            stream.backlog = []
        self._carried.pop(stream.id, None)

    def flush(self) -> None:
        """Writes the list now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._urgent = False
        if not self._open or not self._frames:
            return
        self._last = asyncio.get_running_loop().time()
        frames, self._frames = self._frames, []
        try:
            payload = wire.encode(frames) if not self._carried else self._mended(frames)
        except UnicodeEncodeError:
            payload = self._mended(frames)
        self._write(payload)

    # Inside

    def _catch_up(self, stream: Stream) -> None:
        self.bytes -= sum(map(weight, stream.backlog))
        deltas, stream.backlog = Gather(stream.backlog).deltas(), []
        stream.fresh = False
        self._frames.append(Deltas(stream.id, deltas))

    def _hurry(self) -> None:
        if self._urgent:
            return
        self._urgent = True
        wait = self._last + URGENT_S - asyncio.get_running_loop().time()
        self._arm(max(0.0, wait))

    def _arm(self, delay: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(delay, self.flush)

    def _mended(self, frames: list[Frame]) -> bytes:
        """The list without half surrogate pairs, which no encoding can hold. Rare, so it may be slow."""
        for frame in frames:
            if not isinstance(frame, Deltas):
                _scrub(frame)
                continue
            carried = self._carried.pop(frame.stream, {})
            for delta in frame.deltas:
                half = carried.pop(delta.index, "")
                delta.text, half = whole(delta.text, half, delta.finish_reason is not None)
                if half:
                    carried[delta.index] = half
                for name in ("reasoning", "tool_calls", "logprobs"):
                    setattr(delta, name, _scrub(getattr(delta, name)))
            if carried:
                self._carried[frame.stream] = carried
        # Nobody takes back what a stream left that is over, and every list would be looked through for it.
        for stream in [one for one in self._carried if not self._is_open(one)]:
            del self._carried[stream]
        return wire.encode(frames)


def _scrub(value: Any) -> Any:
    """The same with U+FFFD for each half of a pair; structs are changed in place."""
    if isinstance(value, str):
        return whole(value, "", True)[0]
    if isinstance(value, list | tuple):
        return [_scrub(item) for item in value]
    if isinstance(value, dict):
        return {key: _scrub(item) for key, item in value.items()}
    if isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            setattr(value, name, _scrub(getattr(value, name)))
    return value
