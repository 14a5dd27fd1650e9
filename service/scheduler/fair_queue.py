"""Start-time fair queueing over flows (Goyal, Vin, Cheng: "Start-time Fair Queueing", 1996). Pure; does no I/O.

Each item gets a start tag S = max(v, F) and moves its flow's finish tag to F = S + cost / weight, where v, the virtual
time, is the start tag of the item served last. The lowest start tag is served first. So a flow that stays busy gets
service in proportion to its weight, and one that comes back from idling starts at v: it neither saves up nor pays back.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class _Flow(Generic[T]):
    weight: float
    finish: float = 0.0  # F: virtual time at which what was served so far is paid for
    items: deque[tuple[T, float]] = field(default_factory=deque)
    start: float = 0.0  # S of the head item; meaningful while items is not empty


class FairQueue(Generic[T]):
    """One queue a flow, served by virtual start tag. Costs are in the caller's unit (cost tokens)."""

    def __init__(self) -> None:
        self._flows: dict[Hashable, _Flow[T]] = {}
        self._heads: list[tuple[float, int, Hashable]] = []  # (start tag, tie-break, flow); stale entries are skipped
        self._serial = 0
        self._size = 0
        self._last_finish = 0.0
        self.virtual_time = 0.0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[T]:
        return (item for flow in self._flows.values() for item, _ in flow.items)

    def heads(self) -> Iterator[T]:
        """The first item of each flow: the oldest of each, since a flow is served in order."""
        return (flow.items[0][0] for flow in self._flows.values() if flow.items)

    def put(self, key: Hashable, item: T, cost: float, weight: float = 1.0) -> None:
        """Appends to the flow `key`. A changed weight holds from this item on."""
        flow = self._flows.get(key)
        if flow is None:
            flow = self._flows[key] = _Flow(weight)
        flow.weight = weight
        flow.items.append((item, cost))
        self._size += 1
        if len(flow.items) == 1:
            self._enter(key, flow)

    def pop(self) -> tuple[T, float] | None:
        """The item with the lowest start tag, and that tag; None when nothing waits."""
        while self._heads:
            start, _, key = heapq.heappop(self._heads)
            flow = self._flows.get(key)
            if flow is None or not flow.items or flow.start != start:
                continue
            item, cost = flow.items.popleft()
            self._size -= 1
            self.virtual_time = max(self.virtual_time, start)
            flow.finish = start + cost / flow.weight
            self._last_finish = max(self._last_finish, flow.finish)
            if flow.items:
                self._enter(key, flow)
            elif not self._size:
                # The busy period is over: v moves past every finish tag, so nobody owes anything.
                self.virtual_time = self._last_finish
                self._flows.clear()
                self._heads.clear()
            return item, start
        return None

    def charge(self, key: Hashable, cost: float) -> None:
        """Corrects what a flow pays once the true cost is known; `cost` may be negative."""
        flow = self._flows.get(key)
        if flow is not None:
            flow.finish = max(0.0, flow.finish + cost / flow.weight)
            if flow.items:
                self._enter(key, flow)

    def remove(self, doomed: Callable[[T], bool]) -> list[T]:
        """Takes out every item for which `doomed` is true and returns them."""
        taken: list[T] = []
        for key, flow in self._flows.items():
            if not any(doomed(item) for item, _ in flow.items):
                continue
            head = flow.items[0]
            kept = deque((item, cost) for item, cost in flow.items if not doomed(item))
            taken += [item for item, _ in flow.items if doomed(item)]
            flow.items = kept
            if kept and kept[0] is not head:
                self._enter(key, flow)
        self._size -= len(taken)
        return taken

    def _enter(self, key: Hashable, flow: _Flow[T]) -> None:
        flow.start = max(self.virtual_time, flow.finish)
        self._serial += 1
        heapq.heappush(self._heads, (flow.start, self._serial, key))
