"""Records kept aside until they are due, against a model of the world as in test_ledger_model.py.

Held after every step, however small the broker's limit for metadata is:

* a commit never passes an unfinished record, nor forgets one; it has no more characters than allowed, and reads back
* what has ended is never handed out again, whoever owns the partition next
* records kept aside never stop reading, up to their own bound
"""

from __future__ import annotations

import time
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from service.job import Place, Ticket
from service.ledger import Book, Commit, Snapshot
from service.ledger.book import MIN_LIMIT
from service.ledger.metadata import HEADER, LIMIT, decode, encode, pack_runs
from service.ledger.timed import Runs, TimedLedger

KEY = ("d", 0)
SIBLING = ("j", 0)  # an ordinary topic of the same number: its ends move the status offset too
HIGH, SPAN, MOST = 3, 6, 8


class Process:
    def __init__(self, limit: int) -> None:
        self.book = Book(high=HIGH, max_span=SPAN, timed=[KEY[0]], max_timed=MOST)
        self.book.limit = limit
        self.cursor = {KEY: 0, SIBLING: 0}
        self.running: dict[Place, Ticket] = {}
        self.timed: dict[Place, Ticket] = {}
        self.reports: deque[tuple[Ticket, int]] = deque()
        self.leased = False


class World(RuleBasedStateMachine):
    @initialize(limit=st.sampled_from([HEADER, HEADER + 1, HEADER + 3, MIN_LIMIT, LIMIT]))
    def first(self, limit: int) -> None:
        self.limit = limit
        self.end = {KEY: 0, SIBLING: 0}
        self.store: dict[tuple[str, int], Commit | None] = {KEY: None, SIBLING: None}
        self.status: list[Place] = []
        self.ended: set[Place] = set()
        self.started: set[Place] = set()
        self.owner = Process(limit)
        self.assign()

    @rule(key=st.sampled_from([KEY, KEY, SIBLING]), count=st.integers(1, 8))
    def publish(self, key: tuple[str, int], count: int) -> None:
        self.end[key] += count

    @rule(key=st.sampled_from([KEY, KEY, SIBLING]), count=st.integers(1, 8), aside=st.integers(0, 255))
    def read(self, key: tuple[str, int], count: int, aside: int) -> None:
        owner = self.owner
        for n in range(count):
            if not owner.book.readable(key):
                return
            offset = owner.cursor[key]
            if offset >= self.end[key]:
                return
            owner.cursor[key] = offset + 1
            place = Place(*key, offset)
            ticket = owner.book.register(place)
            if ticket is None:
                continue
            assert place not in owner.running and place not in owner.timed, "two live copies"
            assert place not in self.ended, "ended, and handed out again"
            if aside >> n & 1 and owner.book.time(ticket):
                assert key == KEY and place not in self.started
                owner.timed[place] = ticket
            else:
                owner.running[place] = ticket

    @precondition(lambda self: self.owner.timed)
    @rule(data=st.data())
    def fall_due(self, data: st.DataObject) -> None:
        if not self.owner.book.room(KEY):
            return
        place = data.draw(st.sampled_from(sorted(self.owner.timed)))
        ticket = self.owner.timed.pop(place)
        assert self.owner.book.due(ticket)
        assert not self.owner.book.due(ticket)
        self.owner.running[place] = ticket

    @precondition(lambda self: self.owner.running)
    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        place = data.draw(st.sampled_from(sorted(self.owner.running)))
        self.owner.book.start(self.owner.running[place])

    @precondition(lambda self: self.owner.running)
    @rule(data=st.data(), heard=st.booleans())
    def finish(self, data: st.DataObject, heard: bool) -> None:
        place = data.draw(st.sampled_from(sorted(self.owner.running)))
        if place[:2] == SIBLING:  # in order: an ordinary ledger needs its metadata for all else
            place = min(running for running in self.owner.running if running[:2] == SIBLING)
        self.report(place)
        if heard:
            self.hear()

    @rule()
    def hear(self) -> None:
        while self.owner.reports:
            ticket, status_offset = self.owner.reports.popleft()
            assert self.owner.book.complete(ticket, status_offset)
            del self.owner.running[ticket.place]

    @rule()
    def commit(self) -> None:
        self.write(self.owner.book.commits())
        self.owner.leased = True

    @rule()
    def leave(self) -> None:
        """A clean stop."""
        self.hear()
        self.write(self.owner.book.commits(clean=True))
        self.owner = Process(self.limit)
        self.assign()

    @rule()
    def kill(self) -> None:
        self.owner = Process(self.limit)
        self.assign()

    def report(self, place: Place) -> None:
        if not self.owner.leased:
            self.commit()
        ticket = self.owner.running[place]
        if any(told.place == place for told, _ in self.owner.reports):
            return
        assert place not in self.ended, "ended twice"
        self.ended.add(place)
        self.status.append(place)
        self.owner.reports.append((ticket, len(self.status) - 1))

    def assign(self) -> None:
        book = self.owner.book
        for key in (KEY, SIBLING):
            book.take(key, self.store[key], 0, self.end[key])
        for number, start in book.unsettled().items():
            for offset in range(start, len(self.status)):
                book.settle(self.status[offset], offset)
            book.settled(number, len(self.status))
        self.owner.cursor = {key: book.position(key) for key in (KEY, SIBLING)}

    def write(self, commits: dict[tuple[str, int], Commit]) -> None:
        for key, commit in commits.items():
            before = self.store[key]
            assert before is None or commit.offset >= before.offset, "lowered"
            assert len(commit.metadata) <= self.limit
            told = decode(commit)
            assert told.writer == self.owner.book.writer, "unreadable"
            for offset in range(self.end[key]):
                place = Place(*key, offset)
                if place not in self.ended:
                    assert offset >= told.watermark, "committed past an unfinished record"
                    assert offset >= told.next or offset in told.unfinished, "forgot an unfinished record"
            self.store[key] = commit
        self.owner.book.stored(commits)

    @invariant()
    def bounded(self) -> None:
        owner = self.owner
        assert sum(place[:2] == KEY for place in owner.running) <= HIGH
        assert len(owner.timed) <= MOST
        if not owner.reports and len(owner.timed) < MOST // 2 and sum(p[:2] == KEY for p in owner.running) < HIGH // 2:
            assert owner.book.readable(KEY), "stopped for no reason"

    def teardown(self) -> None:
        if not hasattr(self, "owner"):
            return
        for _ in range(200):
            self.read(KEY, 8, 0b1010)
            self.read(SIBLING, 8, 0)
            for place in sorted(self.owner.timed):
                if self.owner.book.room(KEY):
                    ticket = self.owner.timed.pop(place)
                    assert self.owner.book.due(ticket)
                    self.owner.running[place] = ticket
            for place in sorted(self.owner.running):
                self.report(place)
            self.hear()
            if not self.owner.timed and all(self.owner.cursor[key] >= self.end[key] for key in (KEY, SIBLING)):
                break
        self.write(self.owner.book.commits())
        assert all(Place(*key, offset) in self.ended for key in self.end for offset in range(self.end[key])), "lost"
        for key in (KEY, SIBLING):
            stored = self.store[key]
            assert stored is not None and stored.offset == self.end[key]


TestWorld = World.TestCase
TestWorld.settings = settings(max_examples=200, stateful_step_count=60, deadline=None)


@given(st.lists(st.integers(0, 40), unique=True), st.lists(st.integers(0, 40)))
def test_runs_are_a_set(added: list[int], taken: list[int]) -> None:
    runs, model = Runs(), set()
    for offset in added:
        runs.add(offset)
        model.add(offset)
    for offset in taken:
        assert runs.discard(offset) == (offset in model)
        model.discard(offset)
    assert len(runs) == len(model)
    assert {offset for first, length, _ in runs for offset in range(first, first + length)} == model
    assert all((offset in runs) == (offset in model) for offset in range(42))
    assert runs.first == min(model, default=None)


@given(st.dictionaries(st.integers(100, 160), st.integers(0, 3)), st.integers(0, 40), st.booleans())
def test_runs_read_back_as_far_as_there_was_room(entries: dict[int, int], room: int, clean: bool) -> None:
    runs = [(offset, 1, starts) for offset, starts in sorted(entries.items())]
    packed, following = pack_runs(100, 200, runs, room)
    assert len(packed) <= room
    snapshot = decode(Commit(100, encode(100, following, 7, packed, clean=clean, runs=True, writer=5)))
    kept = {offset: starts for offset, starts in entries.items() if offset < following}
    assert snapshot == Snapshot(100, following, 7, clean, 5, kept)


def ledger_of(count: int) -> TimedLedger:
    ledger = TimedLedger(Snapshot.plain(0), 1, high=900, max_span=32_768)
    for offset in range(count):
        ledger.register(offset)
        assert ledger.time(offset)
    return ledger


def test_a_hundred_thousand_timed_records_fit_into_one_commit_and_stop_nothing_but_the_next() -> None:
    ledger = ledger_of(99_999)
    assert not ledger.must_pause()
    ledger.register(99_999)
    ledger.time(99_999)
    assert ledger.must_pause()
    since = time.perf_counter()
    commit = ledger.commit(clean=False, writer=1)
    assert time.perf_counter() - since < 0.05, "the event loop stood still"
    assert len(commit.metadata) < 40
    told = decode(commit)
    assert (told.watermark, told.next, len(told.unfinished)) == (0, 100_000, 100_000)


def taken_up_again(count: int) -> float:
    """Seconds for reading so many timed records once more after a restart."""
    told = decode(ledger_of(count).commit(clean=True, writer=1))
    again = TimedLedger(told, 2, high=900, max_span=32_768)
    since = time.process_time()
    for offset in range(count):
        assert again.register(offset) and again.time(offset)
    spent = time.process_time() - since
    assert again.live == count and not again.must_pause()
    return spent


def test_timed_records_are_taken_up_again_in_time_proportional_to_their_number() -> None:
    few, many = min(taken_up_again(10_000) for _ in range(3)), min(taken_up_again(80_000) for _ in range(3))
    assert many / few < 24, "quadratic"  # 8 if it is proportional, 64 if it is quadratic


ROOM_FOR_NOTHING = HEADER


def after_a_restart(book: Book, status: list[Place], end: int) -> list[int]:
    """Offsets that the next owner hands out, when the commit has no room for what is unfinished."""
    book.limit = ROOM_FOR_NOTHING
    stored = book.commits()[KEY]
    assert decode(stored).next == stored.offset, "the test wants a commit that is cut short"
    following = Book(high=9, max_span=99, timed=[KEY[0]])
    following.take(KEY, stored, 0, end)
    for number, start in following.unsettled().items():
        for offset in range(start, len(status)):
            following.settle(status[offset], offset)
        following.settled(number, len(status))
    return [n for n in range(following.position(KEY), end) if following.register(Place(*KEY, n)) is not None]


def opened(stored: Commit | None = None, status: list[Place] | None = None, end: int = 4) -> Book:
    book = Book(high=9, max_span=99, timed=[KEY[0]])
    book.take(KEY, stored, 0, end)
    for offset, place in enumerate(status or ()):
        book.settle(place, offset)
    book.settled(0, len(status or ()))
    return book


def test_what_ended_behind_the_cut_of_a_commit_does_not_run_again() -> None:
    book = opened()
    tickets = [book.register(Place(*KEY, n)) for n in range(4)]
    assert tickets[0] is not None and tickets[2] is not None
    book.time(tickets[0])
    book.complete(tickets[2], 0)
    assert after_a_restart(book, [Place(*KEY, 2)], 4) == [0, 1, 3]


def test_what_was_settled_behind_the_cut_does_not_run_again() -> None:
    told = Commit(0, encode(0, 3, 0, pack_runs(0, 3, [(0, 3, 0)], 99)[0], runs=True))
    book = opened(told, [Place(*KEY, 1)])
    for n in range(4):
        book.register(Place(*KEY, n))
    assert after_a_restart(book, [Place(*KEY, 1)], 4) == [0, 2, 3]


def test_what_a_former_owner_finished_does_not_run_again_when_the_commit_is_cut_shorter() -> None:
    status = [Place(*KEY, 1), Place(*SIBLING, 0)]
    told = Commit(0, encode(0, 4, 2, pack_runs(0, 4, [(0, 1, 0), (2, 2, 0)], 99)[0], runs=True))
    book = Book(high=9, max_span=99, timed=[KEY[0]])
    book.take(KEY, told, 0, 4)
    assert book.unsettled() == {0: 2}, "all that the status topic says was told before"
    book.settled(0, 2)
    for n in (0, 2, 3):
        assert book.register(Place(*KEY, n)) is not None
    assert after_a_restart(book, status, 4) == [0, 2, 3]


def test_what_had_ended_ahead_of_reading_does_not_run_again_behind_the_cut() -> None:
    book = opened(None, [Place(*KEY, 2)])
    for n in range(4):
        book.register(Place(*KEY, n))
    assert after_a_restart(book, [Place(*KEY, 2)], 4) == [0, 1, 3]


def test_reading_follows_what_is_kept_aside_and_what_falls_due() -> None:
    told: list[bool] = []
    book = Book(high=2, max_span=99, timed=[KEY[0]], on_pressure=lambda key, paused: told.append(paused))
    book.take(KEY, None, 0, 9)
    book.settled(0, 0)
    tickets = [book.register(Place(*KEY, n)) for n in range(2)]
    assert told == [True]
    for ticket in tickets:
        assert ticket is not None and book.time(ticket)
    assert told == [True, False], "records kept aside still stop reading"
    for ticket in tickets:
        assert ticket is not None and book.due(ticket)
    assert told == [True, False, True], "a crowd that fell due does not stop reading"


def test_a_record_that_was_started_is_not_kept_aside() -> None:
    ledger = TimedLedger(Snapshot(0, 2, unfinished={0: 1, 1: 0}), 1, high=9, max_span=99)
    ledger.register(0)
    ledger.register(1)
    assert not ledger.time(0), "it was started before: it must not wait unseen"
    ledger.start(1)
    assert not ledger.time(1)


def test_a_topic_without_timed_records_keeps_none_aside() -> None:
    book = Book(high=9, max_span=99, timed=["d"])
    book.take(("j", 0), None, 0, 5)
    book.settled(0, 0)
    ticket = book.register(Place("j", 0, 0))
    assert ticket is not None and not book.time(ticket) and not book.due(ticket)
    assert book.room(("j", 0)) == 0 and book.room(("nobody", 1)) == 0


@pytest.mark.parametrize("starts", [0, 1])
def test_an_unclean_end_is_careful_with_all_that_may_have_run(starts: int) -> None:
    ledger = TimedLedger(Snapshot(0, 9, unfinished={4: starts}), 1, high=3, max_span=9, max_timed=10)
    assert ledger.careful(9 + 12) and not ledger.careful(9 + 13)
