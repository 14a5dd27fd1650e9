"""What the delivery process knows of one attempt. State only: core.py decides."""

from __future__ import annotations

from typing import Any, Protocol

from service.delivery.coalescer import Coalescer
from service.delivery.events import Events
from service.delivery.fold import Fold
from service.delivery.lane import Lane, Letter
from service.frames import Delta, End, Open
from service.settings import DeliverySettings
from service.telemetry.spans import StoreSummary


class Home(Protocol):
    """Who is told what happens to an attempt's records."""

    def attempt_broken(self, attempt: Attempt) -> None: ...

    def attempt_refused(self, attempt: Attempt, letter: Letter) -> None: ...


class Attempt:
    """One stream of the worker, from `Open` to `Ended`."""

    __slots__ = (
        "acknowledged_at",
        "announced",
        "buffer",
        "bytes",
        "chunks",
        "dead_place",
        "end",
        "events",
        "fields",
        "first_sent",
        "fold",
        "gone",
        "head",
        "home",
        "key",
        "kind",
        "lane",
        "last",
        "last_sent",
        "opened",
        "output",
        "parked",
        "place",
        "ready",
        "spoiled",
        "stored",
        "terminal",
        "timed",
        "trace_id",
        "usage_due",
        "usage_put",
        "vanished",
        "waits",
    )

    def __init__(self, home: Home, opened: Open, traceparent: str, settings: DeliverySettings) -> None:
        head = opened.head
        self.home = home
        self.opened = opened
        self.head = head
        self.key = head.job_id.encode()
        self.trace_id = traceparent[3:35]
        self.events = Events(opened, traceparent, settings.max_event_bytes)
        self.fold = Fold(head.endpoint)
        self.buffer = (
            Coalescer(settings.flush_ms / 1000, settings.flush_tokens, settings.flush_bytes) if head.stream else None
        )
        self.lane: Lane | None = None
        self.parked = False  # waits for the gate, or for room in its lane
        self.timed = False  # has an entry among the flush timers
        self.announced = False  # `started` has been put
        self.gone = False  # broken, dropped or ended: whatever still comes for it is ignored
        self.spoiled = False  # its output could not be written: it fails
        self.vanished = False  # its reply topic is gone
        # Its end
        self.end: End | None = None
        self.kind = ""  # how it really ends: an output that cannot be stored makes `completed` a `failed`
        self.last: list[Delta] = []  # the last chunk, held until all that must come before the terminal is done
        self.waits = 0  # dead letter or blob under way
        self.ready = False  # nothing is left to wait for: the last chunk and the terminal may go
        self.fields: dict[str, Any] = {}  # of the terminal event
        self.terminal: Letter | None = None  # put into the lane
        self.place: dict[str, Any] | None = None  # where the terminal lies
        self.usage_put = False
        self.usage_due = False  # the usage record is not acknowledged yet
        self.dead_place: dict[str, Any] | None = None
        self.output: dict[str, Any] | None = None  # blob reference
        self.stored: StoreSummary | None = None
        # For the send span and Ended
        self.first_sent: float | None = None
        self.last_sent: float | None = None
        self.acknowledged_at: float | None = None
        self.chunks = 0
        self.bytes = 0

    def sent(self, size: int, wall: float) -> None:
        """An event of `size` bytes is on its way."""
        self.bytes += size
        self.last_sent = wall
        if self.first_sent is None:
            self.first_sent = wall

    def broken(self) -> None:
        self.home.attempt_broken(self)

    def refused(self, letter: Letter) -> None:
        self.home.attempt_refused(self, letter)
