"""The client against a real broker and a real store, with the worker's side played by a double of the wire."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import orjson
import pytest
from minio import Minio

from client import (
    Chunk,
    Client,
    ClientError,
    DigestMismatch,
    InvalidJob,
    JobFailed,
    Result,
    ResultOnly,
    ResultTimeout,
    ResumeExpired,
    ResumeToken,
    Started,
    StoreAccess,
    StoreError,
    UnknownTopic,
)
from schemas.events import read_event
from schemas.job import Job as JobModel
from schemas.records import CancelRecord
from tests.integration.conftest import TestStack
from tests.integration.reply_double import Double, Job, double, ordinary, response

MESSAGES = [{"role": "user", "content": "world"}]
BODY = {"model": "m", "messages": MESSAGES}
LIMIT_S = 20.0


@pytest.fixture
async def wire(stack: TestStack) -> AsyncIterator[Double]:
    async with double(stack.bootstrap) as made:
        made.script = ordinary
        yield made


def client_of(wire: Double, **more: Any) -> Client:
    return Client(wire.bootstrap, tenant="acme", pool=wire.pool, reply_topic=wire.replies, **more)


def store_of(stack: TestStack) -> StoreAccess:
    if not stack.store_endpoint:
        pytest.skip("no store")
    return StoreAccess(stack.store_endpoint, "headrace", "headrace-secret")


async def until(met: Callable[[], object], limit_s: float = LIMIT_S) -> None:
    ends = time.monotonic() + limit_s
    while not met():
        assert time.monotonic() < ends, "the condition was not met in time"
        await asyncio.sleep(0.01)


async def test_a_published_job_streams_its_chunks_and_gives_its_result(wire: Double) -> None:
    async with client_of(wire) as client:
        job = await client.publish(BODY, id="j-1", metadata={"k": "v"}, deadline=60, output={"store": "auto"})
        assert [chunk.text async for chunk in job] == ["Hello ", "world"]
        result = await job.result(LIMIT_S)
        arrived = await wire.jobs.get()
    assert result.text == "Hello world" and result.finish_reasons == ["stop"] and result.metadata == {"k": "v"}
    assert (result.usage.prompt_tokens, result.usage.completion_tokens, result.usage.cached_tokens) == (3, 2, 1)
    assert result.timings["total_ms"] == 9.0
    assert result.text_sha256 == [hashlib.sha256(b"Hello world").hexdigest()]
    assert result.place == (wire.replies, *arrived.places[-1])
    JobModel.model_validate(arrived.fields)
    assert arrived.key == b"acme" and arrived.fields["reply"]["partition"] == job.token.partition
    read_event(orjson.dumps({**result.event, "attempt": "0" * 26}))


async def test_chat_is_one_call(wire: Double) -> None:
    async with client_of(wire, model="m") as client:
        result = await client.chat(MESSAGES, max_tokens=8, timeout_s=LIMIT_S)
        arrived = await wire.jobs.get()
    assert isinstance(result, Result) and result.text == "Hello world"
    assert arrived.fields["body"] == {"model": "m", "messages": MESSAGES, "max_tokens": 8}
    assert arrived.fields["reply"]["stream"] is False


async def test_200_streams_share_one_connection_and_none_sees_anothers_chunks(wire: Double) -> None:
    async def slowly(job: Job) -> None:
        name = job.fields["id"]
        await job.started()
        for seq in range(1, 6):
            await job.chunk(f"{name}/{seq} ", seq=seq)
        await job.completed("".join(f"{name}/{seq} " for seq in range(1, 6)), seq=6)

    wire.script = slowly

    async def one(client: Client, number: int) -> None:
        job = await client.publish(BODY, id=f"s{number}")
        text = "".join([chunk.text async for chunk in job])
        assert text == (await job.result(LIMIT_S)).text
        assert text.count(f"s{number}/") == 5 == text.count("/")

    async with client_of(wire, reply_partitions=2) as client:
        await asyncio.wait_for(asyncio.gather(*(one(client, number) for number in range(200))), 60)


async def test_interleaved_attempts_show_only_the_one_started_last_and_end_once(wire: Double) -> None:
    async def two_attempts(job: Job) -> None:
        await job.started("A")
        await job.chunk("old ", "A", 1)
        await job.started("B")
        await job.chunk("stale ", "A", 2)
        await job.chunk("new ", "B", 1)
        await job.chunk("stale ", "A", 3)
        await job.chunk("text", "B", 2)
        await job.chunk("text", "B", 2)
        await job.event("abandoned", "A", 4)
        await job.completed("new text", "B", 3)
        await job.completed("old stale stale", "A", 5)
        await job.event("failed", "B", 4, error={"code": "internal", "message": "late", "retriable": True})

    wire.script = two_attempts
    async with client_of(wire) as client:
        job = await client.publish(BODY)
        shown = ""
        async for chunk in job:
            shown = chunk.text if chunk.first else shown + chunk.text
        result = await job.result(LIMIT_S)
        assert shown == "new text" == result.text and result.attempt == "B"
        # A second look at the whole log, late terminals included, comes to the same end.
        again = await client.resume(job.token)
        items = [item async for item in again.events()]
        assert (await again.result(LIMIT_S)).attempt == "B"
    assert [item.attempt for item in items if isinstance(item, Started)][-1] == "B"


async def test_a_slow_reader_becomes_result_only_and_holds_up_nobody(wire: Double) -> None:
    async def many(job: Job) -> None:
        await job.started()
        for seq in range(1, 101):
            await job.chunk("x", seq=seq)
        await job.completed("x" * 100, seq=101)

    wire.script = many
    async with client_of(wire, buffer=10) as client:
        slow = await client.publish(BODY, id="slow")
        fast = await client.publish(BODY, id="fast")
        fast_text = "".join([chunk.text async for chunk in fast])
        assert (await fast.result(LIMIT_S)).text == fast_text
        assert (await slow.result(LIMIT_S)).text == "x" * 100
        assert slow.result_only and not fast.result_only
        items = [item async for item in slow.events()]
    assert [type(item) for item in items] == [ResultOnly]


async def test_a_token_finds_the_job_again_after_a_restart_while_it_runs(wire: Double) -> None:
    go_on = asyncio.Event()

    async def halting(job: Job) -> None:
        await job.started()
        await job.chunk("one ", seq=1)
        await go_on.wait()
        await job.chunk("two", seq=2)
        await job.completed("one two", seq=3)

    wire.script = halting
    async with client_of(wire, reply_partitions=[0]) as first:
        job = await first.publish(BODY)
        assert (await anext(aiter(job))).text == "one "
        token = str(job.token)
    async with client_of(wire, reply_partitions=[1]) as second:  # its own partition is another one
        job = await second.resume(token)
        chunks = aiter(job)
        assert (await asyncio.wait_for(anext(chunks), LIMIT_S)).text == "one "
        go_on.set()
        assert (await asyncio.wait_for(anext(chunks), LIMIT_S)).text == "two"
        assert (await job.result(LIMIT_S)).text == "one two"


async def test_resuming_many_jobs_repeats_nothing_for_the_streams_that_run(wire: Double) -> None:
    go_on = asyncio.Event()

    async def halting(job: Job) -> None:
        await job.started()
        await job.chunk("one ", seq=1)
        if job.fields["id"] == "live":
            await go_on.wait()
        await job.chunk("two", seq=2)
        await job.completed("one two", seq=3)

    wire.script = halting
    async with client_of(wire, reply_partitions=[0]) as client:
        done = [await client.publish(BODY, id=f"done{number}") for number in range(20)]
        live = await client.publish(BODY, id="live")
        for job in done:
            await job.result(LIMIT_S)
        again = [await client.resume(job.token) for job in done]
        texts = await asyncio.gather(*(asyncio.wait_for(_text(job), LIMIT_S) for job in again))
        go_on.set()
        assert await asyncio.wait_for(_text(live), LIMIT_S) == "one two"
    assert texts == ["one two"] * 20


async def _text(job: Any) -> str:
    return "".join([chunk.text async for chunk in job])


async def test_a_token_whose_events_are_gone_says_so(wire: Double) -> None:
    from aiokafka import TopicPartition
    from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete

    async with client_of(wire, reply_partitions=[0]) as client:
        job = await client.publish(BODY)
        end = (await job.result(LIMIT_S)).place[2] + 1
        admin = AIOKafkaAdminClient(bootstrap_servers=wire.bootstrap)
        await admin.start()
        await admin.delete_records({TopicPartition(wire.replies, 0): RecordsToDelete(before_offset=end)})
        await admin.close()
        with pytest.raises(ResumeExpired):
            await client.resume(job.token)
        await (await client.publish(BODY)).result(LIMIT_S)
    async with client_of(wire) as client:  # later events of other jobs are looked through first
        late = await client.resume(job.token)
        with pytest.raises(ResumeExpired):
            await late.result(LIMIT_S)


async def test_a_token_of_another_reply_topic_is_refused(wire: Double) -> None:
    async with client_of(wire) as client:
        with pytest.raises(ClientError, match="other-topic"):
            await client.resume(ResumeToken("other-topic", 0, 0, "acme", "j"))
        with pytest.raises(ClientError, match="partitions"):
            await client.resume(ResumeToken(wire.replies, 99, 0, "acme", "j"))


async def test_a_failed_job_raises_what_the_service_said(wire: Double) -> None:
    async def refusing(job: Job) -> None:
        error = {"code": "model_not_found", "message": "there is no model x", "retriable": False}
        await job.event("failed", error=error)

    wire.script = refusing
    async with client_of(wire) as client:
        job = await client.publish(BODY)
        with pytest.raises(JobFailed, match="there is no model x") as failed:
            await job.result(LIMIT_S)
        assert failed.value.code == "model_not_found" and not failed.value.retriable
        with pytest.raises(JobFailed):
            assert [chunk async for chunk in job] == []


async def test_a_result_that_does_not_come_is_bounded(wire: Double) -> None:
    wire.script = None
    async with client_of(wire) as client:
        job = await client.publish(BODY)
        began = time.monotonic()
        with pytest.raises(ResultTimeout):
            await job.result(0.2)
        assert time.monotonic() - began < 2 and not job.done


async def test_cancel_writes_the_contracts_record(wire: Double) -> None:
    wire.script = None
    async with client_of(wire) as client:
        job = await client.publish(BODY, id="to-cancel-" + wire.pool)
        await job.cancel()
        await until(lambda: any(job.id.encode() in key for key, _ in wire.cancels))
        key, wish = next((key, wish) for key, wish in wire.cancels if job.id.encode() in key)
        assert key == f"acme|{job.id}".encode()
        assert CancelRecord.model_validate(wish).job_id == job.id
        with pytest.raises(InvalidJob):
            await client.cancel("no spaces")


async def test_an_abandoned_chat_is_cancelled(wire: Double) -> None:
    wire.script = None
    async with client_of(wire, model="m") as client:
        with pytest.raises(ResultTimeout):
            await client.chat(MESSAGES, timeout_s=0.2)
        job = await wire.jobs.get()
        await until(lambda: any(wish["job_id"] == job.fields["id"] for _, wish in wire.cancels))


async def test_missing_topics_are_named(wire: Double) -> None:
    with pytest.raises(UnknownTopic, match="no-such-topic"):
        async with Client(wire.bootstrap, reply_topic="no-such-topic"):
            pass
    named = {"pool": "no-such-pool", "tier": "standard"}
    async with Client(wire.bootstrap, tenant="acme", reply_topic=wire.replies, **named) as client:
        began = time.monotonic()
        with pytest.raises(UnknownTopic, match=r"inference\.no-such-pool\.jobs\.standard"):
            await client.publish(BODY)
        assert time.monotonic() - began < 5
    with pytest.raises(UnknownTopic, match="partitions 0 to 2"):
        async with client_of(wire, reply_partitions=[7]):
            pass


async def test_streams_end_when_their_client_is_closed(wire: Double) -> None:
    wire.script = None
    async with client_of(wire) as client:
        job = await client.publish(BODY)
        waiting = asyncio.create_task(job.result())
        await asyncio.sleep(0)
    with pytest.raises(ClientError, match="closed"):
        await asyncio.wait_for(waiting, 5)


async def test_a_stored_output_is_fetched_and_its_digest_checked(wire: Double, stack: TestStack) -> None:
    access = store_of(stack)
    minio = Minio(stack.store_endpoint, "headrace", "headrace-secret", secure=False, region="us-east-1")
    body = orjson.dumps(response("long " * 200_000))
    sha256 = hashlib.sha256(body).hexdigest()

    async def storing(job: Job) -> None:
        import io

        key = f"v1/acme/client-test/{wire.pool}/{job.fields['id']}.json"
        await asyncio.to_thread(minio.put_object, "outputs", key, io.BytesIO(body), len(body))
        ref = {"bucket": "outputs", "key": key, "size": len(body), "sha256": sha256, "content_type": "application/json"}
        if job.fields["id"] == "tampered":
            ref["sha256"] = "0" * 64
        if job.fields["id"] == "gone":
            ref["key"] += ".gone"
        await job.started()
        await job.completed("long " * 200_000, seq=1, output=ref)

    wire.script = storing
    async with client_of(wire, store=access) as client:
        result = await (await client.publish(BODY, id="whole")).result(LIMIT_S)
        assert result.text == "long " * 200_000 and result.output is not None and result.output.size == len(body)
        lazy = await (await client.publish(BODY, id="lazy")).result(LIMIT_S, download=False)
        with pytest.raises(StoreError, match="download"):
            _ = lazy.response
        assert (await lazy.download())["choices"][0]["message"]["content"] == "long " * 200_000
        with pytest.raises(DigestMismatch, match="not what the worker wrote"):
            await (await client.publish(BODY, id="tampered")).result(LIMIT_S)
        with pytest.raises(StoreError, match="refused"):
            await (await client.publish(BODY, id="gone")).result(LIMIT_S)
    async with client_of(wire) as client:
        without = await (await client.publish(BODY, id="no-store")).result(LIMIT_S)
        with pytest.raises(StoreError, match="StoreAccess"):
            await without.download()


async def test_a_body_too_large_for_a_record_is_claim_checked(wire: Double, stack: TestStack) -> None:
    access = store_of(stack)
    minio = Minio(stack.store_endpoint, "headrace", "headrace-secret", secure=False, region="us-east-1")
    large = {"model": "m", "messages": [{"role": "user", "content": "river " * 300_000}]}

    async def answering(job: Job) -> None:
        await job.completed("read", seq=0)

    wire.script = answering
    async with client_of(wire, store=access) as client:
        await (await client.publish(large)).result(LIMIT_S)
    fields = (await wire.jobs.get()).fields
    JobModel.model_validate(fields)
    assert "body" not in fields and fields["input"]["key"].startswith("v1/acme/")
    stored = await asyncio.to_thread(minio.get_object, "outputs", fields["input"]["key"])
    content = stored.read()
    stored.release_conn()
    assert orjson.loads(content) == large and hashlib.sha256(content).hexdigest() == fields["input"]["sha256"]
    async with client_of(wire) as client:
        with pytest.raises(InvalidJob, match="StoreAccess"):
            await client.publish(large)


async def test_first_chunks_arrive_without_delay_of_the_clients(wire: Double) -> None:
    async with client_of(wire) as client:
        delays = []
        for _ in range(20):
            began = time.monotonic()
            job = await client.publish(BODY)
            async for item in job.events():
                if isinstance(item, Chunk):
                    delays.append(time.monotonic() - began)
                    break
            await job.result(LIMIT_S)
    assert sorted(delays)[10] < 0.25, delays
