"""The book: the ledgers of all assigned partitions, who owns which offset, and what the next commit says (R2-R5, R11).

Pure: no I/O and no clock. A ticket names an offset and the epoch of the ledger that gave it out; work that began under
an assignment that is gone can complete nothing, even if the partition came back in between.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

from schemas.names import deferred_topic, overflow_topic
from service.job import Place, Ticket
from service.ledger.ledger import ALWAYS, Ledger
from service.ledger.metadata import LIMIT, Commit, Key, Snapshot, decode
from service.ledger.timed import MAX_TIMED, TimedLedger
from service.settings import Settings

# A pause costs a fetch (0.1 s): with 16 for an engine of 8 slots, 68 records a second went to `overflow`.
LEAST_HIGH = 128
MIN_LIMIT = 64  # characters of metadata that are always tried


class Standing(NamedTuple):
    """One partition's figures, for metrics and health. Offsets and records."""

    watermark: int
    next: int
    live: int
    paused: bool


class Book:
    """All partitions of this process.

    `on_pressure(key, paused)`: called when a partition must stop being read, and when it may go on.
    `positions()`: how far reading has come, for partitions of which no record is on its way to `register`.
    `timed`: topics whose records may be kept aside until they are due (R12), at most `max_timed` a partition.
    `unrelieved`: topics that nothing is moved away from. Slow jobs may hold most of such a partition for long: it is
    read on whenever an eighth is free, or whoever lies behind them waits until half of them have ended.
    `writer`: marks this process's commits, so that it can tell them from another's (R4).
    """

    def __init__(
        self,
        *,
        high: int,
        max_span: int,
        on_pressure: Callable[[Key, bool], None] | None = None,
        timed: Collection[str] = (),
        unrelieved: Collection[str] = (),
        max_timed: int = MAX_TIMED,
    ) -> None:
        self.high = high
        self.max_span = max_span
        self.timed = frozenset(timed)
        self.unrelieved = frozenset(unrelieved)
        self.max_timed = max_timed
        self.on_pressure = on_pressure
        self.positions: Callable[[], Mapping[Key, int]] = dict
        self.writer = secrets.randbits(32)
        self.limit = LIMIT
        self._ledgers: dict[Key, Ledger] = {}
        self._numbers: dict[int, list[Ledger]] = {}
        self._detached: dict[int, Ledger] = {}  # by epoch
        self._epoch = 0

    @classmethod
    def of(cls, settings: Settings) -> Book:
        """HIGH = min(900, max(128, 2 × max_num_seqs)) unfinished records and a bounded span per partition (R3)."""
        high = min(settings.ledger.max_unfinished, max(LEAST_HIGH, 2 * settings.engine.max_num_seqs))
        return cls(
            high=high,
            max_span=settings.ledger.max_span,
            timed=(deferred_topic(settings.pool),),
            unrelieved=(overflow_topic(settings.pool),),
        )

    # records

    def register(self, place: Place, at_ms: int = 0) -> Ticket | None:
        """The ticket of a record that is new here; None: finished, running here, or of a partition that is not ours."""
        key = place[:2]
        ledger = self._ledgers.get(key)
        if ledger is None or not ledger.register(place[2], at_ms):
            return None
        if ledger.must_pause() and self.on_pressure is not None:
            self.on_pressure(key, True)
        return Ticket(place, ledger.epoch)

    def owns(self, ticket: Ticket) -> bool:
        """Whether this record is still this process's to end."""
        ledger = self._of(ticket)
        return ledger is not None and ledger.holds(ticket.place.offset)

    def complete(self, ticket: Ticket, status_offset: int | None = None) -> bool:
        """Everything this job sent is acknowledged (R6). False: not ours any more, or completed before.

        `status_offset`: where its status record landed. Those of one partition number are acknowledged in order, so
        every earlier one is accounted for in each ledger of the number.
        """
        ledger = self._of(ticket)
        if ledger is None or not ledger.complete(ticket.place.offset, status_offset):
            return False
        if status_offset is not None:
            for sibling in self._numbers.get(ticket.place.partition, ()):
                if sibling.settled and sibling.status_next <= status_offset:
                    sibling.status_next = status_offset + 1
        self._relieve(ticket, ledger)
        return True

    def _relieve(self, ticket: Ticket, ledger: Ledger) -> None:
        if ledger.epoch in self._detached:
            if not ledger.live:
                del self._detached[ledger.epoch]
        elif ledger.may_resume() and self.on_pressure is not None:
            self.on_pressure(ticket.place[:2], False)

    # records that are not due yet (R12)

    def time(self, ticket: Ticket) -> bool:
        """Keeps a record aside until `due`: it is unfinished, and no back-pressure counts it.

        False: not ours, of a topic without timed records, or one that was started before, which must not wait unseen.
        """
        ledger = self._of(ticket)
        if not isinstance(ledger, TimedLedger) or not ledger.time(ticket.place.offset):
            return False
        self._relieve(ticket, ledger)
        if ledger.must_pause() and self.on_pressure is not None:
            self.on_pressure(ticket.place[:2], True)
        return True

    def due(self, ticket: Ticket) -> bool:
        """Its time has come: it counts like any other. False: not ours any more."""
        ledger = self._of(ticket)
        if not isinstance(ledger, TimedLedger) or not ledger.due(ticket.place.offset):
            return False
        if ledger.must_pause() and self.on_pressure is not None:
            self.on_pressure(ticket.place[:2], True)
        return True

    def room(self, key: Key) -> int:
        """How many more records of a partition may become due now."""
        ledger = self._ledgers.get(key)
        return ledger.room if isinstance(ledger, TimedLedger) else 0

    def excess(self, key: Key, *, early: bool = False) -> int:
        """How many records a paused partition must finish before it is read on; 0: read, or waits for its span.

        `early`: how many it would be if it were paused now.
        """
        ledger = self._ledgers.get(key)
        return max(0, ledger.live - ledger.low) if ledger is not None and (early or ledger.pressed) else 0

    def start(self, ticket: Ticket) -> None:
        """The engine gets this record: a kill from the next commit on counts as an unclean start (R11)."""
        if ledger := self._of(ticket):
            ledger.start(ticket.place.offset)

    def crashed(self, ticket: Ticket) -> None:
        """The engine died with this record (R11)."""
        if ledger := self._of(ticket):
            ledger.crashed(ticket.place.offset)

    def starts(self, ticket: Ticket) -> int:
        """Unclean starts of this record so far, by this process and those before it."""
        ledger = self._of(ticket)
        return 0 if ledger is None else ledger.starts(ticket.place.offset)

    def careful(self, ticket: Ticket) -> bool:
        """Whether its start must be committed (`Committer.flush`) before the engine gets it (R11)."""
        ledger = self._of(ticket)
        return ledger is not None and ledger.careful(ticket.place.offset)

    # partitions

    @property
    def keys(self) -> frozenset[Key]:
        return frozenset(self._ledgers)

    def take(self, key: Key, stored: Commit | None, begin: int, end: int) -> None:
        """Opens a partition as the group's offset store tells it; its log holds [begin, end). None: never committed."""
        self.drop((key,))
        told = Snapshot.plain(begin) if stored is None else decode(stored)
        snapshot = told.within(begin, end)
        if snapshot.watermark < told.watermark:
            stored = None  # another log: the committed offset means nothing here, so a lower one is no step back
        self._epoch += 1
        if key[0] in self.timed:
            ledger: Ledger = TimedLedger(
                snapshot,
                self._epoch,
                high=self.high,
                max_span=self.max_span,
                max_timed=self.max_timed,
                stored=stored,
            )
        else:
            low = self.high - max(1, self.high // 8) if key[0] in self.unrelieved else None
            ledger = Ledger(snapshot, self._epoch, high=self.high, max_span=self.max_span, low=low, stored=stored)
        self._ledgers[key] = ledger
        self._numbers.setdefault(key[1], []).append(ledger)

    def drop(self, keys: Iterable[Key]) -> None:
        """Forgets partitions that belong to somebody else now; their tickets are void."""
        for key in tuple(keys):
            ledger = self._ledgers.pop(key, None)
            if ledger is not None:
                siblings = self._numbers[key[1]]
                siblings.remove(ledger)
                if not siblings:
                    del self._numbers[key[1]]

    def detach(self, keys: Iterable[Key]) -> None:
        """Partitions whose topic is gone: their tickets hold, since nobody else has them, but nothing is committed."""
        for key in keys:
            ledger = self._ledgers.get(key)
            if ledger is not None and ledger.live:
                self._detached[ledger.epoch] = ledger
        self.drop(keys)

    def position(self, key: Key) -> int:
        """Where reading goes on."""
        return self._ledgers[key].position

    def readable(self, key: Key) -> bool:
        """Whether the partition may be read: known, settled from the status topic, not under back-pressure."""
        ledger = self._ledgers.get(key)
        return ledger is not None and ledger.settled and not ledger.pressed

    def is_careful(self, key: Key) -> bool:
        """Whether the partition was taken over without the clean-stop mark (R11)."""
        ledger = self._ledgers.get(key)
        return ledger is not None and not ledger.clean

    def standings(self) -> dict[Key, Standing]:
        return {
            key: Standing(ledger.watermark, ledger.next, ledger.live, ledger.pressed)
            for key, ledger in self._ledgers.items()
        }

    @property
    def live(self) -> int:
        """Records read here and unfinished, all partitions together."""
        return sum(ledger.live for ledger in self._ledgers.values())

    # what the status topic tells (R4)

    def unsettled(self) -> dict[int, int]:
        """Partition number → first status offset to read, for numbers with a ledger that was not settled yet."""
        return {
            number: min(ledger.status_next for ledger in ledgers if not ledger.settled)
            for number, ledgers in self._numbers.items()
            if not all(ledger.settled for ledger in ledgers)
        }

    def settle(self, origin: Place, status_offset: int, at_ms: int = ALWAYS) -> bool:
        """A status record of this time says that the record at `origin` ended."""
        ledger = self._ledgers.get(origin[:2])
        return ledger is not None and not ledger.settled and ledger.settle(origin.offset, status_offset, at_ms)

    def settled(self, number: int, end: int | None) -> None:
        """The status partition was read up to `end`; None: given up, what it would have told runs again."""
        for ledger in self._numbers.get(number, ()):
            if not ledger.settled:
                ledger.settled = True
                if end is not None:
                    ledger.status_next = end

    # commits

    def known(self, key: Key, stored: Commit | None) -> bool:
        """Whether what the offset store holds was written, or taken over, by this process: nobody came in between."""
        ledger = self._ledgers.get(key)
        if ledger is None:
            return False
        return stored == ledger.stored or (stored is not None and decode(stored).writer == self.writer)

    def commits(self, *, clean: bool = False) -> dict[Key, Commit]:
        """What to commit, all partitions; never lower than what is known to be stored."""
        for key, position in self.positions().items():
            if (read := self._ledgers.get(key)) is not None and read.settled:
                read.reach(position)
        out: dict[Key, Commit] = {}
        for key, ledger in self._ledgers.items():
            commit = ledger.commit(clean=clean, writer=self.writer, limit=self.limit)
            if ledger.stored is None or commit.offset >= ledger.stored.offset:
                out[key] = commit
        return out

    def stored(self, commits: Mapping[Key, Commit]) -> None:
        """These commits are in the group's offset store."""
        for key, commit in commits.items():
            if ledger := self._ledgers.get(key):
                ledger.stored = commit

    def shrink(self) -> int:
        """The broker allows less metadata than we thought: halves the limit and returns it, in characters."""
        self.limit = max(MIN_LIMIT, self.limit // 2)
        return self.limit

    def _of(self, ticket: Ticket) -> Ledger | None:
        ledger = self._ledgers.get(ticket.place[:2])
        return ledger if ledger is not None and ledger.epoch == ticket.epoch else self._detached.get(ticket.epoch)
