"""The same job published twice, to whole workers with the simulated engine (R7): it runs once, both are answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.records_to_delete import RecordsToDelete

from client import Client
from schemas.names import REPLIES, status_topic
from service.cli.process import WorkerProcess
from tests.integration.delivery_kit import Log, until
from tests.integration.simulated_kit import SimulatedPool, events_of, metric, statuses
from tests.integration.worker_kit import MODEL, Wire, job, new_id


@pytest.fixture
async def worker(simulated: SimulatedPool) -> WorkerProcess:
    return await simulated.main()


@pytest.fixture
async def wire(simulated: SimulatedPool, worker: WorkerProcess) -> AsyncIterator[Wire]:
    async with simulated.wire() as wire:
        yield wire


async def ends(wire: Wire, job_id: str, count: int, timeout_s: float = 30.0) -> list[dict[str, Any]]:
    await until(lambda: len(wire.terminals(job_id)) >= count, f"{count} ends of {job_id}", timeout_s)
    return wire.terminals(job_id)


def started(wire: Wire, job_id: str) -> int:
    return len(events_of(wire, job_id, "started"))


async def quiet(wire: Wire) -> None:
    """Another job has gone all the way: what was published before it has been judged."""
    value = job(new_id("quiet"), max_tokens=1)
    await wire.publish(value)
    await wire.ended(value["id"])


async def test_a_copy_of_an_ended_job_is_answered_with_its_end(simulated: SimulatedPool, wire: Wire) -> None:
    value = job(new_id("again"), max_tokens=5)
    await wire.publish(value)
    await wire.ended(value["id"])
    written = await wire.publish(value)
    first, second = await ends(wire, value["id"], 2)
    assert second == {**first, "duplicate": True}
    assert started(wire, value["id"]) == 1
    wire.valid(value["id"])
    await until(lambda: len(statuses(wire, simulated, value["id"])) == 2, "both status records")
    own, repeat = statuses(wire, simulated, value["id"])
    assert repeat["origin"] == f"{written.topic}/{written.partition}/{written.offset}" != own["origin"]
    assert repeat["repeat"] and repeat["attempt"] == own["attempt"] and repeat["usage"] == own["usage"]
    keys = [record.key for record in wire.of(status_topic(simulated.name)) if value["id"].encode() in record.value]
    assert len(set(keys)) == 2, "compaction would drop the first one's status record"


async def test_a_copy_goes_to_its_own_reply_address(simulated: SimulatedPool, wire: Wire) -> None:
    value = job(new_id("address"), max_tokens=3)
    value["reply"]["partition"] = 1
    await wire.publish(value)
    await wire.ended(value["id"])
    await wire.publish({**value, "reply": {**value["reply"], "partition": 4}})
    await ends(wire, value["id"], 2)
    places = [(r.partition, dict(r.headers)["t"]) for r in wire.of(REPLIES) if r.key == value["id"].encode()]
    assert places[-1] == (4, b"completed") and {place for place, _ in places[:-1]} == {1}


async def test_a_copy_of_a_running_job_waits_and_takes_no_place_at_the_engine(
    wire: Wire, worker: WorkerProcess
) -> None:
    value = job(new_id("running"), max_tokens=60)
    await wire.publish(value)
    await until(lambda: events_of(wire, value["id"], "chunk"), "the first chunk")
    for _ in range(3):
        await wire.publish(value)
    await asyncio.sleep(0.3)
    assert metric(worker, "headrace_jobs_running") == 1 and not wire.terminals(value["id"])
    first, *others = await ends(wire, value["id"], 4)
    assert first["type"] == "completed" and others == [{**first, "duplicate": True}] * 3
    assert started(wire, value["id"]) == 1


async def test_a_failed_jobs_copies_get_its_failure(wire: Wire) -> None:
    value = job(new_id("refused"), max_tokens=0)
    for _ in range(2):
        await wire.publish(value)
    first, second = await ends(wire, value["id"], 2)
    assert (first["type"], first["error"]["code"]) == ("failed", "invalid_request")
    assert second == {**first, "duplicate": True}


async def test_a_stored_output_is_answered_by_the_same_reference(wire: Wire) -> None:
    value = {**job(new_id("stored"), max_tokens=5), "output": {"store": "always"}}
    for _ in range(2):
        await wire.publish(value)
    first, second = await ends(wire, value["id"], 2)
    assert first["output"]["key"] and second == {**first, "duplicate": True}


async def test_other_content_under_an_identity_is_a_conflict_told_after_the_first_ones_end(wire: Wire) -> None:
    value = job(new_id("conflict"), max_tokens=40)
    await wire.publish(value)
    await until(lambda: started(wire, value["id"]), "the start")
    other = {**value, "metadata": {"another": "job"}}
    await wire.publish(other)
    first, second = await ends(wire, value["id"], 2)
    assert first["type"] == "completed"
    assert (second["type"], second["error"]["code"], second["error"]["retriable"]) == ("failed", "id_conflict", False)
    await wire.publish(other)
    await wire.publish(value)
    _, _, third, fourth = await ends(wire, value["id"], 4)
    assert sorted([third["type"], fourth["type"]]) == ["completed", "failed"]  # the conflict changed nothing
    assert started(wire, value["id"]) == 1


async def test_the_next_run_of_a_job_runs(wire: Wire) -> None:
    value = job(new_id("run"), max_tokens=3)
    await wire.publish(value)
    await wire.ended(value["id"])
    await wire.publish({**value, "run": 1})
    ended = await ends(wire, value["id"], 2)
    assert [e["run"] for e in ended] == [0, 1] and not ended[1].get("duplicate")


async def test_two_clients_that_ask_the_same_get_one_answer(simulated: SimulatedPool, wire: Wire) -> None:
    """As an application that was restarted does: it reads on another reply partition than before."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Which river?"}], "max_tokens": 20}
    id, texts = new_id("client"), []
    for partition in (0, 3):
        async with Client(
            simulated.bootstrap, tenant="acme", pool=simulated.name, reply_partitions=[partition]
        ) as client:
            texts.append((await (await client.publish(body, id=id)).result(30)).text)
    assert texts[0] == texts[1] and started(wire, id) == 1


async def test_a_job_whose_terminal_event_is_gone_runs_again(simulated: SimulatedPool, wire: Wire) -> None:
    topic = f"{simulated.name}.replies"
    admin = AIOKafkaAdminClient(bootstrap_servers=simulated.bootstrap)
    await admin.start()
    try:
        await admin.create_topics([NewTopic(topic, 1, 1)])
        async with Log(simulated.bootstrap, topic) as log:
            value = job(new_id("gone"), max_tokens=3)
            value["reply"]["topic"] = topic
            await wire.publish(value)
            await until(lambda: log.terminals(value["id"]), "the end")
            tp = TopicPartition(topic, 0)
            await admin.delete_records({tp: RecordsToDelete(-1)})
            await wire.publish(value)
            await until(lambda: len(log.terminals(value["id"])) == 2, "the second end")
            assert not log.terminals(value["id"])[1].get("duplicate")
            assert len(events_of(log, value["id"], "started")) == 2  # type: ignore[arg-type]
    finally:
        await admin.delete_topics([topic])
        await admin.close()


async def test_copies_are_recognised_after_a_restart(simulated: SimulatedPool, wire: Wire) -> None:
    values = [job(new_id("restart"), f"Question {n}", max_tokens=2) for n in range(12)]
    for n, value in enumerate(values):
        await wire.publish(value, key=f"k{n}".encode())
    for value in values:
        await wire.ended(value["id"])
    await simulated.stop("main")
    for n, value in enumerate(values):
        await wire.publish(value, key=f"k{n}".encode())
    await simulated.main()
    for value in values:
        first, second = await ends(wire, value["id"], 2)
        assert second == {**first, "duplicate": True} and started(wire, value["id"]) == 1


async def test_copies_are_recognised_by_the_worker_that_took_the_partition_over(
    simulated: SimulatedPool, wire: Wire
) -> None:
    values = {f"k{n}": job(new_id("moved"), f"Question {n}", max_tokens=2) for n in range(24)}
    for key, value in values.items():
        await wire.publish(value, key=key.encode())
    for value in values.values():
        await wire.ended(value["id"])
    before = {value["id"]: events_of(wire, value["id"], "started")[0]["worker"] for value in values.values()}
    assert len(set(before.values())) == 1
    second = await simulated.start("second")
    try:
        answered = metric(second, "headrace_duplicates_total", outcome="answered")
        for key, value in values.items():
            await wire.publish(value, key=key.encode())
        for value in values.values():
            first, again = await ends(wire, value["id"], 2)
            assert again == {**first, "duplicate": True} and started(wire, value["id"]) == 1
        assert metric(second, "headrace_duplicates_total", outcome="answered") > answered, "it took nothing over"
    finally:
        await simulated.stop("second")


async def test_a_killed_worker_leaves_its_waiting_copies_to_the_next_and_the_job_runs_once_more(
    simulated: SimulatedPool, wire: Wire
) -> None:
    """First and copy lie on one partition number, so both go to the same worker."""
    value = job(new_id("killed"), max_tokens=100)
    await wire.publish(value)
    await until(lambda: events_of(wire, value["id"], "chunk"), "the first chunk")
    for _ in range(2):
        await wire.publish(value)
    await quiet(wire)
    await simulated.stop("main", kill=True)
    await simulated.main()
    first, *others = await ends(wire, value["id"], 3, 60)
    assert first["type"] == "completed" and others == [{**first, "duplicate": True}] * 2
    assert started(wire, value["id"]) == 2
    assert first["attempt"] == events_of(wire, value["id"], "started")[1]["attempt"]


async def test_many_copies_at_once_are_all_answered_and_run_once(simulated: SimulatedPool, wire: Wire) -> None:
    value = job(new_id("flood"), max_tokens=10)
    began = time.monotonic()
    await asyncio.gather(*(wire.publish(value, tier=tier) for _ in range(100) for tier in ("standard", "bulk")))
    ended = await ends(wire, value["id"], 200, 60)
    assert started(wire, value["id"]) == 1 and len({e["attempt"] for e in ended}) == 1
    assert sum(bool(e.get("duplicate")) for e in ended) == 199
    assert time.monotonic() - began < 60
