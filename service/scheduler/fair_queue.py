"""Start-time fair queueing over flows (Goyal, Vin, Cheng: "Start-time Fair Queueing", 1996). Pure; does no I/O.

Each item that is taken gets its flow's start tag S = max(v, F) and moves the finish tag to F = S + cost / weight; v,
the virtual time, is the highest start tag of what has begun to be served. The lowest start tag is served first. So a
flow that stays busy gets service in proportion to its weight, and one that comes back from idling starts at v: it
neither saves up nor pays back.

Taking an item and beginning to serve it are two steps: what is taken and still waits (for rendering, for a slot) has
tags ahead of v, and a newcomer comes before it. Costs are in the caller's unit (cost tokens).
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from service.scheduler.lane import Lane

T = TypeVar("T")

# Flows that are idle and heap entries that are void are kept until they outnumber the others, and so many at least.
SLACK = 64


@dataclass(slots=True, eq=False)
class Flow(Generic[T]):
    """One tenant's jobs in one tier."""

    key: Hashable
    weight: float
    lane: Lane[T] = field(default_factory=Lane)
    finish: float = 0.0  # F: virtual time at which what was taken so far is paid for
    start: float = 0.0  # S of the next one; meaningful while `entered`
    entered: int = 0  # the heap entry that counts; 0 = none
    blocked: bool = False  # over a limit of its own: it has no turn
    busy: int = 0  # taken and not done
    ahead: int = 0  # of them those that wait for the engine
    jobs: int = 0  # in the engine
    sequences: int = 0  # of those
    tokens: int = 0  # KV tokens claimed there

    @property
    def waits(self) -> bool:
        """Whether it has something that could be served and is not."""
        return self.ahead > 0 or (len(self.lane) > 0 and not self.blocked)


class FairQueue(Generic[T]):
    def __init__(self) -> None:
        self.flows: dict[Hashable, Flow[T]] = {}
        self.virtual_time = 0.0
        self.active = 0  # flows with items that wait or are busy
        self.active_weight = 0.0  # of those
        self._heads: list[tuple[float, int, Flow[T]]] = []  # (start tag, entry, flow)
        self._serial = 0
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[T]:
        return (item for flow in self.flows.values() for item in flow.lane)

    def put(self, key: Hashable, number: int, item: T, weight: float = 1.0, likeness: int = 0) -> Flow[T]:
        """Into the flow `key`, at the place that `number` gives it there (see Lane)."""
        flow = self.flows.get(key)
        if flow is None:
            if len(self.flows) > SLACK + 2 * self.active:
                self._sweep()
            flow = self.flows[key] = Flow(key, weight)
        if not flow.busy and not flow.lane:
            self.active += 1
            self.active_weight += weight
            flow.weight = weight
        flow.lane.put(number, item, likeness)
        self._size += 1
        if not flow.entered and not flow.blocked:
            self._enter(flow)
        return flow

    def first(self) -> Flow[T] | None:
        """The flow whose turn it is; None when nothing waits, or all that waits is blocked."""
        heads = self._heads
        while heads:
            _, entry, flow = heads[0]
            if flow.entered == entry:
                return flow
            heapq.heappop(heads)
        return None

    def take(self, flow: Flow[T], number: int, cost: float, weight: float | None = None) -> float:
        """Takes an item of the flow out, to be served; returns its start tag. A changed weight holds from here on."""
        start = flow.start
        flow.lane.take(number)
        self._size -= 1
        flow.busy += 1
        flow.ahead += 1
        if weight is not None and weight != flow.weight:
            self.active_weight += weight - flow.weight
            flow.weight = weight
        flow.finish = start + cost / flow.weight
        flow.entered = 0
        if flow.lane and not flow.blocked:
            self._enter(flow)
        return start

    def begin(self, start: float) -> None:
        """What was taken with this start tag begins to be served."""
        if start > self.virtual_time:
            self.virtual_time = start

    def charge(self, flow: Flow[T], cost: float) -> None:
        """Corrects what a flow pays, once more is known; `cost` may be negative."""
        if not cost:
            return
        flow.finish += cost / flow.weight
        if flow.entered:
            self._enter(flow)

    def done(self, flow: Flow[T]) -> None:
        """One that was taken is over."""
        flow.busy -= 1
        if not flow.busy and not flow.lane:
            self._rest(flow)

    def remove(self, flow: Flow[T], number: int) -> None:
        """Takes out an item that waits. Raises KeyError if it is not there."""
        flow.lane.remove(number)
        self._size -= 1
        if not flow.lane:
            flow.entered = 0
            if not flow.busy:
                self._rest(flow)

    def block(self, flow: Flow[T]) -> None:
        flow.blocked = True
        flow.entered = 0

    def unblock(self, flow: Flow[T]) -> None:
        """It goes on at v: being over a limit saves nothing up."""
        flow.blocked = False
        if flow.lane and not flow.entered:
            self._enter(flow)

    def _enter(self, flow: Flow[T]) -> None:
        flow.start = flow.finish if flow.finish > self.virtual_time else self.virtual_time
        self._serial = flow.entered = self._serial + 1
        if len(self._heads) > SLACK + 4 * len(self.flows):
            self._heads = [head for head in self._heads if head[2].entered == head[1]]
            heapq.heapify(self._heads)
        heapq.heappush(self._heads, (flow.start, self._serial, flow))

    def _rest(self, flow: Flow[T]) -> None:
        """It has nothing here any more. What it owes is remembered until v has passed it, or all have ended."""
        self.active -= 1
        self.active_weight -= flow.weight
        if not self.active:  # the busy period is over: nobody owes anything
            self.active_weight = 0.0
            self.flows.clear()
            self._heads.clear()
        elif flow.finish <= self.virtual_time:
            self.flows.pop(flow.key, None)

    def _sweep(self) -> None:
        for flow in list(self.flows.values()):
            if not flow.busy and not flow.lane and flow.finish <= self.virtual_time:
                del self.flows[flow.key]
