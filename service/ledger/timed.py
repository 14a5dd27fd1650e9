"""The ledger of a partition whose records may be kept aside until they are due (R12): the `deferred` topic.

Pure, as `Ledger` is. What differs: records are taken up in the order in which they become due, not in that of the log;
a hundred thousand unfinished ones must neither stop reading nor slow a commit down, so they are kept as runs.

    read ──▶ live ──time──▶ timed ──due──▶ live ──▶ finished
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from heapq import merge

from service.ledger.ledger import ALWAYS, Ledger
from service.ledger.metadata import HEADER, LIMIT, Commit, Snapshot, encode, pack_runs

MAX_TIMED = 100_000  # records kept aside a partition; then it is read no further (R12)
BUCKET = 1_024  # offsets for which one status offset is remembered: exactness here would cost memory, not correctness

Run = tuple[int, int, int]  # first offset, length, starts of each


class Runs:
    """A set of offsets in runs. Adding at the end is cheap, taking out costs a search."""

    __slots__ = ("_firsts", "_lengths", "count")

    def __init__(self) -> None:
        self.count = 0
        self._firsts: list[int] = []
        self._lengths: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __contains__(self, offset: int) -> bool:
        place = bisect_right(self._firsts, offset) - 1
        return place >= 0 and offset < self._firsts[place] + self._lengths[place]

    def __iter__(self) -> Iterator[Run]:
        return ((first, length, 0) for first, length in zip(self._firsts, self._lengths, strict=True))

    @property
    def first(self) -> int | None:
        return self._firsts[0] if self._firsts else None

    def add(self, offset: int) -> None:
        """An offset that is not in it."""
        self.count += 1
        place = bisect_right(self._firsts, offset)
        if place and self._firsts[place - 1] + self._lengths[place - 1] == offset:
            self._lengths[place - 1] += 1
        else:
            self._firsts.insert(place, offset)
            self._lengths.insert(place, 1)

    def discard(self, offset: int) -> bool:
        place = bisect_right(self._firsts, offset) - 1
        if place < 0 or offset >= (end := self._firsts[place] + self._lengths[place]):
            return False
        self.count -= 1
        first = self._firsts[place]
        if first == offset:
            if end == offset + 1:
                del self._firsts[place], self._lengths[place]
            else:
                self._firsts[place] += 1
                self._lengths[place] -= 1
        else:
            self._lengths[place] = offset - first
            if end > offset + 1:
                self._firsts.insert(place + 1, offset + 1)
                self._lengths.insert(place + 1, end - offset - 1)
        return True


class TimedLedger(Ledger):
    """`max_timed`: records kept aside at which reading pauses, without which they fill memory."""

    __slots__ = ("_done", "_timed", "max_timed")

    def __init__(
        self,
        snapshot: Snapshot,
        epoch: int,
        *,
        high: int,
        max_span: int,
        max_timed: int = MAX_TIMED,
        stored: Commit | None = None,
    ) -> None:
        super().__init__(snapshot, epoch, high=high, max_span=max_span, stored=stored)
        self.max_timed = max_timed
        # As long as what is read again: its first one is asked for at every record, which a plain dict makes slow.
        self._pending = OrderedDict(snapshot.unfinished)
        self._timed = Runs()
        self._done = _finished(snapshot)  # bucket of finished offsets → lowest offset of their status records

    # reading

    def register(self, offset: int, at_ms: int = 0) -> bool:
        told = self._ahead.get(offset) if offset >= self.next else None
        if super().register(offset, at_ms):
            return True
        if told is not None:
            self._note(offset, told[0])
        return False

    def time(self, offset: int) -> bool:
        """Keeps a record aside. False: it is not live, or was started before."""
        if self._live.get(offset) != 0 or offset in self._started:
            return False
        del self._live[offset]
        self._timed.add(offset)
        return True

    def due(self, offset: int) -> bool:
        """Takes it up again. False: it was not kept aside."""
        if not self._timed.discard(offset):
            return False
        self._live[offset] = 0
        return True

    @property
    def room(self) -> int:
        return max(0, self.high - len(self._live))

    def must_pause(self) -> bool:
        """The span does not count: one job of tomorrow would stop all others behind it."""
        if not self.pressed and (len(self._live) >= self.high or len(self._timed) >= self.max_timed):
            self.pressed = True
            return True
        return False

    def may_resume(self) -> bool:
        if self.pressed and len(self._live) <= self.low and len(self._timed) <= self.max_timed * 9 // 10:
            self.pressed = False
            return True
        return False

    # ending

    def holds(self, offset: int) -> bool:
        return offset in self._live or offset in self._timed

    def complete(self, offset: int, status_offset: int | None = None) -> bool:
        if not super().complete(offset):
            return False
        if status_offset is not None:
            self._note(offset, status_offset)
        return True

    def settle(self, offset: int, status_offset: int, at_ms: int = ALWAYS) -> bool:
        if offset in self._timed:  # another copy of the same job ended; this one is found out when it is due
            return False
        if not super().settle(offset, status_offset, at_ms):
            return False
        if offset not in self._ahead:
            self._note(offset, status_offset)
        return True

    def careful(self, offset: int) -> bool:
        """The former owner may have been running any of those that it had read."""
        return not self.clean and offset < self._frontier + self.high + self.max_timed

    def _note(self, offset: int, status_offset: int) -> None:
        """Above the commit's `next`, if that must be cut short, only a status record tells that this one ended."""
        bucket = offset // BUCKET
        self._done[bucket] = min(status_offset, self._done.get(bucket, status_offset))

    # what to commit

    @property
    def watermark(self) -> int:
        lowest = min(self._live, default=self.next)
        for offset in self._pending:
            lowest = min(lowest, offset)
            break
        first = self._timed.first
        return lowest if first is None else min(lowest, first)

    @property
    def live(self) -> int:
        return len(self._live) + len(self._timed)

    @property
    def unfinished(self) -> dict[int, int]:
        return {
            offset: starts
            for first, length, starts in self._runs(clean=False)
            for offset in range(first, first + length)
        }

    def _runs(self, *, clean: bool) -> Iterator[Run]:
        started = frozenset() if clean else self._started
        live = ((offset, 1, n + 1 if offset in started else n) for offset, n in sorted(self._live.items()))
        pending = ((offset, 1, n) for offset, n in self._pending.items())
        return _joined(merge(live, self._timed, pending))

    def commit(self, *, clean: bool, writer: int, limit: int = LIMIT) -> Commit:
        room = limit - HEADER
        if clean:
            watermark = self.watermark
            entries, following = pack_runs(watermark, self.next, self._runs(clean=True), room)
        else:
            if self._entries is None or len(self._entries[0]) > room:
                mark = self.watermark
                self._entries = (*pack_runs(mark, self.next, self._runs(clean=False), room), mark)
            entries, following, watermark = self._entries
        self._ahead = {offset: told for offset, told in self._ahead.items() if offset >= self.next}
        self._done = {bucket: status for bucket, status in self._done.items() if bucket >= watermark // BUCKET}
        news = [status for status, _ in self._ahead.values()]
        if following < self.next:
            news += (status for bucket, status in self._done.items() if bucket >= following // BUCKET)
        status_next = min([self.status_next, *news])
        metadata = encode(watermark, following, status_next, entries, clean=clean, runs=True, writer=writer)
        return Commit(watermark, metadata)


def _finished(snapshot: Snapshot) -> dict[int, int]:
    """What former owners finished above the watermark, only the commit tells. Should a later one be cut shorter, the
    status topic must: where is not known, so from its beginning on."""
    buckets: dict[int, int] = {}
    expected = snapshot.watermark
    for offset in (*snapshot.unfinished, snapshot.next):
        if offset > expected:
            buckets.update(dict.fromkeys(range(expected // BUCKET, (offset - 1) // BUCKET + 1), 0))
        expected = offset + 1
    return buckets


def _joined(runs: Iterable[Run]) -> Iterator[Run]:
    """Neighbours with the same start count as one run."""
    first, length, starts = -1, 0, 0
    for offset, count, n in runs:
        if length and offset == first + length and n == starts:
            length += count
            continue
        if length:
            yield first, length, starts
        first, length, starts = offset, count, n
    if length:
        yield first, length, starts
