"""The book: tickets, back-pressure, start counts, settling, and what it commits."""

from __future__ import annotations

from service.job import Place, Ticket
from service.ledger import Book, Commit
from service.ledger.metadata import decode
from service.settings import EngineSettings, LedgerSettings, Settings

KEY = ("jobs", 3)
SIBLING = ("other", 3)


def book(high: int = 10, max_span: int = 100, stored: Commit | None = None, begin: int = 0, end: int = 10**9) -> Book:
    out = Book(high=high, max_span=max_span)
    out.take(KEY, stored, begin, end)
    out.settled(3, 0)
    return out


def read(book: Book, offset: int, key: tuple[str, int] = KEY) -> Ticket:
    ticket = book.register(Place(*key, offset))
    assert ticket is not None
    return ticket


def reborn(former: Book, *, clean: bool = False, high: int = 10) -> Book:
    """Another process takes the partition over from what the former one committed."""
    return book(high=high, stored=former.commits(clean=clean)[KEY])


def test_a_record_is_new_once() -> None:
    b = book()
    ticket = read(b, 0)
    assert b.register(ticket.place) is None
    assert b.owns(ticket)
    assert b.complete(ticket)
    assert not b.owns(ticket)
    assert not b.complete(ticket)
    assert b.register(ticket.place) is None


def test_a_record_of_a_foreign_partition_is_not_taken() -> None:
    assert book().register(Place("jobs", 4, 0)) is None


def test_the_watermark_waits_for_the_oldest_and_finished_ones_above_do_not_run_again() -> None:
    b = book()
    tickets = [read(b, n) for n in range(5)]
    for n in (1, 3):
        b.complete(tickets[n])
    assert b.standings()[KEY].watermark == 0
    after = reborn(b)
    assert after.position(KEY) == 0
    assert [n for n in range(7) if after.register(Place(*KEY, n)) is not None] == [0, 2, 4, 5, 6]


def test_work_of_a_former_assignment_completes_nothing() -> None:
    b = book()
    old = read(b, 0)
    b.take(KEY, None, 0, 100)
    b.settled(3, 0)
    new = read(b, 0)
    assert not b.owns(old)
    assert not b.complete(old, 5)
    assert b.owns(new)
    assert b.standings()[KEY].watermark == 0


def test_a_partition_pauses_at_high_and_goes_on_at_half() -> None:
    seen: list[tuple[tuple[str, int], bool]] = []
    b = book(high=4)
    b.on_pressure = lambda key, paused: seen.append((key, paused))
    tickets = [read(b, n) for n in range(4)]
    assert seen == [(KEY, True)]
    assert not b.readable(KEY)
    b.complete(tickets[3])
    assert seen == [(KEY, True)]
    b.complete(tickets[2])
    assert seen == [(KEY, True), (KEY, False)]
    assert b.readable(KEY)


def test_a_partition_that_nothing_is_moved_away_from_goes_on_as_soon_as_an_eighth_is_free() -> None:
    """Else whoever lies behind slow jobs that hold more than half of it waits for them."""
    seen: list[bool] = []
    b = Book(high=16, max_span=100, unrelieved=(KEY[0],), on_pressure=lambda key, paused: seen.append(paused))
    b.take(KEY, None, 0, 10**9)
    b.settled(3, 0)
    tickets = [read(b, n) for n in range(16)]
    assert seen == [True]
    b.complete(tickets[0])
    assert seen == [True]
    b.complete(tickets[1])
    assert seen == [True, False]


def test_a_small_engine_holds_enough_records_to_fetch_ahead() -> None:
    assert Book.of(Settings(engine=EngineSettings(max_num_seqs=8))).high == 128
    assert Book.of(Settings(engine=EngineSettings(max_num_seqs=256))).high == 512
    assert Book.of(Settings(engine=EngineSettings(max_num_seqs=1000))).high == 900
    assert Book.of(Settings(ledger=LedgerSettings(max_unfinished=16))).high == 16


def test_one_slow_record_pauses_its_partition_at_the_span() -> None:
    b = book(high=1000, max_span=10)
    slow = read(b, 0)
    for n in range(1, 10):
        b.complete(read(b, n))
    assert not b.readable(KEY)
    b.complete(slow)
    assert b.readable(KEY)


def test_unfinished_records_of_a_former_owner_do_not_hold_up_their_own_reading() -> None:
    former = book(high=100, max_span=50)
    tickets = [read(former, n) for n in range(50)]
    for ticket in tickets[1:49]:
        former.complete(ticket)
    b = Book(high=2, max_span=50)
    b.take(KEY, former.commits()[KEY], 0, 100)
    b.settled(3, 0)
    read(b, 0)
    assert b.readable(KEY)
    read(b, 49)
    assert not b.readable(KEY)


def test_records_that_are_gone_from_the_log_do_not_hold_the_watermark() -> None:
    former = book()
    for n in range(3):
        read(former, n)
    b = reborn(former)
    read(b, 2)
    assert b.standings()[KEY].watermark == 2
    b = reborn(former)
    read(b, 7)
    assert b.standings()[KEY].watermark == 7


def test_an_unclean_end_after_a_committed_start_counts() -> None:
    first = book()
    first.start(read(first, 0))
    read(first, 1)
    second = reborn(first)
    again, idle = read(second, 0), read(second, 1)
    assert (second.starts(again), second.starts(idle)) == (1, 0)
    second.start(again)
    third = reborn(second)
    assert third.starts(read(third, 0)) == 2


def test_a_clean_end_does_not_count() -> None:
    first = book()
    first.start(read(first, 0))
    second = reborn(first, clean=True)
    ticket = read(second, 0)
    assert second.starts(ticket) == 0
    assert not second.careful(ticket)
    assert not second.is_careful(KEY)


def test_a_death_of_the_engine_counts_and_a_second_start_does_not() -> None:
    b = book()
    ticket = read(b, 0)
    b.start(ticket)
    b.start(ticket)
    assert b.starts(ticket) == 0
    b.crashed(ticket)
    assert b.starts(ticket) == 1
    assert reborn(b, clean=True).starts(ticket) == 0  # another epoch
    after = reborn(b, clean=True)
    assert after.starts(read(after, 0)) == 1


def test_after_an_unclean_end_everything_that_may_have_been_running_is_careful() -> None:
    """Also records read after the last commit: at most `high` of them, none above the newest finished one + high."""
    former = book(high=10)
    for n in range(3):
        read(former, n)
    b = Book(high=10, max_span=100)
    b.take(KEY, former.commits()[KEY], 0, 100)
    b.settle(Place(*KEY, 5), 0)
    b.settled(3, 1)
    assert b.is_careful(KEY)
    careful = [n for n in range(20) if (t := b.register(Place(*KEY, n))) is not None and b.careful(t)]
    assert careful == [n for n in range(16) if n != 5]


def test_status_records_settle_what_ended_without_being_committed() -> None:
    former = book()
    for n in range(3):
        read(former, n)
    b = Book(high=10, max_span=100)
    b.take(KEY, former.commits()[KEY], 0, 100)
    assert b.unsettled() == {3: 0}
    assert b.settle(Place(*KEY, 1), 40)  # known unfinished
    assert b.settle(Place(*KEY, 4), 41)  # read after the last commit
    assert not b.settle(Place("elsewhere", 3, 0), 42)
    b.settled(3, 43)
    assert b.unsettled() == {}
    # Offset 4 was not read again yet: only its status record knows that it ended.
    assert decode(b.commits()[KEY]).status_next == 41
    assert [n for n in range(6) if b.register(Place(*KEY, n)) is not None] == [0, 2, 3, 5]
    assert decode(b.commits()[KEY]).status_next == 43


def test_a_settled_record_that_is_gone_from_the_log_does_not_hold_the_status_offset() -> None:
    b = Book(high=10, max_span=100)
    b.take(KEY, None, 0, 100)
    b.settle(Place(*KEY, 4), 41)
    b.settled(3, 43)
    read(b, 9)
    assert decode(b.commits()[KEY]).status_next == 43


def test_a_completion_moves_the_status_offset_of_the_whole_number_but_not_of_what_is_not_settled() -> None:
    b = book()
    b.take(SIBLING, None, 0, 100)
    ticket = read(b, 0)
    b.complete(ticket, 7)
    told = {key: decode(commit).status_next for key, commit in b.commits().items()}
    assert told == {KEY: 8, SIBLING: 0}
    b.settled(3, 8)
    b.complete(read(b, 1), 9)
    told = {key: decode(commit).status_next for key, commit in b.commits().items()}
    assert told == {KEY: 10, SIBLING: 10}


def test_own_commits_are_known_and_foreign_ones_are_not() -> None:
    b = book()
    assert b.known(KEY, None)
    ours = b.commits()[KEY]
    assert b.known(KEY, ours)
    assert not b.known(KEY, book().commits()[KEY])
    assert not b.known(KEY, Commit(0, ""))
    b.stored({KEY: ours})
    assert not b.known(KEY, None)


def test_what_was_taken_over_is_known_until_it_is_overwritten() -> None:
    former = book().commits()[KEY]
    b = book(stored=former)
    assert b.known(KEY, former)
    b.stored(b.commits())
    assert not b.known(KEY, former)


def test_an_offset_is_never_lowered() -> None:
    b = book(stored=Commit(50, ""), end=100)
    b.stored({KEY: Commit(60, "")})
    assert b.commits() == {}


def test_another_log_under_the_same_name_is_read_from_its_beginning() -> None:
    b = book(stored=Commit(5_000, ""), begin=0, end=10)
    assert b.position(KEY) == 0
    assert b.commits()[KEY].offset == 0
    read(b, 0)


def test_what_a_transaction_took_back_is_not_waited_for() -> None:
    """Offsets 2 and 3 are an aborted record and its marker, and nothing comes after them."""
    found = book(end=4)
    assert [found.complete(read(found, offset)) for offset in (0, 1)] == [True, True]
    assert found.commits()[KEY].offset == 2
    found.positions = lambda: {KEY: 4, ("of another", 3): 9}
    assert found.commits()[KEY].offset == 4
    assert decode(found.commits()[KEY]).next == 4
    assert found.register(Place(*KEY, 4)) is not None


def test_a_running_record_is_waited_for_however_far_reading_has_come() -> None:
    found = book()
    ticket = read(found, 0)
    found.positions = lambda: {KEY: 3}
    told = decode(found.commits()[KEY])
    assert (told.watermark, told.next, [*told.unfinished]) == (0, 3, [0])
    assert found.complete(ticket)
    assert found.commits()[KEY].offset == 3


def test_nothing_is_passed_over_before_the_status_topic_was_read() -> None:
    former = book()
    read(former, 0)
    found = Book(high=10, max_span=100)
    found.take(KEY, former.commits()[KEY], 0, 10)
    found.positions = lambda: {KEY: 5}
    assert [*decode(found.commits()[KEY]).unfinished] == [0]
    found.settled(KEY[1], 0)
    assert found.commits()[KEY].offset == 5  # it was not there any more


def test_a_status_record_older_than_the_record_tells_of_another_topic_of_that_name() -> None:
    found = Book(high=10, max_span=100)
    found.take(KEY, None, 0, 10)
    for offset in (0, 1):
        assert found.settle(Place(*KEY, offset), offset, 1_000)
    found.settled(KEY[1], 2)
    assert found.register(Place(*KEY, 0), 1_001) is not None
    assert found.register(Place(*KEY, 1), 1_000) is None
