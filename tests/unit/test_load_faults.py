"""The judge of the fault kit sees what is wrong, and what is not: counted from events alone."""

from __future__ import annotations

import random
from typing import Any

from load.faults.breaks import FAULTS, SOLITARY, Hit
from load.faults.jobs import Planned, lethal, plan
from load.faults.judgement import Numbers, judge, strays
from load.faults.rounds import Options, command, draw
from load.faults.witness import Trace
from load.group import Member, Move, Owners
from service.job import Place

WORKER, OTHER = "w1", "w2"


class Job:
    """A trace that is fed with events; times in seconds after its publication at 100."""

    def __init__(self, id: str = "j", *, tokens: int = 2, stream: bool = True, kills: bool = False) -> None:
        planned = Planned(id, 0.0, "acme", "standard", b"", stream, tokens, lethal=kills)
        self.trace = Trace(planned, 100.0)
        self.trace.places.append(Place("inference.faults.jobs.standard", 3, 7))

    def event(self, at: float, type: str, attempt: str, seq: int, partition: int = 0, **more: Any) -> Job:
        fields = {"type": type, "run": 0, "attempt": attempt, "seq": seq, **more}
        self.trace.take(fields, 100.0 + at, partition)
        return self

    def started(self, at: float, attempt: str = "A", worker: str = WORKER) -> Job:
        return self.event(at, "started", attempt, 0, worker=worker)

    def chunk(self, at: float, seq: int, offset: int, attempt: str = "A", text: str = "x") -> Job:
        choice = {"index": 0, "delta": {"content": text}}
        return self.event(at, "chunk", attempt, seq, offset=offset, tokens=1, chunk={"choices": [choice]})

    def completed(self, at: float, seq: int = 3, attempt: str = "A", tokens: int = 2, **more: Any) -> Job:
        # SHA-256 of "xx"
        digest = "5dde896887f6754c9b15bfe3a441ae4806df2fde94001311e08bf110622e0bbe"
        usage = {"completion_tokens": tokens}
        return self.event(at, "completed", attempt, seq, usage=usage, text_sha256=[digest], **more)

    def settled(self, at: float) -> Job:
        self.trace.settled = 100.0 + at
        return self

    def whole(self, attempt: str = "A", worker: str = WORKER, at: float = 1.0) -> Job:
        self.started(at, attempt, worker).chunk(at + 0.1, 1, 0, attempt).chunk(at + 0.2, 2, 1, attempt)
        return self.completed(at + 0.3, 3, attempt)


def numbers(*jobs: Job, hits: tuple[Hit, ...] = (), moves: tuple[Move, ...] = ()) -> Numbers:
    return judge([job.trace for job in jobs], hits, moves).numbers


def test_a_clean_job_is_clean() -> None:
    found = judge([Job().whole().settled(1.5).trace], (), ())
    assert found.numbers == Numbers(rounds=1, jobs=1) and found.numbers.good and not found.findings
    assert found.kinds == {"completed": 1}


def test_a_job_without_an_end_is_lost() -> None:
    found = numbers(Job().started(1.0))
    assert found.lost == 1 and not found.good


def test_a_job_that_was_never_published_is_no_job() -> None:
    job = Job()
    job.trace.places.clear()
    job.trace.failed_publish = "KafkaTimeoutError"
    assert numbers(job).jobs == 0


def test_a_second_end_is_suppressed_and_on_another_partition_doubled() -> None:
    same = numbers(Job().whole().settled(2.0).completed(1.4, 4))
    assert (same.suppressed, same.doubled, same.good) == (1, 0, True)
    other = numbers(Job().whole().settled(2.0).completed(1.4, 4, partition=1))
    assert (other.suppressed, other.doubled, other.good) == (1, 1, False)


def test_missing_numbers_and_offsets_are_gaps() -> None:
    assert numbers(Job().started(1).chunk(1.1, 2, 0).completed(1.2, 3)).numbering_gaps
    assert numbers(Job().started(1).chunk(1.1, 1, 1).completed(1.2, 2)).numbering_gaps


def test_a_stream_that_differs_from_its_result_is_torn() -> None:
    assert numbers(Job().started(1).chunk(1.1, 1, 0).completed(1.2, 2)).torn == 1, "a token is missing at the end"
    assert numbers(Job().started(1).chunk(1.1, 1, 0).chunk(1.2, 2, 1, text="y").completed(1.3)).torn == 1
    elsewhere = Job().started(1).chunk(1.1, 1, 0).event(1.2, "completed", "B", 0, usage={"completion_tokens": 2})
    assert numbers(elsewhere).torn == 0, "a result replaces the chunks of another attempt"


def test_a_result_of_the_wrong_length_is_torn() -> None:
    assert numbers(Job(tokens=5).whole()).torn == 1


def test_a_rerun_needs_an_interruption_of_its_own_worker_while_it_ran() -> None:
    def rerun() -> Job:
        job = Job().started(1.0).chunk(1.1, 1, 0)
        return job.whole("B", OTHER, at=5.0).settled(6.0)

    assert (numbers(rerun()).reruns, numbers(rerun()).unexplained) == (1, 1)
    for hit, explained in (
        (Hit("kill", 102.0, 102.0, WORKER), True),
        (Hit("kill", 102.0, 102.0, OTHER), False),
        (Hit("kill", 102.0, 102.0, None), True),
        (Hit("kill", 99.0, 100.5, WORKER), False),
        (Hit("kill", 107.0, 108.0, OTHER), False),
    ):
        found = numbers(rerun(), hits=(hit,))
        assert (found.interrupted, found.unexplained) == (int(explained), int(not explained)), hit
    assert numbers(rerun(), moves=(Move(3, 103.0, WORKER, OTHER),)).interrupted == 1
    assert numbers(rerun(), moves=(Move(4, 103.0, WORKER, OTHER),)).interrupted == 0, "another partition"


def test_a_job_that_ran_again_after_its_known_end_is_late() -> None:
    job = Job().whole().settled(2.0).started(5.0, "B", OTHER)
    found = numbers(job, hits=(Hit("kill", 100.0, 110.0, None),))
    assert found.late == 1 and not found.good
    unknown = Job().whole().started(5.0, "B", OTHER).settled(6.0)
    assert numbers(unknown, hits=(Hit("kill", 100.0, 110.0, None),)).late == 0, "its end was never acknowledged"


def test_innocent_jobs_must_complete_and_lethal_ones_must_not() -> None:
    failed = Job().event(1.0, "failed", "A", 0, error={"code": "engine_failed"})
    assert numbers(failed).failed == 1
    assert numbers(Job(kills=True).event(1.0, "failed", "A", 0, error={"code": "poison_job"})).failed == 0
    assert numbers(Job(kills=True).whole().settled(2.0)).failed == 1


def test_a_lethal_job_interrupts_what_runs_beside_it() -> None:
    killer = Job("k", kills=True).started(1.0).event(9.0, "failed", "A", 1, error={"code": "poison_job"}).settled(9.1)
    beside = Job("b").started(0.9).whole("B", WORKER, at=4.0).settled(5.0)
    elsewhere = Job("e").started(0.9, worker=OTHER).whole("B", OTHER, at=4.0).settled(5.0)
    found = numbers(killer, beside, elsewhere)
    assert found.reruns == 2 and found.unexplained == 1


def test_a_move_is_a_number_with_another_member() -> None:
    owners = Owners()
    first, again, other = Member("a-1", "a"), Member("a-2", "a"), Member("b-1", "b")
    owners.saw({0: first, 1: other}, 10.0)
    owners.saw({0: first}, 11.0)  # nobody has 1
    owners.saw({0: again, 1: other}, 12.0)
    owners.saw({0: other, 1: other}, 13.0)
    assert owners.moves == [Move(0, 12.0, "a", "a"), Move(0, 13.0, "a", "b")]


def test_a_round_follows_from_its_seed_alone() -> None:
    options = Options(rounds=20, seed=1, workers=3)
    drawn = [draw(options, number) for number in range(20)]
    assert {names for _, names in drawn[:10]} == {(name,) for name in FAULTS["simulated"]}, "one of each kind alone"
    assert all(len(set(names)) == 2 for _, names in drawn[10:])
    assert not any(group >= set(names) for _, names in drawn[10:] for group in SOLITARY)
    seed, names = drawn[14]
    assert draw(Options(1, seed, 3), 0) == (seed, names)
    assert command(options, seed, names).startswith(
        f"uv run headrace bench faults --rounds 1 --seed {seed} --only {names[0]}+{names[1]}"
    )


def test_the_same_seed_gives_the_same_jobs() -> None:
    once, again = (plan("r", random.Random("s"), count=50, over_s=5, model="m") for _ in range(2))
    assert once == again and len({job.id for job in once}) == 50
    assert any(job.stream for job in once) and not all(job.stream for job in once)
    assert b"sim:lost" in lethal("x", 0.0, "m").value


def test_a_job_that_nobody_started_is_lost_not_interrupted() -> None:
    numbers = judge([Job().trace], [Hit("kill-worker", 100.0, 101.0, WORKER)], [Move(3, 100.5, WORKER, OTHER)]).numbers
    assert (numbers.lost, numbers.interrupted) == (1, 0)


def test_strays_are_moves_between_survivors_since_the_kill() -> None:
    start = Move(1, 99.0, "w1", "w3")  # read late: of the workers' start
    inherited, balanced = Move(2, 104.0, "w2", "w3"), Move(3, 104.0, "w1", "w4")  # from the dead; to the one that came
    wrong = Move(4, 104.0, "w1", "w3")
    hits = [Hit("kill-worker", 103.0, 103.0, "w2")]
    assert strays([start, inherited, balanced, wrong], hits, {"w1", "w2", "w3"}) == [wrong]
    assert strays([wrong], [], {"w1", "w2", "w3"}) == []
