"""`headrace reconcile` on a real broker, beside a whole worker: good runs, and logs that were tampered with by hand."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from schemas.names import DEAD_LETTERS, H_TYPE, REPLIES, group_id, jobs_topic, status_topic
from tests.integration.command_kit import headrace, told
from tests.integration.conftest import TestStack
from tests.integration.delivery_kit import until
from tests.integration.simulated_kit import SimulatedPool, endless
from tests.integration.worker_kit import Wire, job, new_id

TENANTS = ("acme", "globex", "initech")


@pytest.fixture
async def pool(stack: TestStack, tmp_path: Path) -> AsyncIterator[SimulatedPool]:
    """Every test counts its own jobs only."""
    pool = SimulatedPool(stack, tmp_path)
    await pool.topics()
    yield pool
    await pool.close()


async def reconcile(pool: SimulatedPool) -> tuple[int | None, dict[str, Any]]:
    return await told(pool.bootstrap, pool.name, "reconcile", "--since", "15m")


def counts(account: dict[str, Any]) -> dict[str, int]:
    names = ("ok", "running", "lost", "doubled", "suppressed", "dead_lettered", "unverifiable")
    return {name: account[name] for name in names if name != "ok" and account[name]}


async def publish(wire: Wire, count: int) -> list[str]:
    ids = []
    for n in range(count):
        tenant = TENANTS[n % len(TENANTS)]
        value = job(new_id("rec"), tenant=tenant, max_tokens=3)
        await wire.publish(value, tier=("interactive", "standard", "bulk")[n // 3 % 3], key=tenant.encode())
        ids.append(value["id"])
    return ids


async def test_a_good_run_is_reconciled_and_what_is_wrong_is_found(pool: SimulatedPool) -> None:
    await pool.start("main")
    async with pool.wire() as wire:
        ids = await publish(wire, 18)
        await until(lambda: all(wire.terminals(id) for id in ids), "all ends", 60)
        jobs = 18

        # What the worker answers in other ways: a copy, a refusal, a dead letter without id, one with an id.
        copy = job(new_id("rec"), max_tokens=3)
        for _ in range(2):
            await wire.publish(copy)
        await until(lambda: len(wire.terminals(copy["id"])) == 2, "both answers to a copy", 60)
        refused = job(new_id("rec"), no_such_field=1)
        await wire.publish(refused)
        await wire.ended(refused["id"])
        other = {**job(copy["id"], "Another prompt."), "reply": {"topic": REPLIES, "partition": 5}}
        await wire.publish(other)
        await until(lambda: len(wire.terminals(copy["id"])) == 3, "the conflict's answer", 60)
        broken, homeless = new_id("broken"), job(new_id("rec"))
        homeless["reply"]["topic"] = new_id("acme.none")
        await wire.publish(broken.encode())
        await wire.publish(homeless)
        await until(lambda: wire.dead_with(broken) and wire.dead_with(homeless["id"]), "both dead letters", 60)
        long = endless(new_id("rec"))
        await wire.publish(long)
        await until(lambda: wire.events(long["id"]), "the long job's start", 60)
        jobs += 7

        code, account = await reconcile(pool)
        assert (code, counts(account)) == (0, {"running": 1, "dead_lettered": 2}), account
        assert account["jobs"] == jobs and account["ok"] == jobs - 3

        # A terminal that nobody wrote but this test: first where no reader minds, then where one would deliver it.
        (end,) = wire.terminals(ids[0])
        (place,) = [
            r for r in wire.of(REPLIES) if r.key == ids[0].encode() and r.value and orjson.loads(r.value) == end
        ]
        async with AIOKafkaProducer(bootstrap_servers=pool.bootstrap, acks="all") as producer:

            async def write(partition: int) -> None:
                await producer.send_and_wait(
                    REPLIES,
                    orjson.dumps(end),
                    key=ids[0].encode(),
                    partition=partition,
                    headers=[(H_TYPE, b"completed")],
                )

            await write(place.partition)
            code, account = await reconcile(pool)
            assert (code, counts(account)) == (0, {"running": 1, "dead_lettered": 2, "suppressed": 1}), account
            await write((place.partition + 1) % 6)
        code, account = await reconcile(pool)
        assert (code, counts(account)) == (1, {"running": 1, "dead_lettered": 2, "doubled": 1}), account
        (finding,) = account["findings"]
        assert (finding["verdict"], finding["job_id"], len(finding["terminals"])) == ("doubled", ids[0], 3)

        code, out, _ = await headrace(pool.bootstrap, pool.name, "reconcile", "--since", "15m")
        assert code == 1 and ids[0] in out and "doubled" in out


async def test_a_job_that_is_committed_and_left_no_trace_is_lost(pool: SimulatedPool) -> None:
    topic = jobs_topic(pool.name, "standard")
    async with pool.wire() as wire:
        gone, waiting, unsent = (job(new_id("rec")) for _ in range(3))
        places = [await wire.publish(value) for value in (gone, unsent, waiting)]
        assert len({place.partition for place in places}) == 1
        code, account = await reconcile(pool)
        assert (code, counts(account)) == (0, {"running": 3}), account

        partition = TopicPartition(topic, places[0].partition)
        async with AIOKafkaProducer(bootstrap_servers=pool.bootstrap, acks="all") as producer:
            # A status record that names a place where something else lies.
            other = await producer.send_and_wait(REPLIES, b"{}", partition=0)
            where = {"topic": REPLIES, "partition": 0, "offset": other.offset}
            status = {"kind": "completed", "tenant": "acme", "job_id": unsent["id"], "run": 0, "terminal": where}
            status["origin"] = f"{topic}/{partition.partition}/{places[1].offset}"
            await producer.send_and_wait(
                status_topic(pool.name), orjson.dumps(status), partition=partition.partition, key=b"k"
            )
        async with AIOKafkaConsumer(
            bootstrap_servers=pool.bootstrap, group_id=group_id(pool.name), enable_auto_commit=False
        ) as consumer:
            consumer.assign([partition])
            await consumer.commit({partition: places[2].offset})
        code, account = await reconcile(pool)
        assert (code, counts(account)) == (1, {"running": 1, "lost": 2}), account
        assert {finding["job_id"] for finding in account["findings"]} == {gone["id"], unsent["id"]}
        assert not wire.of(DEAD_LETTERS)


async def test_a_pool_without_topics_is_not_called_good(stack: TestStack) -> None:
    code, _, err = await headrace(stack.bootstrap, "nobody", "reconcile")
    assert code == 3 and "topics are missing" in err and "headrace topics apply" in err
    code, _, err = await headrace("127.0.0.1:1", "nobody", "reconcile")
    assert code == 3 and "no Kafka broker answers" in err
