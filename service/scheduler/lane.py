"""One flow's queue: first come, first served, but jobs that begin alike may be brought together. Pure.

What was served last is followed by the next job of the same likeness, if that came at most `REACH` places after the
oldest one: its prefix still lies in the engine's cache. So a job is overtaken by at most `REACH` later ones of its
flow.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

REACH = 64
# Numbers of items that were taken out from the middle are kept until they are half of the list, and so many at least.
SLACK = 64


class Lane(Generic[T]):
    """Items by number: the lower one came first, whenever it is put in. Numbers are the caller's and never repeat."""

    __slots__ = ("_alike", "_items", "_last", "_order", "_places")

    def __init__(self) -> None:
        self._items: dict[int, tuple[T, int, int]] = {}  # number → (item, likeness, place in the order of putting)
        self._order: list[int] = []  # heap of numbers; those that are not in `_items` are skipped
        self._alike: dict[int, deque[int]] = {}  # likeness → numbers; the first one is always there
        self._places = 0
        self._last = 0

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[T]:
        return (item for item, _, _ in self._items.values())

    def put(self, number: int, item: T, likeness: int = 0) -> None:
        """Items of one `likeness` other than 0 may be brought together; they must be put in in order of number."""
        self._places += 1
        self._items[number] = (item, likeness, self._places)
        heapq.heappush(self._order, number)
        if likeness:
            alike = self._alike.get(likeness)
            if alike is None:
                alike = self._alike[likeness] = deque()
            alike.append(number)

    def oldest(self) -> T:
        """Raises IndexError if it is empty."""
        return self._items[self._first()][0]

    def next(self) -> tuple[int, T]:
        """Whose turn it is, with its number; it stays. Raises IndexError if it is empty."""
        items = self._items
        number = self._first()
        alike = self._alike.get(self._last) if self._last else None
        if alike is not None and items[alike[0]][2] - items[number][2] <= REACH:
            number = alike[0]
        return number, items[number][0]

    def take(self, number: int) -> T:
        """Serves an item. Raises KeyError if it is not there."""
        self._last = self._items[number][1]
        return self.remove(number)

    def remove(self, number: int) -> T:
        """Takes an item out without serving it. Raises KeyError if it is not there."""
        items = self._items
        item, likeness, _ = items.pop(number)
        if likeness:
            alike = self._alike[likeness]
            while alike and alike[0] not in items:
                alike.popleft()
            if not alike:
                del self._alike[likeness]
        if len(self._order) > SLACK + 2 * len(items):
            self._order = sorted(items)
        return item

    def _first(self) -> int:
        order, items = self._order, self._items
        while order[0] not in items:
            heapq.heappop(order)
        return order[0]
