"""The floor of the hops: one record to another process and back over two topics, nothing done to it on the way.

What the service adds to a first token is read beside this: on a machine of few cores the hops themselves cost most.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import sys
import time
import uuid
from collections.abc import AsyncIterator

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

# As in the worker: a jobs consumer's fetch wait and an unlingered first chunk.
FETCH_WAIT_MS = 100
BODY = b"x" * 300
READY_S = 30.0


@contextlib.asynccontextmanager
async def _ends(bootstrap: str, source: str) -> AsyncIterator[tuple[AIOKafkaConsumer, AIOKafkaProducer]]:
    """A reader of `source` from its end, and a writer."""
    reader = AIOKafkaConsumer(bootstrap_servers=bootstrap, enable_auto_commit=False, fetch_max_wait_ms=FETCH_WAIT_MS)
    writer = AIOKafkaProducer(bootstrap_servers=bootstrap, acks="all", linger_ms=0)
    await reader.start()
    await writer.start()
    try:
        part = TopicPartition(source, 0)
        reader.assign([part])
        await reader.seek_to_end(part)
        await reader.position(part)
        yield reader, writer
    finally:
        await writer.stop()
        await reader.stop()


async def answer(bootstrap: str, there: str, back: str) -> None:
    """The other process: sends back what it reads, until an empty record."""
    async with _ends(bootstrap, there) as (reader, writer):
        print("ready", flush=True)
        async for record in reader:
            if not record.value:
                return
            await writer.send(back, record.value, partition=0)


async def measure(bootstrap: str, times: int) -> list[float]:
    """Seconds of each round trip, one at a time."""
    name = uuid.uuid4().hex[:8]
    there, back = f"headrace-echo-{name}-there", f"headrace-echo-{name}-back"
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    try:
        await admin.create_topics([NewTopic(topic, 1, 1) for topic in (there, back)])
        other = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "load.echo", bootstrap, there, back), stdout=asyncio.subprocess.PIPE
        )
        assert other.stdout is not None
        try:
            await asyncio.wait_for(other.stdout.readline(), READY_S)
            async with _ends(bootstrap, back) as (reader, writer):
                trips = []
                for _ in range(times):
                    began = time.perf_counter()
                    await writer.send(there, BODY, partition=0)
                    await asyncio.wait_for(reader.getone(), READY_S)
                    trips.append(time.perf_counter() - began)
                await writer.send_and_wait(there, b"", partition=0)
            await asyncio.wait_for(other.wait(), READY_S)
        finally:
            if other.returncode is None:
                other.kill()
                await other.wait()
        return trips
    finally:
        with contextlib.suppress(Exception):
            await admin.delete_topics([there, back])
        await admin.close()


def p50_ms(trips: list[float]) -> float:
    return round(statistics.median(trips) * 1e3, 2)


if __name__ == "__main__":
    asyncio.run(answer(*sys.argv[1:4]))
