"""Nothing lost and nothing twice, whatever is killed, frozen or cut off. Real worker processes, the simulated engine.

A short selection of `headrace bench faults`; what they promise is judged from the log alone (load/faults/judgement.py).
"""

from __future__ import annotations

import asyncio
import signal
import time
import urllib.error
import urllib.request

import orjson
import pytest

from load.arena import BROKER, OBJECTS, Arena
from load.faults.breaks import FAULTS, Fault, Scene, fill_store, freeze_broker, freeze_store, kill_store
from load.faults.judgement import Judgement
from load.faults.rounds import Flow, Round
from load.faults.witness import Witness

pytestmark = pytest.mark.timeout(120)

SEED = 7
JOBS = 80
OVER_S = 6.0
# Part by part a stop has its bounds (R19); with the drain of these workers they come to less than this, seconds.
SHUTDOWN_S = 45.0


async def broken(
    arena: Arena, witness: Witness, name: str, *, lasts: float = 5.0, fault: Fault | None = None, jobs: int = JOBS
) -> Judgement:
    """One round: jobs flow, and after two seconds the fault comes and lasts for `lasts` seconds."""
    flow = Flow(jobs, OVER_S, begins=(2.0, 2.0), frozen=(lasts, lasts), away=(lasts, lasts))
    told: list[str] = []
    one = Round(arena, witness, {name: fault or FAULTS["simulated"][name]}, SEED, flow, told.append)
    judgement = await one.run()
    assert judgement.numbers.good and not judgement.findings, "\n".join([*told, *judgement.findings])
    assert judgement.numbers.jobs == jobs
    return judgement


async def test_a_killed_worker_loses_nothing_and_only_what_it_ran_runs_again(arena: Arena, witness: Witness) -> None:
    numbers = (await broken(arena, witness, "kill-worker")).numbers
    assert 0 < numbers.reruns <= numbers.interrupted
    assert numbers.suppressed == numbers.duplicates, "a job ended twice"


async def test_a_killed_delivery_process_is_replaced_and_its_streams_go_on(arena: Arena, witness: Witness) -> None:
    numbers = (await broken(arena, witness, "kill-delivery")).numbers
    assert 0 < numbers.reruns <= numbers.interrupted


async def test_a_worker_that_was_frozen_ends_nothing_beside_the_new_owner(arena: Arena, witness: Witness) -> None:
    numbers = (await broken(arena, witness, "freeze-both", lasts=20.0)).numbers
    assert 0 < numbers.reruns <= numbers.interrupted, "its session did not run out"
    assert numbers.suppressed == numbers.duplicates, "it ended jobs that belonged to another worker"


async def test_everything_goes_on_after_a_broker_restart(arena: Arena, witness: Witness) -> None:
    await broken(arena, witness, "kill-broker", lasts=4.0)


@pytest.mark.timeout(240)
async def test_everything_goes_on_after_a_minute_without_a_broker(arena: Arena, witness: Witness) -> None:
    """Longer than a session, a request and the lease."""
    await broken(arena, witness, "kill-broker", lasts=61.0)


async def test_a_broker_that_answers_nothing_for_a_while_costs_nothing_that_had_ended(
    arena: Arena, witness: Witness
) -> None:
    """A commit, batches and heartbeats are on their way all that time."""
    numbers = (await broken(arena, witness, "freeze-broker", lasts=15.0, fault=freeze_broker)).numbers
    assert numbers.suppressed == numbers.duplicates, "a job ended twice"


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("fault", "lasts"),
    [(kill_store, 12.0), (fill_store, 12.0), (freeze_store, 61.0)],
    ids=["gone", "full", "frozen for a minute"],
)
async def test_outputs_wait_for_a_store_that_takes_none_and_nothing_new_starts(
    arena: Arena, witness: Witness, fault: Fault, lasts: float
) -> None:
    held: dict[str, float] = {}  # worker → since when it starts nothing
    back: list[float] = []

    async def outage(scene: Scene) -> None:
        breaking = asyncio.ensure_future(fault(scene))
        while not breaking.done():
            for name, worker in arena.workers.items():
                if name not in held and await asyncio.to_thread(_held, worker.url):
                    held[name] = time.time()
            await asyncio.wait({breaking}, timeout=0.3)
        back.append(time.time())
        await breaking

    judgement = await broken(arena, witness, "store", lasts=lasts, fault=outage)
    assert judgement.numbers.interrupted == 0 and judgement.numbers.reruns == 0
    stored = [trace for trace in witness.traces.values() if b'"store":"always"' in trace.planned.value]
    assert stored and all(trace.terminals[0].kind == "completed" for trace in stored)
    assert max(trace.terminals[0].at - trace.published for trace in stored) > lasts / 2, "none met the outage"
    assert held, "no worker noticed"
    for trace in witness.traces.values():
        for attempt in trace.attempts.values():
            since = held.get(attempt.worker)
            assert since is None or not since + 1.0 < attempt.started < back[0] - 1.0, "a job was started meanwhile"


def _held(url: str) -> bool:
    """Whether this worker says that it starts nothing because of the store."""
    try:
        with urllib.request.urlopen(url + "/readyz", timeout=5) as answer:
            answer.read()
        return False
    except urllib.error.HTTPError as refusal:
        return "store" in orjson.loads(refusal.read())["checks"].get("admission", "")


async def test_a_worker_stops_in_time_while_the_broker_is_away(arena: Arena, witness: Witness) -> None:
    took: list[float] = []

    async def stop_without_broker(scene: Scene) -> None:
        async with scene.victim() as name:
            since = time.time()
            await arena.end_part(BROKER, signal.SIGKILL)
            began = time.monotonic()
            async with asyncio.timeout(SHUTDOWN_S):
                await arena.leave(name)
            took.append(time.monotonic() - began)
            await arena.begin_part(BROKER)
            scene.hit("broker", since, time.time(), None)
            await arena.start(name)

    await broken(arena, witness, "stop", fault=stop_without_broker)
    assert took[0] < SHUTDOWN_S


async def test_a_worker_stops_in_time_while_the_store_is_away_and_its_outputs_are_made_again(
    arena: Arena, witness: Witness
) -> None:
    took: list[float] = []

    async def stop_without_store(scene: Scene) -> None:
        async with scene.victim() as name:
            since = time.time()
            await arena.end_part(OBJECTS, signal.SIGKILL)
            await asyncio.sleep(3.0)  # outputs that wait
            began = time.monotonic()
            async with asyncio.timeout(SHUTDOWN_S):
                assert await arena.leave(name) == 0
            took.append(time.monotonic() - began)
            scene.hit("stop", since, time.time(), name)
            await arena.begin_part(OBJECTS)
            await arena.start(name)

    numbers = (await broken(arena, witness, "stop", fault=stop_without_store)).numbers
    assert numbers.suppressed == numbers.duplicates, "a job ended twice"
    assert took[0] < SHUTDOWN_S


async def test_workers_do_not_mind_a_collector_that_is_gone(arena: Arena, witness: Witness) -> None:
    assert arena.environment["HEADRACE_TELEMETRY__OTLP_ENDPOINT"], "no endpoint to be refused by"

    async def nothing(scene: Scene) -> None:
        pass

    await broken(arena, witness, "collector", fault=nothing)
    for worker in arena.workers.values():
        lines = worker.log.read_text(errors="replace").splitlines()
        about = [line for line in lines if "otlp" in line.lower() or "span" in line.lower()]
        assert len(about) <= 4, about  # once that it is away, from each process


async def test_of_two_workers_with_one_static_id_the_elder_ends_and_no_job_ends_twice(
    arena: Arena, witness: Witness
) -> None:
    codes: list[int] = []
    arena.environment["HEADRACE_KAFKA__INSTANCE"] = "pod-0"
    try:
        elder = await arena.start("elder")

        async def namesake(scene: Scene) -> None:
            since = time.time()
            await arena.start("younger")
            async with asyncio.timeout(SHUTDOWN_S):
                codes.append(await elder.process.wait())
            del arena.workers["elder"]
            scene.hit("namesake", since, time.time(), "elder")

        numbers = (await broken(arena, witness, "namesake", fault=namesake)).numbers
    finally:
        del arena.environment["HEADRACE_KAFKA__INSTANCE"]
    assert codes == [1]
    assert "has taken over the static member id pod-0" in elder.log.read_text(errors="replace")
    assert numbers.suppressed == numbers.duplicates, "both ended a job"
    await arena.leave("younger")
