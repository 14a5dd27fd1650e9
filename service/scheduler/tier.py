"""One tier: its tenants' queues, the window of those whose turn is near, and how long each tenant has waited. Pure."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from service.scheduler.entry import Entry
from service.scheduler.fair_queue import FairQueue, Flow

# Share of the engine of a tier, while jobs of all three wait.
WEIGHTS = {"interactive": 16.0, "standard": 4.0, "bulk": 1.0}


_Seat = tuple[int, float, int, Entry]  # 0 = had its turn already, start tag, number


class Window:
    """Jobs in the order of their turns: those that had one already, then by start tag."""

    def __init__(self) -> None:
        self.flows: dict[Flow[Entry], int] = {}  # whose jobs are here → how many
        self._seats: list[_Seat] = []

    def __len__(self) -> int:
        return len(self._seats)

    def __iter__(self) -> Iterator[Entry]:
        return (seat[3] for seat in self._seats)

    def add(self, entry: Entry, *, first: bool = False) -> None:
        entry.seat = (0 if first else 1, entry.start, entry.number)
        assert entry.flow is not None
        insort(self._seats, (*entry.seat, entry))
        self.flows[entry.flow] = self.flows.get(entry.flow, 0) + 1

    def remove(self, entry: Entry) -> None:
        assert entry.seat is not None and entry.flow is not None
        seat = (*entry.seat, entry)
        entry.seat = None
        del self._seats[bisect_left(self._seats, seat)]
        left = self.flows[entry.flow] - 1
        if left:
            self.flows[entry.flow] = left
        else:
            del self.flows[entry.flow]

    def ready(self, flow: Flow[Entry] | None = None) -> Entry | None:
        """The next one (of this flow) that is rendered and not over a limit of its tenant."""
        for _, _, _, entry in self._seats:
            if entry.prepared is not None and not entry.parked and (flow is None or entry.flow is flow):
                return entry
        return None

    def first(self) -> float:
        """The lowest start tag of those that wait for their first turn and for no limit of their tenant; inf: none."""
        for in_order, start, _, entry in self._seats:
            if in_order and not entry.parked:
                return start
        return float("inf")

    def last(self) -> float:
        """The highest start tag; -inf if nothing is here."""
        return self._seats[-1][1] if self._seats else float("-inf")


class WaitClock:
    """Stands while nothing can be admitted, whoever waits: nobody ages by that."""

    def __init__(self) -> None:
        self._held_s = 0.0
        self._held_since: float | None = None
        self._last = 0.0

    def hold(self, now: float) -> None:
        if self._held_since is None:
            self._held_since = now

    def unhold(self, now: float) -> None:
        if self._held_since is not None:
            self._held_s += now - self._held_since
            self._held_since = None

    def at(self, now: float) -> float:
        """Never goes back."""
        age = (now if self._held_since is None else self._held_since) - self._held_s
        if age > self._last:
            self._last = age
        return self._last


class Tier:
    def __init__(self, name: str, weight: float) -> None:
        self.name = name
        self.weight = weight
        self.queue: FairQueue[Entry] = FairQueue()
        self.window = Window()
        self.parked = 0  # in the window, and over a limit of their tenant
        self.position = 0.0  # finish tag among the tiers
        self.waiting: OrderedDict[Flow[Entry], float] = OrderedDict()  # → since when; the longest first
        self.served = 0.0  # when a job of this tier was admitted last, or began to wait for the first time

    @property
    def active(self) -> bool:
        return self.queue.active > 0

    def lowest(self) -> float:
        """The lowest start tag of all that waits and may have its turn; inf if nothing does."""
        head = self.queue.first()
        first = self.window.first()
        return first if head is None or first < head.start else head.start

    def note(self, flow: Flow[Entry], now: float) -> None:
        """The flow may have begun to wait, or have ceased to."""
        if not flow.waits:
            self.waiting.pop(flow, None)
        elif flow not in self.waiting:
            if not self.waiting:
                self.served = max(self.served, now)
            self.waiting[flow] = now

    def admitted(self, flow: Flow[Entry], now: float) -> None:
        """It had its turn: its waiting begins anew."""
        self.served = now
        self.waiting.pop(flow, None)
        self.note(flow, now)

    def overdue(self, now: float, bound_s: float) -> Sequence[tuple[float, Flow[Entry]]]:
        """The flows that have waited too long, and since when; the longest first."""
        if not self.waiting or now - next(iter(self.waiting.values())) <= bound_s:
            return ()
        return [(since, flow) for flow, since in self.waiting.items() if now - since > bound_s]
