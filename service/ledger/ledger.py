"""The ledger of one partition: which offsets were read, which are unfinished, and so what may be committed (R2, R3).

Pure: no I/O, no clock, no knowledge of jobs. Offsets come in rising order from `position` on, because that is where the
consumer is made to seek; one that is skipped on the way no longer exists on the log.

    read ──▶ live ──▶ finished            `watermark` = the lowest offset that is not finished
    restored from a commit ──▶ pending ──▶ (read again) live
    ended by its status record, not read yet ──▶ ahead ──▶ (read) finished
"""

from __future__ import annotations

from service.ledger.metadata import HEADER, LIMIT, Commit, Snapshot, encode, pack

ALWAYS = 2**63  # a time after every record's


class Ledger:
    """One partition under one assignment.

    `high`: live records at which reading must pause, without which one partition fills memory and the metadata; `low`:
    those at which it may go on, half of that if left out.
    `max_span`: records between the watermark and the newest, without which one slow job makes the commit too long.
    """

    __slots__ = (
        "_ahead",
        "_entries",
        "_frontier",
        "_live",
        "_pending",
        "_started",
        "clean",
        "epoch",
        "high",
        "low",
        "max_span",
        "next",
        "pressed",
        "settled",
        "status_next",
        "stored",
    )

    def __init__(
        self,
        snapshot: Snapshot,
        epoch: int,
        *,
        high: int,
        max_span: int,
        low: int | None = None,
        stored: Commit | None = None,
    ) -> None:
        self.epoch = epoch
        self.high = high
        self.low = high // 2 if low is None else low  # real hysteresis: every pause throws the prefetched records away
        self.max_span = max_span
        self.next = snapshot.next
        self.status_next = snapshot.status_next
        self.clean = snapshot.clean  # False: the former owner was killed, or is unknown
        self.stored = stored  # what the group's offset store holds as far as this process knows (R4)
        self.settled = False  # the status topic was read for it
        self.pressed = False  # paused by back-pressure
        self._live: dict[int, int] = {}  # offset → unclean starts before this assignment; ascending
        self._pending = dict(snapshot.unfinished)
        self._ahead: dict[int, tuple[int, int]] = {}  # offset → offset and time of its status record
        self._started: set[int] = set()  # live ones that the engine has had since
        self._frontier = snapshot.next  # above it nothing was finished by the former owner
        self._entries: tuple[bytes, int, int] | None = None  # packed (entries, next, watermark), until a change

    # reading

    def register(self, offset: int, at_ms: int = 0) -> bool:
        """Notes a read record. False: not new (finished, or live here), so it must not run.

        `at_ms`: when it was published. A status record that is older tells of the one that was there before its topic
        was deleted and made again.
        """
        if offset < self.next:
            starts = self._pending.pop(offset, None)
            if starts is None:
                return False
            while self._pending and (earlier := next(iter(self._pending))) < offset:
                del self._pending[earlier]
        else:
            starts = 0
            if self._pending:
                self._pending.clear()
            self.next = offset + 1
            if self._ahead and (told := self._ahead.pop(offset, None)) is not None and at_ms <= told[1]:
                self._entries = None
                return False
        self._live[offset] = starts
        self._entries = None
        return True

    def reach(self, position: int) -> None:
        """Reading has come so far: what was not handed out on the way is no record to be waited for. A transaction's
        marker, what an aborted one wrote, what was compacted away."""
        while self._pending and (gone := next(iter(self._pending))) < position:
            del self._pending[gone]
            self._entries = None
        if position > self.next:
            self.next = position
            self._entries = None

    def must_pause(self) -> bool:
        """True once, when reading must pause. Restored records that were not read again never count: they must be."""
        if not self.pressed and (
            len(self._live) >= self.high or (not self._pending and self.next - self.watermark >= self.max_span)
        ):
            self.pressed = True
            return True
        return False

    def may_resume(self) -> bool:
        """True once, when a paused partition may be read again."""
        if self.pressed and len(self._live) <= self.low and (self._pending or self.span <= self.max_span // 2):
            self.pressed = False
            return True
        return False

    # ending

    def holds(self, offset: int) -> bool:
        """Read here and unfinished."""
        return offset in self._live

    def complete(self, offset: int, status_offset: int | None = None) -> bool:
        """Everything of this record is acknowledged (R6). False: it was not live."""
        if self._live.pop(offset, None) is None:
            return False
        self._started.discard(offset)
        self._entries = None
        return True

    def settle(self, offset: int, status_offset: int, at_ms: int = ALWAYS) -> bool:
        """A status record says that this offset ended, at that time. Live ones are left alone: their own end is on its
        way."""
        if offset in self._live:
            return False
        if offset >= self._frontier:
            self._frontier = offset + 1
        if self._pending.pop(offset, None) is not None:
            self._entries = None
            return True
        if offset >= self.next:
            self._ahead[offset] = (status_offset, at_ms)
            return True
        return False

    # start counts (R11)

    def start(self, offset: int) -> None:
        """The engine gets this record; from the next commit on a kill of this process counts as an unclean start."""
        if offset in self._live and offset not in self._started:
            self._started.add(offset)
            self._entries = None

    def crashed(self, offset: int) -> None:
        """The engine died with this record: its start was an unclean one."""
        if offset in self._live:
            self._live[offset] += 1
            self._started.discard(offset)
            self._entries = None

    def starts(self, offset: int) -> int:
        """Unclean starts known of a live record."""
        return self._live.get(offset, 0)

    def careful(self, offset: int) -> bool:
        """Whether this record's start must be committed before the engine gets it.

        After an unclean end it must for everything that the former owner may have been running: it had at most `high`
        unfinished records, none of them above the newest finished one + `high`.
        """
        return not self.clean and offset < self._frontier + self.high

    # what to commit

    @property
    def watermark(self) -> int:
        """Every offset below is finished."""
        for offset in self._live:
            return offset
        for offset in self._pending:
            return offset
        return self.next

    @property
    def position(self) -> int:
        """Where reading goes on."""
        for offset in self._pending:
            return offset
        return self.next

    @property
    def span(self) -> int:
        return self.next - self.watermark

    @property
    def live(self) -> int:
        return len(self._live)

    @property
    def unfinished(self) -> dict[int, int]:
        """Offset → start count as the next commit would tell it, ascending."""
        return dict(self._unfinished(clean=False))

    def _unfinished(self, *, clean: bool) -> list[tuple[int, int]]:
        if clean or not self._started:
            return [*self._live.items(), *self._pending.items()]
        started = self._started
        return [*((o, n + 1 if o in started else n) for o, n in self._live.items()), *self._pending.items()]

    def commit(self, *, clean: bool, writer: int, limit: int = LIMIT) -> Commit:
        """Watermark and metadata. `clean`: running starts are taken back, for they end without harm (R11)."""
        if clean:
            watermark = self.watermark
            entries, following = pack(watermark, self.next, self._unfinished(clean=True), limit - HEADER)
        else:
            if self._entries is None or len(self._entries[0]) > limit - HEADER:
                mark = self.watermark
                self._entries = (*pack(mark, self.next, self._unfinished(clean=False), limit - HEADER), mark)
            entries, following, watermark = self._entries
        # A record that ended ahead of reading is told by its status record only, so that one must be read again.
        self._ahead = {offset: told for offset, told in self._ahead.items() if offset >= self.next}
        status_next = min((self.status_next, *(status for status, _ in self._ahead.values())))
        return Commit(watermark, encode(watermark, following, status_next, entries, clean=clean, writer=writer))
