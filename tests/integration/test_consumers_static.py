"""Static member ids on a real broker (R18): a restart moves nothing, and a successor waits out a lease."""

from __future__ import annotations

import signal
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.integration.conftest import TestStack
from tests.integration.group_kit import Pool, Worker, pool_of, settings_for, until
from tests.integration.test_consumers_group import Process, numbers, settled

LEASE_S = 7.0  # session timeout of 10 s, less 3


@pytest.fixture
async def pool(stack: TestStack) -> AsyncIterator[Pool]:
    async with pool_of(stack.bootstrap) as pool:
        yield pool


def static(pool: Pool, instance: str) -> Worker:
    return Worker(settings_for(pool.name, pool.bootstrap, instance=instance))


def told(process: Process, event: str) -> list[dict[str, Any]]:
    return [one for one in process.events if one["event"] == event]


async def joined(process: Process) -> list[int]:
    await process.start()
    await until(lambda: bool(told(process, "joined")), "the member", 40)
    return list(told(process, "joined")[0]["numbers"])


async def test_a_member_that_is_killed_and_back_in_time_moves_no_partition(pool: Pool) -> None:
    stays = static(pool, "stays")
    await stays.start()
    first, again = Process(pool, instance="restarts"), Process(pool, instance="restarts")
    try:
        await joined(first)
        await until(lambda: len(numbers(stays)) == 3, "half of the partitions each")
        mine, count = numbers(stays), stays.consumer.rebalances
        held = await pool.publish(36, hold=True)
        theirs = {place for place in held if place.partition not in mine}
        await until(lambda: set(first.places("admitted")) == theirs, "the other half's jobs", 40)
        await until(lambda: any(one["live"] == len(theirs) for one in told(first, "committed")), "their commit", 40)
        await first.kill()
        assert set(await joined(again)) == {place.partition for place in theirs}
        await until(lambda: set(again.places("admitted")) == theirs, "the interrupted jobs", 40)
        assert numbers(stays) == mine and stays.consumer.rebalances == count and stays.consumer.joined
        assert len(again.places("admitted")) == len(theirs)
    finally:
        first.end()
        again.end()
        await stays.stop()


async def test_a_member_that_stopped_cleanly_goes_on_at_once_and_moves_no_partition(pool: Pool) -> None:
    stays, first = static(pool, "stays"), static(pool, "restarts")
    await stays.start()
    await first.start()
    await until(lambda: settled(stays, first), "both")
    await pool.publish(36)
    await until(lambda: len(stays.ended) + len(first.ended) == 36, "the jobs")
    mine, count = numbers(first), stays.consumer.rebalances
    assert await first.stop()
    more = await pool.publish(36)
    again = static(pool, "restarts")
    await again.start()
    began = time.monotonic()
    await until(lambda: {place for place in more if place.partition in mine} <= again.ended, "the jobs in between")
    assert time.monotonic() - began < LEASE_S - 2, "it waited although its predecessor had stopped"
    assert numbers(again) == mine and stays.consumer.rebalances == count
    await again.stop()
    await stays.stop()


async def test_a_successor_starts_nothing_while_its_predecessor_may_still_end_jobs(pool: Pool) -> None:
    """The group gives it the partitions at once, where a member of another name waits for the session timeout."""
    elder, younger = Process(pool, instance="both"), static(pool, "both")
    try:
        await joined(elder)
        held = await pool.publish(18, hold=True)
        await until(lambda: any(one["live"] == 18 for one in told(elder, "committed")), "a commit with all jobs", 40)
        elder.signal(signal.SIGSTOP)
        commit = time.monotonic()  # at most a moment after its last one
        await younger.start()
        assert younger.consumer.assignment and not younger.admitted
        await until(lambda: set(younger.admitted) == set(held), "the elder's jobs", 40)
        assert time.monotonic() - commit >= LEASE_S
    finally:
        elder.end()
        await younger.stop()
