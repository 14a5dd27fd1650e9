"""Nothing lost and nothing twice, whatever is killed, frozen or cut off. Real worker processes, the simulated engine.

A short selection of `headrace bench faults`; what they promise is judged from the log alone (load/faults/judgement.py).
"""

from __future__ import annotations

import asyncio
import signal
import time

import pytest

from load.arena import BROKER, Arena
from load.faults.breaks import FAULTS, Fault, Scene
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
    numbers = (await broken(arena, witness, "freeze-both", lasts=12.0)).numbers
    assert 0 < numbers.reruns <= numbers.interrupted, "its session did not run out"
    assert numbers.suppressed == numbers.duplicates, "it ended jobs that belonged to another worker"


async def test_everything_goes_on_after_a_broker_restart(arena: Arena, witness: Witness) -> None:
    await broken(arena, witness, "kill-broker", lasts=4.0)


async def test_stored_outputs_wait_for_a_store_that_is_away(arena: Arena, witness: Witness) -> None:
    await broken(arena, witness, "store-away", lasts=20.0)
    stored = [trace for trace in witness.traces.values() if b'"store":"always"' in trace.planned.value]
    assert stored and all(trace.terminals[0].kind == "completed" for trace in stored)
    assert max(trace.terminals[0].at - trace.published for trace in stored) > 10.0, "none met the outage"


async def test_a_worker_stops_in_time_while_the_broker_is_away(arena: Arena, witness: Witness) -> None:
    took: list[float] = []

    async def stop_without_broker(scene: Scene) -> None:
        async with scene.victim() as name:
            since = time.time()
            await arena.end_part(BROKER, signal.SIGKILL)
            began = time.monotonic()
            await asyncio.wait_for(arena.leave(name), SHUTDOWN_S)
            took.append(time.monotonic() - began)
            await arena.begin_part(BROKER)
            scene.hit("broker", since, time.time(), None)
            await arena.start(name)

    await broken(arena, witness, "stop", fault=stop_without_broker)
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
