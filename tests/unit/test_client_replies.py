"""One reading connection for all streams: what one job's records do to it never reaches the others."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from aiokafka import TopicPartition

from client import Client, Closed, InvalidJob
from client.replies import Replies
from client.stream import Stream
from client.submitted import Place

PLACE = TopicPartition("r", 0)


class Consumer:
    """A log of one partition."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.at = 0
        self.fails: BaseException | None = None

    def assign(self, places: object) -> None: ...

    def pause(self, *places: object) -> None: ...

    def seek(self, place: TopicPartition, offset: int) -> None:
        self.at = offset

    def highwater(self, place: TopicPartition) -> int:
        return len(self.log)

    async def end_offsets(self, places: object) -> dict[TopicPartition, int]:
        return {PLACE: len(self.log)}

    async def getmany(self, **_: Any) -> dict[TopicPartition, list[Any]]:
        await asyncio.sleep(0)
        if self.fails is not None:
            raise self.fails
        records, self.at = self.log[self.at :], len(self.log)
        return {PLACE: records} if records else {}

    def put(self, value: bytes | dict[str, Any], key: str = "j") -> None:
        value = value if isinstance(value, bytes) else orjson.dumps(value)
        place = {"partition": 0, "offset": len(self.log)}
        self.log.append(SimpleNamespace(key=key.encode(), value=value, headers=(), **place))


def event(kind: str, job_id: str = "j", **more: Any) -> dict[str, Any]:
    return {"type": kind, "attempt": "A", "seq": 0, "run": 0, "tenant": "acme", "job_id": job_id, **more}


def stream(job_id: str = "j", content: bytes | None = None, tenant: str = "acme", run: int = 0) -> Stream:
    return Stream(tenant, job_id, run, partition=0, offset=0, limit=9, streaming=True, content=content)


async def opened(consumer: Consumer) -> Replies:
    replies = Replies(consumer, "r", 1, [0])
    await replies.start()
    return replies


@pytest.mark.parametrize(
    "value",
    [
        b"x",
        b"[]",
        b"5",
        b"null",
        b"[" * 3000,
        event("chunk", seq=1, offset=0, tokens=1, chunk={"choices": [5]}),
        event("chunk", seq=1, offset=0, tokens=1),
        event("chunk", attempt=[]),
        event("started", attempt=5),
        event("started", seq="a"),
        event("waiting", reason=5),
        {**event("zzz"), "job_id": 5},
    ],
)
async def test_a_record_that_is_no_event_harms_no_stream(value: Any) -> None:
    consumer = Consumer()
    replies = await opened(consumer)
    struck, other = stream(), stream("k")
    replies.open(struck)
    replies.open(other)
    consumer.put(event("started"))
    consumer.put(value)
    consumer.put(event("completed", seq=2))
    consumer.put(event("completed", "k"), "k")
    async with asyncio.timeout(5):
        assert (await struck.end())[1] == 2 and (await other.end())[1] == 3
    await replies.stop()


async def test_a_connection_that_cancels_what_it_waited_for_leaves_nobody_waiting() -> None:
    consumer = Consumer()
    replies = await opened(consumer)
    one = stream()
    replies.open(one)
    consumer.fails = asyncio.CancelledError()
    async with asyncio.timeout(5):
        with pytest.raises(Closed, match="can no longer be read"):
            await one.end()
    await replies.stop()


async def test_other_content_under_the_id_of_an_open_job_is_refused_before_anything_is_sent() -> None:
    client = Client("nowhere:1", tenant="acme", model="m", pool="p", tier="bulk", spread=1)
    client._replies, client._partitions = await opened(Consumer()), [0]
    sent: list[bytes] = []

    async def send(topic: str, key: bytes, value: bytes, headers: object) -> Place:
        sent.append(value)
        return Place(topic, 0, len(sent))

    client._connection.send = send  # type: ignore[method-assign]
    body = {"prompt": "x"}
    first = await client.publish(body, id="j", deadline=60)
    again = await client.publish(body, id="j", deadline=60)  # the same job, whenever it is published
    with pytest.raises(InvalidJob, match=r"^id: job j \(run 0\) of acme is open in this client with other content"):
        await client.publish({"prompt": "y"}, id="j")
    assert len(sent) == 2
    await client.publish({"prompt": "y"}, id="j", run=1)
    await client.publish({"prompt": "y"}, id="j", tenant="globex")
    first.close()
    again.close()
    await client.publish({"prompt": "y"}, id="j")
    assert len(sent) == 5
    await client._replies.stop()


async def test_what_is_not_known_of_a_resumed_job_is_no_conflict() -> None:
    replies = await opened(Consumer())
    replies.open(stream())
    replies.open(stream(content=b"y"))
    with pytest.raises(InvalidJob):
        replies.open(stream(content=b"z"))
    await replies.stop()
