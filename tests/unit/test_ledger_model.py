"""The ledger against a model of the world: a log, an offset store, a status topic, and processes that come and go.

Random reading, starting, ending, committing, clean and unclean ends, rebalances with and without a change of owner,
frozen owners that wake up, retention. Held after every step:

* a commit never passes a record that has not ended, never lowers an offset, has ≤ 4,096 characters, reads back
* no process ever has two live copies of a record
* no record that has ended (its status record is written) is ever handed out again
and in the end everything has ended once.
"""

from __future__ import annotations

from collections import deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from service.job import Place, Ticket
from service.ledger import Book, Commit
from service.ledger.metadata import LIMIT, Key, decode

KEYS: tuple[Key, ...] = (("a", 0), ("b", 0), ("a", 1))
HIGH, SPAN = 4, 12


class Process:
    """A worker as far as the ledger sees it: where it reads, what it runs, and what delivery reported but is unread."""

    def __init__(self) -> None:
        self.book = Book(high=HIGH, max_span=SPAN)
        self.cursor: dict[Key, int] = {}
        self.running: dict[Place, Ticket] = {}
        self.reports: deque[tuple[Ticket, int]] = deque()
        self.leased = False  # has committed under this assignment, so it may end jobs (R5)


class World(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.begin = dict.fromkeys(KEYS, 0)
        self.end = dict.fromkeys(KEYS, 0)
        self.store: dict[Key, Commit | None] = dict.fromkeys(KEYS)
        self.status: dict[int, list[Place]] = {0: [], 1: []}
        self.ended: set[Place] = set()
        self.owner = Process()
        self.frozen: Process | None = None

    # the log

    @initialize()
    def first(self) -> None:
        self.assign(self.owner)

    @rule(key=st.sampled_from(KEYS), count=st.integers(1, 6))
    def publish(self, key: Key, count: int) -> None:
        self.end[key] += count

    @rule(key=st.sampled_from(KEYS), count=st.integers(1, 3))
    def expire(self, key: Key, count: int) -> None:
        """Retention: the oldest records go, ended or not."""
        begin = min(self.begin[key] + count, self.end[key])
        self.ended |= {Place(*key, offset) for offset in range(self.begin[key], begin)}
        self.begin[key] = begin
        for place in [p for p in self.owner.running if p[:2] == key and p.offset < begin]:
            self.report(place)

    # work

    @rule(key=st.sampled_from(KEYS), count=st.integers(1, 5))
    def read(self, key: Key, count: int) -> None:
        owner = self.owner
        for _ in range(count):
            if not owner.book.readable(key):
                return
            offset = max(owner.cursor[key], self.begin[key])
            if offset >= self.end[key]:
                return
            owner.cursor[key] = offset + 1
            place = Place(*key, offset)
            ticket = owner.book.register(place)
            if ticket is None:
                continue
            assert place not in owner.running, "two live copies"
            assert place not in self.ended, "ended, and handed out again"
            owner.running[place] = ticket

    @precondition(lambda self: self.owner.running)
    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        ticket = self.owner.running[data.draw(st.sampled_from(sorted(self.owner.running)))]
        self.owner.book.start(ticket)

    @precondition(lambda self: self.owner.running)
    @rule(data=st.data(), heard=st.booleans())
    def finish(self, data: st.DataObject, heard: bool) -> None:
        """Terminal and status record are acknowledged; the worker hears of it now or later, in order."""
        self.report(data.draw(st.sampled_from(sorted(self.owner.running))))
        if heard:
            self.hear()

    @rule()
    def hear(self) -> None:
        while self.owner.reports:
            ticket, status_offset = self.owner.reports.popleft()
            current = self.owner.running.get(ticket.place) == ticket
            assert self.owner.book.complete(ticket, status_offset) == current
            if current:
                del self.owner.running[ticket.place]

    @rule()
    def commit(self) -> None:
        self.write(self.owner.book.commits(), self.owner)
        self.owner.leased = True

    # the group

    @rule(barrier=st.booleans(), committed=st.booleans())
    def rebalance_and_keep(self, barrier: bool, committed: bool) -> None:
        self.revoke(self.owner, barrier, committed)
        self.assign(self.owner)

    @rule(barrier=st.booleans(), committed=st.booleans())
    def rebalance_and_lose(self, barrier: bool, committed: bool) -> None:
        self.revoke(self.owner, barrier, committed)
        self.owner = Process()
        self.assign(self.owner)

    @rule()
    def kill(self) -> None:
        self.owner = Process()
        self.assign(self.owner)

    @precondition(lambda self: self.frozen is None)
    @rule()
    def freeze(self) -> None:
        """The owner stops for longer than its session; another takes over. Its lease keeps it from ending anything."""
        self.frozen, self.owner = self.owner, Process()
        self.assign(self.owner)

    @precondition(lambda self: self.frozen is not None)
    @rule(alone=st.booleans())
    def wake(self, alone: bool) -> None:
        """It rejoins. Alone in an empty group its last commit is taken, so it must not lower what the other wrote."""
        assert self.frozen is not None
        former, self.owner, self.frozen = self.owner, self.frozen, None
        if alone:
            self.revoke(former, True, True)
            self.revoke(self.owner, False, True)
        self.assign(self.owner)

    # how the group does it

    def report(self, place: Place) -> None:
        if not self.owner.leased:
            self.commit()
        ticket = self.owner.running[place]
        if any(told.place == place for told, _ in self.owner.reports):
            return
        assert place not in self.ended or place.offset < self.begin[place[:2]], "ended twice"
        self.ended.add(place)
        log = self.status[place.partition]
        log.append(place)
        self.owner.reports.append((ticket, len(log) - 1))

    def revoke(self, process: Process, barrier: bool, committed: bool) -> None:
        if barrier and process is self.owner:
            self.hear()
        if not committed:
            return
        self.write(
            {
                key: commit
                for key, commit in process.book.commits(clean=True).items()
                if process.book.known(key, there := self.store[key])
                and (there is None or there.offset <= commit.offset)
            },
            process,
        )

    def assign(self, process: Process) -> None:
        process.leased = False
        book = process.book
        foreign = [key for key in book.keys if not book.known(key, self.store[key])]
        book.drop(foreign)
        for place in [p for p in process.running if p[:2] in foreign]:
            del process.running[place]
        for key in KEYS:
            if key not in book.keys:
                book.take(key, self.store[key], self.begin[key], self.end[key])
        for number, start in book.unsettled().items():
            log = self.status[number]
            for offset in range(start, len(log)):
                book.settle(log[offset], offset)
            book.settled(number, len(log))
        process.cursor = {key: book.position(key) for key in KEYS}

    def write(self, commits: dict[Key, Commit], process: Process) -> None:
        for key, commit in commits.items():
            before = self.store[key]
            assert before is None or commit.offset >= before.offset, "lowered"
            assert len(commit.metadata) <= LIMIT
            told = decode(commit)
            assert told.writer == process.book.writer
            assert told.next >= told.watermark
            for offset in range(self.end[key]):
                if Place(*key, offset) not in self.ended:
                    assert offset >= told.watermark, "committed past an unfinished record"
                    assert offset >= told.next or offset in told.unfinished, "forgot an unfinished record"
            self.store[key] = commit
        process.book.stored(commits)

    @invariant()
    def bounded(self) -> None:
        for standing in self.owner.book.standings().values():
            assert standing.live <= HIGH

    def teardown(self) -> None:
        while True:
            for key in KEYS:
                self.read(key, 5)
            for place in sorted(self.owner.running):
                self.report(place)
            self.hear()
            if all(max(self.owner.cursor[key], self.begin[key]) >= self.end[key] for key in KEYS):
                break
            assert any(self.owner.book.readable(key) for key in KEYS), "stuck"
        self.write(self.owner.book.commits(), self.owner)
        for key in KEYS:
            commit = self.store[key]
            assert commit is not None
            assert commit.offset == self.end[key] or self.begin[key] == self.end[key]
            for offset in range(self.end[key]):
                assert Place(*key, offset) in self.ended, "lost"
        assert not self.owner.running


TestWorld = World.TestCase
TestWorld.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
