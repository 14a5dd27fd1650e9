"""Workers with the real model that are killed, join and leave: what a reader sees of it, and what runs again."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from schemas.names import USAGE
from tests.integration.conftest import TestStack
from tests.integration.delivery_kit import until
from tests.integration.worker_kit import START_S, Fleet, Wire, check_numbering, job, new_id

TENANTS = ("acme", "globex", "initech")
SPREAD = 16


@pytest.fixture
async def wire(stack: TestStack) -> AsyncIterator[Wire]:
    async with Wire(stack.bootstrap, USAGE) as wire:
        yield wire


async def publish(wire: Wire, count: int, tokens: int) -> list[str]:
    ids = []
    for n in range(count):
        tenant = TENANTS[n % len(TENANTS)]
        value = job(
            new_id("life"), f"Tell me about river number {n}.", tenant=tenant, max_tokens=tokens, ignore_eos=True
        )
        await wire.publish(value, key=f"{tenant}|{n % SPREAD}".encode())  # over all partitions, so over all workers
        ids.append(value["id"])
    return ids


def starts(wire: Wire, id: str) -> list[dict[str, Any]]:
    return [event for event in wire.events(id) if event["type"] == "started"]


def in_flight(wire: Wire, ids: list[str]) -> list[str]:
    return [id for id in ids if starts(wire, id) and not wire.terminals(id)]


async def all_ended(wire: Wire, ids: list[str], timeout_s: float = 240.0) -> None:
    await until(lambda: all(wire.terminals(id) for id in ids), "every job's end", timeout_s)


def check_once(wire: Wire, ids: list[str]) -> None:
    """A reader that follows the rules delivers one end; each attempt is numbered without a gap."""
    for id in ids:
        assert len(wire.terminals(id)) == 1, id
        assert wire.terminals(id)[0]["type"] == "completed", wire.terminals(id)[0]
        check_numbering(wire.events(id))
        wire.valid(id)
        # No job twice at the same time in one process: a worker starts it again only after it gave it up.
        by_worker = Counter(event["worker"] for event in starts(wire, id))
        assert max(by_worker.values()) == 1, f"{id} was started twice by one worker"


@pytest.mark.timeout(600)
async def test_a_killed_worker_reruns_only_what_was_interrupted(fleet: Fleet, wire: Wire) -> None:
    main = await fleet.main()
    quick = await publish(wire, 6, tokens=4)
    await all_ended(wire, quick)
    slow = await publish(wire, 48, tokens=60)
    await until(lambda: len(in_flight(wire, slow)) >= 30, "30 jobs in flight", 120)
    os.kill(main.process.pid, signal.SIGKILL)
    await main.process.wait()
    ended_before = {id for id in (*quick, *slow) if wire.terminals(id)}
    interrupted = set(in_flight(wire, slow))

    second = await fleet.start("second")
    assert second.url
    await all_ended(wire, slow)
    check_once(wire, [*quick, *slow])
    again = {id for id in (*quick, *slow) if len(starts(wire, id)) > 1}
    assert again <= interrupted
    assert not again & ended_before, "a job that had ended ran again"


@pytest.mark.timeout(600)
async def test_workers_join_and_leave_under_load_and_nothing_is_lost(fleet: Fleet, wire: Wire) -> None:
    second = fleet.workers.get("second") or await fleet.start("second")
    if second.process.returncode is not None:
        second = await fleet.start("second-again")
    third = await fleet.spawn("third")
    ids = await publish(wire, 30, tokens=24)
    await until(lambda: in_flight(wire, ids), "the first job", 60)
    await third.ready(START_S)
    ids += await publish(wire, 60, tokens=24)

    def workers() -> set[str]:
        return {event["worker"] for id in ids for event in starts(wire, id)}

    await until(lambda: "third" in workers(), "the joined worker's first job", 120)
    second.process.send_signal(signal.SIGTERM)
    leaving = asyncio.create_task(second.process.wait())
    ids += await publish(wire, 12, tokens=8)
    await all_ended(wire, ids)
    assert await asyncio.wait_for(leaving, 90) == 0
    check_once(wire, ids)
