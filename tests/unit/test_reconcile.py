"""Verdicts from the logs, against a model of them: worlds of jobs whose fate is known."""

from __future__ import annotations

from collections import Counter
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas import names
from schemas.records import status_key
from service.job import Place
from service.ledger import Snapshot
from service.places import OFFSET_BITS, Places, origin_of, read_job
from service.reconcile import Letters, Reconciliation
from service.verdicts import LISTED, Facts, Finding, Report, Verdict, judge

POOL = "p"
JOBS = names.jobs_topic(POOL, "standard")
DEFERRED = names.deferred_topic(POOL)
REPLIES = "acme.replies"
NUMBERS, REPLY_PARTITIONS = 2, 3
OK, RUNNING, LOST, DOUBLED = Verdict.OK, Verdict.RUNNING, Verdict.LOST, Verdict.DOUBLED
SUPPRESSED, DEAD, UNVERIFIABLE = Verdict.SUPPRESSED, Verdict.DEAD_LETTERED, Verdict.UNVERIFIABLE


class Log:
    """Partitions of one topic; a record is (key, value, headers)."""

    def __init__(self, topic: str) -> None:
        self.topic = topic
        self.partitions: dict[int, list[tuple[bytes | None, bytes | None, list[tuple[str, bytes | None]]]]] = {}
        self.unfinished: set[Place] = set()

    def put(
        self,
        number: int,
        value: Any = None,
        *,
        key: bytes | None = None,
        headers: list[tuple[str, bytes | None]] | None = None,
        finished: bool = True,
    ) -> Place:
        log = self.partitions.setdefault(number, [])
        raw = value if value is None or isinstance(value, bytes) else orjson.dumps(value)
        log.append((key, raw, headers or []))
        place = Place(self.topic, number, len(log) - 1)
        if not finished:
            self.unfinished.add(place)
        return place

    def snapshot(self, number: int) -> Snapshot:
        end = len(self.partitions.get(number, []))
        unfinished = {place.offset: 0 for place in sorted(self.unfinished) if place.partition == number}
        return Snapshot(next(iter(unfinished), end), end, unfinished=unfinished)


class World:
    """What jobs left on the logs, and the verdict that each of them deserves."""

    def __init__(self) -> None:
        self.jobs, self.deferred = Log(JOBS), Log(DEFERRED)
        self.status, self.replies = Log(names.status_topic(POOL)), Log(REPLIES)
        self.letters = Letters()
        self.expired: dict[int, int] = {}  # reply partition → first offset that is still there
        self.expected: dict[Place, Verdict] = {}
        self.ids = 0

    # what the service writes

    def publish(self, n: int, *, id: str = "", run: int = 0, finished: bool = True, **fields: Any) -> tuple[Place, str]:
        self.ids += not id
        id = id or f"j{self.ids}"
        job = {"id": id, "tenant": "acme", "run": run, "reply": {"topic": REPLIES}, **fields}
        return self.jobs.put(n % NUMBERS, job, finished=finished), id

    def terminal(self, id: str, partition: int, *, run: int = 0, seq: int = 2, **more: Any) -> Place:
        kind = more.pop("type", "completed")
        event = {"type": kind, "tenant": "acme", "job_id": id, "run": run, "seq": seq, "attempt": "A", **more}
        return self.replies.put(partition, event, key=id.encode(), headers=[(names.H_TYPE, kind.encode())])

    def noise(self, id: str, partition: int) -> Place:
        event = {"type": "chunk", "tenant": "acme", "job_id": id, "run": 0, "seq": 1}
        return self.replies.put(partition, event, key=id.encode(), headers=[(names.H_TYPE, b"chunk")])

    def ended(
        self,
        origin: Place,
        id: str,
        terminal: Place | None,
        *,
        run: int = 0,
        kind: str = "completed",
        repeat: bool = False,
    ) -> None:
        value = {"kind": kind, "origin": str(origin), "tenant": "acme" if id else "", "job_id": id, "run": run}
        value["terminal"] = terminal._asdict() if terminal is not None else None
        value["repeat"] = repeat
        key = str(origin).encode() if repeat or not id else status_key("acme", id, run)
        self.status.put(origin.partition, value, key=key)

    def bury(self, origin: Place) -> None:
        self.letters.take([("x", None), (names.H_ORIGIN, str(origin).encode())])

    # what may become of a job; `n` varies partitions

    def well(self, n: int, run: int = 0, id: str = "") -> tuple[Place, str]:
        origin, id = self.publish(n, id=id, run=run)
        self.noise(id, n % REPLY_PARTITIONS)
        self.ended(origin, id, self.terminal(id, n % REPLY_PARTITIONS, run=run), run=run)
        self.expected[origin] = OK
        return origin, id

    def well_and_uncommitted(self, n: int) -> None:
        origin, _ = self.well(n)
        self.jobs.unfinished.add(origin)

    def replayed(self, n: int) -> None:
        _, id = self.well(n)
        self.well(n, run=1, id=id)

    def waits(self, n: int) -> None:
        self.expected[self.publish(n, finished=False)[0]] = RUNNING

    def cut_off_before_its_status(self, n: int) -> None:
        origin, id = self.publish(n, finished=False)
        self.terminal(id, n % REPLY_PARTITIONS)
        self.expected[origin] = RUNNING

    def vanishes(self, n: int) -> None:
        self.expected[self.publish(n)[0]] = LOST

    def vanishes_without_id(self, n: int) -> None:
        self.expected[self.jobs.put(n % NUMBERS, b"no json")] = LOST

    def loses_its_terminal(self, n: int) -> None:
        origin, id = self.publish(n)
        self.ended(origin, id, self.noise(id, n % REPLY_PARTITIONS))
        self.expected[origin] = LOST

    def loses_its_status(self, n: int) -> None:
        origin, _ = self.well(n)
        self.status.partitions[origin.partition].pop()

    def ends_twice(self, n: int) -> None:
        origin, id = self.well(n)
        self.terminal(id, (n + 1) % REPLY_PARTITIONS)
        self.expected[origin] = DOUBLED

    def is_refused_twice(self, n: int) -> None:
        origin, id = self.publish(n)
        self.ended(origin, id, self.terminal(id, 0, seq=0, type="failed"), kind="failed")
        self.terminal(id, 1, seq=0, type="failed")
        self.expected[origin] = DOUBLED

    def ends_twice_while_running(self, n: int) -> None:
        origin, id = self.publish(n, finished=False)
        self.terminal(id, 0)
        self.terminal(id, 1)
        self.expected[origin] = DOUBLED

    def ends_twice_in_one_partition(self, n: int) -> None:
        origin, id = self.well(n)
        again = self.terminal(id, n % REPLY_PARTITIONS)
        self.ended(origin, id, again)
        self.expected[origin] = SUPPRESSED

    def is_refused(self, n: int) -> None:
        origin, id = self.publish(n)
        self.ended(origin, id, self.terminal(id, n % REPLY_PARTITIONS, seq=0, type="failed"), kind="failed")
        self.expected[origin] = OK

    def dies(self, n: int) -> None:
        origin = self.jobs.put(n % NUMBERS, b'{"tenant": "acme"}')
        self.bury(origin)
        self.ended(origin, "", None, kind="dead")
        self.expected[origin] = DEAD

    def dies_without_status(self, n: int) -> None:
        origin = self.jobs.put(n % NUMBERS, None)
        self.bury(origin)
        self.expected[origin] = DEAD

    def dies_with_an_id(self, n: int) -> None:
        origin, _ = self.publish(n)
        self.bury(origin)
        self.ended(origin, "", None, kind="dead")
        self.expected[origin] = DEAD

    def cannot_be_delivered(self, n: int) -> None:
        origin, id = self.publish(n)
        self.bury(origin)
        self.ended(origin, id, None, kind="undeliverable")
        self.expected[origin] = DEAD

    def dies_and_leaves_no_letter(self, n: int) -> None:
        origin, _ = self.publish(n)
        self.ended(origin, "", None, kind="dead")
        self.expected[origin] = LOST

    def fails_with_a_letter(self, n: int) -> None:
        origin, id = self.publish(n)
        self.bury(origin)
        self.ended(origin, id, self.terminal(id, 0, type="failed"), kind="failed")
        self.expected[origin] = OK

    def comes_again_and_is_answered_again(self, n: int) -> None:
        _, id = self.well(n)
        again, _ = self.publish(n, id=id)
        terminal = self.terminal(id, (n + 1) % REPLY_PARTITIONS, duplicate=True)
        self.ended(again, id, terminal, repeat=True)
        self.expected[again] = OK

    def comes_again_and_is_completed_silently(self, n: int) -> None:
        _, id = self.well(n)
        again, _ = self.publish(n + n // 2, id=id)
        self.expected[again] = OK

    def comes_again_with_other_content(self, n: int) -> None:
        again, id = self.publish(n)
        self.ended(again, id, self.terminal(id, 1, seq=0, type="failed"), kind="failed", repeat=True)
        self.expected[again] = OK
        origin, _ = self.publish(n, id=id)
        self.ended(origin, id, self.terminal(id, 0))
        self.expected[origin] = OK

    def comes_again_and_waits(self, n: int) -> None:
        _, id = self.well(n)
        again, _ = self.publish(n, id=id, finished=False)
        self.expected[again] = RUNNING

    def copies_end_twice(self, n: int) -> None:
        self.comes_again_and_is_completed_silently(n)
        silent, (origin, id) = next(reversed(self.expected)), (None, "")
        id = orjson.loads(self.jobs.partitions[silent.partition][silent.offset][1] or b"")["id"]
        origin = [place for place in self.expected if place != silent][-1]
        self.terminal(id, (n + 1) % REPLY_PARTITIONS)
        self.expected[origin] = DOUBLED

    def is_deferred(self, n: int, finished: bool = False) -> Place:
        origin, id = self.publish(n)
        headers: list[tuple[str, bytes | None]] = [(names.H_ORIGIN, str(origin).encode())]
        self.deferred.put(origin.partition, {"id": id, "tenant": "acme"}, headers=headers, finished=finished)
        self.expected[origin] = RUNNING
        return origin

    def is_deferred_and_ends(self, n: int) -> None:
        origin = self.is_deferred(n, finished=True)
        id = f"j{self.ids}"
        self.ended(origin, id, self.terminal(id, 0))
        self.expected[origin] = OK

    def is_deferred_and_vanishes(self, n: int) -> None:
        self.expected[self.is_deferred(n, finished=True)] = LOST

    def lies_on_deferred_from_the_start(self, n: int) -> None:
        origin = self.deferred.put(n % NUMBERS, {"id": f"d{len(self.expected)}", "tenant": "acme"}, finished=False)
        self.expected[origin] = RUNNING

    def goes_home(self, n: int, finished: bool = False) -> tuple[Place, Place, str]:
        """To the partition of its tenant's former spread."""
        origin, id = self.publish(n)
        headers: list[tuple[str, bytes | None]] = [(names.H_ORIGIN, str(origin).encode())]
        home = (origin.partition + 1) % NUMBERS
        place = self.deferred.put(home, {"id": id, "tenant": "acme"}, headers=headers, finished=finished)
        self.expected[origin] = RUNNING
        return origin, place, id

    def goes_home_and_ends(self, n: int, stated: bool = True) -> None:
        origin, place, id = self.goes_home(n, finished=True)
        terminal = self.terminal(id, 0) if stated else self.noise(id, 0)
        value = {"kind": "completed", "origin": str(origin), "place": str(place), "tenant": "acme", "job_id": id}
        self.status.put(place.partition, {**value, "run": 0, "terminal": terminal._asdict()}, key=id.encode())
        self.expected[origin] = OK if stated else LOST

    def goes_home_and_loses_its_terminal(self, n: int) -> None:
        self.goes_home_and_ends(n, stated=False)

    def goes_home_and_vanishes(self, n: int) -> None:
        self.expected[self.goes_home(n, finished=True)[0]] = LOST

    # what is made of it

    def reconcile(self, shares: int = 1) -> Report:
        commits = {
            (log.topic, number): log.snapshot(number) for log in (self.jobs, self.deferred) for number in range(NUMBERS)
        }
        whole = Report()
        for share in range(shares):
            part = Reconciliation(commits, self.letters, share=share, shares=shares)
            for number in range(NUMBERS):
                part.begin()
                for _, value, _ in self.status.partitions.get(number, []):
                    part.status(value)
                for offset, (_, value, headers) in enumerate(self.deferred.partitions.get(number, [])):
                    place = Place(DEFERRED, number, offset)
                    if not part.copy(place, origin_of(headers)):
                        part.job(place, value, 1)
                for offset, (_, value, _) in enumerate(self.jobs.partitions.get(number, [])):
                    part.job(Place(JOBS, number, offset), value, 1)
            for partition in range(REPLY_PARTITIONS):
                begin = self.expired.get(partition, 0)
                part.reach(REPLIES, partition, begin)
                for offset, (key, value, headers) in enumerate(self.replies.partitions.get(partition, [])):
                    if offset >= begin:
                        part.event(Place(REPLIES, partition, offset), key, value, headers)
            whole.add(part.report())
        return whole


FATES = [
    World.well,
    World.well_and_uncommitted,
    World.replayed,
    World.waits,
    World.cut_off_before_its_status,
    World.vanishes,
    World.vanishes_without_id,
    World.loses_its_terminal,
    World.loses_its_status,
    World.ends_twice,
    World.is_refused_twice,
    World.ends_twice_while_running,
    World.ends_twice_in_one_partition,
    World.is_refused,
    World.dies,
    World.dies_without_status,
    World.dies_with_an_id,
    World.cannot_be_delivered,
    World.dies_and_leaves_no_letter,
    World.fails_with_a_letter,
    World.comes_again_and_is_answered_again,
    World.comes_again_and_is_completed_silently,
    World.comes_again_with_other_content,
    World.comes_again_and_waits,
    World.copies_end_twice,
    World.is_deferred,
    World.is_deferred_and_ends,
    World.is_deferred_and_vanishes,
    World.lies_on_deferred_from_the_start,
    World.goes_home,
    World.goes_home_and_ends,
    World.goes_home_and_loses_its_terminal,
    World.goes_home_and_vanishes,
]


def check(world: World, report: Report) -> None:
    assert report.counts == Counter(world.expected.values())
    assert report.good == (not {LOST, DOUBLED} & set(world.expected.values()))
    for verdict in (LOST, DOUBLED, SUPPRESSED):
        found = {finding.origin for finding in report.findings.get(verdict, [])}
        assert found == {place for place, deserved in world.expected.items() if deserved is verdict}


@pytest.mark.parametrize("fate", FATES, ids=lambda fate: fate.__name__)
@pytest.mark.parametrize("n", [0, 1])
def test_each_fate_gets_its_verdict(fate: Any, n: int) -> None:
    world = World()
    world.well(0)
    fate(world, n)
    check(world, world.reconcile())


@settings(max_examples=300, deadline=None)
@given(fates=st.lists(st.tuples(st.sampled_from(FATES), st.integers(0, 5)), max_size=30), shares=st.integers(1, 5))
def test_any_mixture_gets_its_verdicts_whatever_the_number_of_shares(fates: list[Any], shares: int) -> None:
    world = World()
    for fate, n in fates:
        fate(world, n)
    check(world, world.reconcile(shares))


def test_an_answer_that_has_expired_is_not_called_lost() -> None:
    world = World()
    origin, _ = world.well(0)
    kept, _ = world.well(1)
    world.expired[0] = len(world.replies.partitions[0])
    world.expected[origin] = UNVERIFIABLE
    report = world.reconcile()
    assert report.counts == {OK: 1, UNVERIFIABLE: 1} and report.good
    assert world.expected[kept] is OK


def test_a_further_copy_is_answered_even_if_the_first_answer_has_expired() -> None:
    world = World()
    origin, id = world.well(0)
    again, _ = world.publish(0, id=id)
    world.expired[0] = len(world.replies.partitions[0])
    world.expected |= {origin: UNVERIFIABLE, again: OK}
    check(world, world.reconcile())


def test_a_reply_topic_that_cannot_be_read_leaves_its_jobs_unverifiable() -> None:
    part = Reconciliation({(JOBS, 0): Snapshot.plain(9)}, Letters())
    world = World()
    origin, id = world.publish(0)
    world.ended(origin, id, Place("secret.replies", 0, 5))
    part.begin()
    part.status(world.status.partitions[0][0][1])
    part.job(origin, world.jobs.partitions[0][0][1], 1)
    assert "secret.replies" in part.reply_topics
    assert part.lowest("secret.replies", 0) == 5
    assert part.report().counts == {UNVERIFIABLE: 1}


def test_without_the_status_of_its_time_a_job_is_not_called_lost() -> None:
    part = Reconciliation({(JOBS, 0): Snapshot.plain(9)}, Letters())
    part.begin()
    part.status_reaches(0, 1_000)
    part.job(Place(JOBS, 0, 0), b'{"id": "a", "tenant": "t"}', 999)
    part.job(Place(JOBS, 0, 1), b'{"id": "b", "tenant": "t"}', 1_000)
    report = part.report()
    assert report.counts == {UNVERIFIABLE: 1, LOST: 1}
    assert [finding.origin.offset for finding in report.findings[LOST]] == [1]


def test_what_a_group_never_committed_is_not_ended() -> None:
    part = Reconciliation({(JOBS, 0): None}, Letters())
    part.begin()
    part.job(Place(JOBS, 0, 0), b'{"id": "a", "tenant": "t"}', 1)
    assert part.report().counts == {RUNNING: 1}


@given(
    value=st.none() | st.binary(max_size=60) | st.sampled_from([b'{"origin": "a/b/c"}', b'{"kind": 1}', b"{}", b"[]"]),
    key=st.none() | st.binary(max_size=10),
)
def test_records_that_are_nothing_of_ours_do_no_harm(value: bytes | None, key: bytes | None) -> None:
    part = Reconciliation({}, Letters())
    part.begin()
    part.status(value)
    part.event(Place(REPLIES, 0, 0), key, value, [(names.H_TYPE, key), ("x", None)])
    part.event(Place(REPLIES, 0, 0), key, value, [])
    part.job(Place(JOBS, 0, 0), value, 1)
    assert part.report().jobs == 1


def test_findings_are_listed_up_to_a_bound_and_counted_beyond() -> None:
    report = Report()
    for _ in range(3):
        one = Report(Counter({LOST: LISTED}))
        one.findings[LOST] = [Finding(LOST, Place("t", 0, n), "why") for n in range(LISTED)]
        report.add(one)
    assert report.counts[LOST] == 3 * LISTED
    assert len(report.findings[LOST]) == LISTED


@given(st.text(min_size=1, max_size=5), st.integers(0, 2**20 - 1), st.integers(0, 2**OFFSET_BITS - 1))
def test_places_survive_packing(topic: str, partition: int, offset: int) -> None:
    places = Places()
    places.pack(Place("first", 0, 0))
    place = Place(topic, partition, offset)
    packed = places.pack(place)
    assert packed > 0 and places.unpack(packed) == place


def test_an_identity_is_read_as_intake_reads_it() -> None:
    _, identity, topic = read_job(b'{"id": "a", "tenant": "t", "run": -1, "reply": {"topic": "r"}}')
    assert (identity, topic) == (read_job(b'{"id": "a", "tenant": "t"}')[1], "r")
    assert read_job(b'{"id": "a b", "tenant": "t"}') == (b"", 0, None)


def test_the_worst_is_said_first() -> None:
    facts = Facts(True, "completed", "there", 3, 2, False, False, False)
    assert judge(facts)[0] is DOUBLED
