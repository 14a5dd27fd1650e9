"""One attempt as the runner sees it, and what must be replayed of it. On the engine's loop: nothing costly per token.

Everything the stream was given is kept, compacted, until the delivery process reports it as acknowledged: a new
delivery process gets it again under a new attempt, and nothing is generated twice (R8).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from service.delivery.gather import Gather
from service.frames import Answer, Dead, Delta, Deltas, End, Error, Frame, Head, Open, Timing, Usage
from service.job import Record

# Raw deltas kept before they are gathered into one a choice: 200 bytes a token against about 4.
COMPACT = 256


class Desk(Protocol):
    """Where a stream's frames go."""

    def deltas(self, stream: Stream, deltas: list[Delta]) -> None: ...

    def end(self, stream: Stream, frame: End) -> None: ...


class Stream:
    """Made by `Link.open`. `attempt` changes if it has to be replayed."""

    __slots__ = (
        "_desk",
        "_ended",
        "_kept",
        "_raw",
        "announce",
        "at",
        "attempt",
        "backlog",
        "fresh",
        "head",
        "id",
        "live",
        "number",
        "prompt_tokens",
        "record",
    )

    def __init__(
        self,
        desk: Desk,
        head: Head,
        *,
        announce: bool,
        prompt_tokens: int,
        number: int,
        record: Record | None,
    ) -> None:
        self._desk = desk
        self.head = head
        self.announce = announce
        self.prompt_tokens = prompt_tokens
        self.number = number
        self.record = record  # for the dead letter if the reply topic vanishes (R16)
        self.id = 0  # of the present attempt, on the socket
        self.attempt = ""
        self.at = 0.0
        self.live = True  # not acknowledged, nor released
        self.fresh = True  # no delta yet: the first is urgent
        self.backlog: list[Delta] = []  # held while the socket is over its high-water mark
        self._kept: list[list[Delta]] = []  # compacted
        self._raw: list[Delta] = []  # newest
        self._ended: End | None = None

    @property
    def ended(self) -> End | None:
        return self._ended

    @property
    def tokens(self) -> int:
        """Given to the stream so far."""
        return sum(d.tokens for deltas in self._kept for d in deltas) + sum(d.tokens for d in self._raw)

    def send(self, deltas: list[Delta]) -> None:
        """The deltas of one engine output. The list and its deltas belong to the stream from now on."""
        if self._ended is not None or not self.live or not deltas:
            return
        raw = self._raw
        raw += deltas
        if len(raw) >= COMPACT:
            self._kept.append(Gather(raw).deltas())
            raw.clear()
        self._desk.deltas(self, deltas)

    def end(
        self,
        kind: str,
        usage: Usage,
        timing: Timing,
        error: Error | None = None,
        dead: Dead | None = None,
        *,
        answer: Answer | None = None,
        repeat: bool = False,
    ) -> None:
        """The attempt's end; a second call, or one after the stream was released, does nothing."""
        if self._ended is not None or not self.live:
            return
        self.finish(
            End(
                stream=self.id,
                kind=kind,
                usage=usage,
                timing=timing,
                error=error,
                dead=dead,
                answer=answer,
                repeat=repeat,
            )
        )

    def finish(self, frame: End) -> None:
        """Ends the stream with this frame, even if it had another end before (R16)."""
        self._ended = frame
        self._desk.end(self, frame)

    def frames(self) -> Iterator[Frame]:
        """Everything again, from the start, as the present attempt."""
        yield Open(
            stream=self.id,
            head=self.head,
            attempt=self.attempt,
            number=self.number,
            announce=self.announce,
            prompt_tokens=self.prompt_tokens,
            at=self.at,
        )
        for deltas in self._kept:
            yield Deltas(self.id, deltas)
        if self._raw:
            yield Deltas(self.id, Gather(self._raw).deltas())
        if self._ended is not None:
            self._ended.stream = self.id
            yield self._ended
