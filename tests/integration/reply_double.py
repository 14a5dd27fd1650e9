"""A test double of the wire: plays the worker's side of the contract, by script, on a real broker and a real store.

It reads job records from a topic of its own and writes whatever events a test's script tells it to, raw, in the order
told. It runs no engine and promises nothing about the service: it is there to put the *client* to the test.
"""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from schemas.fields import at

USAGE = {
    "prompt_tokens": 3,
    "completion_tokens": 2,
    "total_tokens": 5,
    "prompt_tokens_details": {"cached_tokens": 1},
}


@dataclass
class Job:
    """A job record as it arrived, and the means to answer it."""

    fields: dict[str, Any]
    headers: dict[str, bytes]
    key: bytes
    place: tuple[int, int]  # partition and offset of its record
    _send: Callable[[str, int | None, bytes, dict[str, Any]], Awaitable[tuple[int, int]]]
    places: list[tuple[int, int]] = field(default_factory=list)

    async def event(self, kind: str, attempt: str = "A", seq: int = 0, **more: Any) -> None:
        event = {
            "schema_version": 1,
            "type": kind,
            "job_id": self.fields["id"],
            "run": self.fields.get("run", 0),
            "tenant": self.fields["tenant"],
            "at": at(1_900_000_000.0),
            "attempt": attempt,
            "seq": seq,
            **more,
        }
        reply = self.fields["reply"]
        self.places.append(await self._send(reply["topic"], reply.get("partition"), self.fields["id"].encode(), event))

    async def started(self, attempt: str = "A", **more: Any) -> None:
        await self.event("started", attempt, 0, model="m", worker="double", prompt_tokens=3, **more)

    async def chunk(self, text: str, attempt: str = "A", seq: int = 1, **more: Any) -> None:
        """One token, whose number among the tokens is seq - 1."""
        data = {
            "id": f"chatcmpl-{attempt}",
            "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}],
        }
        await self.event("chunk", attempt, seq, offset=seq - 1, tokens=1, chunk=data, **more)

    async def completed(self, text: str, attempt: str = "A", seq: int = 1, **more: Any) -> None:
        ending = {"response": response(text)} if "output" not in more else {}
        digest = hashlib.sha256(text.encode()).hexdigest()
        await self.event(
            "completed",
            attempt,
            seq,
            finish_reasons=["stop"],
            usage=USAGE,
            timings={"queue_ms": 1.0, "prefill_ms": 2.0, "first_token_ms": 3.0, "total_ms": 9.0},
            text_sha256=[digest],
            **ending,
            **more,
        )


def response(text: str) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    return {"id": "chatcmpl-A", "choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": USAGE}


async def ordinary(job: Job) -> None:
    """What most tests need of a worker: started, two chunks, completed."""
    prompt = job.fields["body"]["messages"][-1]["content"]
    await job.started()
    await job.chunk("Hello ", seq=1)
    await job.chunk(prompt, seq=2)
    await job.completed(f"Hello {prompt}", seq=3, metadata=job.fields.get("metadata"))


@dataclass
class Double:
    """The topics of one test and the jobs that arrived on them. `script` answers each job; None leaves them alone."""

    bootstrap: str
    pool: str
    replies: str
    cancels: list[tuple[bytes, dict[str, Any]]]
    jobs: asyncio.Queue[Job]
    producer: AIOKafkaProducer
    script: Callable[[Job], Awaitable[None]] | None = None

    async def send(self, topic: str, partition: int | None, key: bytes, event: dict[str, Any]) -> tuple[int, int]:
        headers = [
            (short, str(event[name]).encode()) for short, name in (("t", "type"), ("a", "attempt"), ("s", "seq"))
        ]
        written = await self.producer.send_and_wait(
            topic, orjson.dumps(event), key=key, partition=partition, headers=headers
        )
        return written.partition, written.offset


@asynccontextmanager
async def double(bootstrap: str, partitions: int = 3) -> AsyncIterator[Double]:
    name = f"client-{uuid.uuid4().hex[:8]}"
    tiers = [f"inference.{name}.jobs.{tier}" for tier in ("interactive", "standard", "bulk")]
    replies = f"{name}.replies"
    cancel = "inference.cancel"
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    own = [*tiers, replies]
    if cancel not in await admin.list_topics():  # a stack whose topics were never applied
        own.append(cancel)
    await admin.create_topics([NewTopic(topic, partitions, 1) for topic in own])
    consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, enable_auto_commit=False)
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap, acks="all")
    await consumer.start()
    await producer.start()
    made = Double(bootstrap, name, replies, [], asyncio.Queue(), producer)
    places = [TopicPartition(topic, number) for topic in tiers for number in range(partitions)]
    # The cancel topic is everybody's: however many partitions it was given, read from its present end.
    places += [TopicPartition(cancel, number) for number in range(len(await producer.partitions_for(cancel)))]
    consumer.assign(places)
    ends = await consumer.end_offsets(places)
    for place in places:
        consumer.seek(place, ends[place])

    async def answer() -> None:
        answers: set[asyncio.Task[None]] = set()
        while True:
            for place, records in (await consumer.getmany(timeout_ms=200)).items():
                for record in records:
                    if place.topic == cancel:
                        made.cancels.append((record.key, orjson.loads(record.value)))
                        continue
                    job = Job(
                        orjson.loads(record.value),
                        dict(record.headers),
                        record.key,
                        (record.partition, record.offset),
                        made.send,
                    )
                    made.jobs.put_nowait(job)
                    if made.script is not None:
                        answers.add(task := asyncio.ensure_future(made.script(job)))
                        task.add_done_callback(answers.discard)

    answering = asyncio.create_task(answer())
    try:
        yield made
    finally:
        answering.cancel()
        await asyncio.wait((answering,))
        await consumer.stop()
        await producer.stop()
        await admin.delete_topics(own)
        await admin.close()
