"""The load generator against a real broker: it counts what is there, and what is not. The worker's side is a double."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from load.generator import Generator, GeneratorError, good, scaled
from load.scenario import Scenario
from tests.integration.conftest import TestStack
from tests.integration.reply_double import Double, Job, double


@pytest.fixture
async def wire(stack: TestStack) -> AsyncIterator[Double]:
    async with double(stack.bootstrap) as made:
        made.script = exact
        yield made


async def exact(job: Job) -> None:
    """As many tokens as were asked for, one a chunk."""
    tokens = job.fields["body"]["max_tokens"]
    await job.started()
    if job.fields["reply"]["stream"]:
        for seq in range(1, tokens + 1):
            await job.chunk("x", seq=seq)
    usage = {"prompt_tokens": 1, "completion_tokens": tokens, "total_tokens": tokens + 1}
    seq = tokens + 1 if job.fields["reply"]["stream"] else 1
    await job.event("completed", "A", seq, response={}, usage=usage)


async def test_a_clean_run_counts_every_job_and_token(wire: Double) -> None:
    scenario = scaled(Scenario.load("smoke"), jobs=10, output_tokens=4)
    async with Generator(wire.bootstrap, pool=wire.pool, reply_topic=wire.replies) as generator:
        report = await asyncio.wait_for(generator.run(scenario, "m"), 60)
        again = await asyncio.wait_for(generator.run(scenario, "m"), 60)
    for one in (report, again):
        assert good(one), one
        assert one["completion_tokens"] == 120 and set(one["tenants"]) == {"acme", "globex", "initech"}
        assert one["first_token_ms"]["count"] == one["chunks"] // 4
    assert report["run"] != again["run"]


async def test_lost_and_repeated_events_are_seen(wire: Double) -> None:
    async def faulty(job: Job) -> None:
        number = int(job.fields["id"].rsplit("-", 1)[1])
        if number == 0:
            return
        await exact(job)
        if number == 1:
            await job.event("failed", "B", 0, error={"code": "internal", "message": "late", "retriable": True})

    wire.script = faulty
    scenario = scaled(Scenario.load("echo"), jobs=4, in_flight=4).model_copy(update={"limit_s": 3.0})
    async with Generator(wire.bootstrap, pool=wire.pool, reply_topic=wire.replies) as generator:
        report = await asyncio.wait_for(generator.run(scenario, "m"), 30)
    assert not good(report)
    assert (report["lost"], report["suppressed"], report["duplicated"], report["completed"]) == (1, 1, 0, 3)


async def test_a_closed_loop_never_has_more_in_flight_than_it_says(wire: Double) -> None:
    running: list[int] = [0, 0]

    async def slow(job: Job) -> None:
        running[0] += 1
        running[1] = max(running)
        await asyncio.sleep(0.02)
        running[0] -= 1
        await exact(job)

    wire.script = slow
    scenario = scaled(Scenario.load("pipeline-streams"), jobs=30, in_flight=5, output_tokens=1)
    async with Generator(wire.bootstrap, pool=wire.pool, reply_topic=wire.replies) as generator:
        assert good(await asyncio.wait_for(generator.run(scenario, "m"), 30))
    assert 2 <= running[1] <= 5


async def test_missing_topics_and_brokers_are_one_line(wire: Double) -> None:
    with pytest.raises(GeneratorError, match="topics apply"):
        async with Generator(wire.bootstrap, reply_topic="no-such-topic"):
            pass
    with pytest.raises(GeneratorError, match="no Kafka broker"):
        async with Generator("127.0.0.1:9"):
            pass


async def test_as_a_process_it_waits_for_go_and_reports_in_one_line_a_round(wire: Double) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "load.generator", "echo", "--bootstrap", wire.bootstrap, "--pool", wire.pool),
        *("--reply-topic", wire.replies, "--jobs", "3", "--json", "--wait", "--rounds", "2"),
        stdin=PIPE,
        stdout=PIPE,
        cwd=Path(__file__).parents[2],
    )
    assert process.stdin is not None and process.stdout is not None

    async def line() -> dict[str, Any]:
        assert process.stdout is not None
        told: dict[str, Any] = orjson.loads(await asyncio.wait_for(process.stdout.readline(), 60))
        return told

    assert await line() == {"ready": True}
    assert wire.jobs.empty(), "it began before it was told to"
    for _ in range(2):
        process.stdin.write(b"go\n")
        report = await line()
        assert good(report) and report["jobs"] == 3 and report["generator_cpu_s"] > 0
    assert await asyncio.wait_for(process.wait(), 20) == 0
