"""Records onto jobs topics as fast as the broker takes them: batches built here, several partitions in flight.

Owns batching and the placing on partitions. What the records hold is the caller's business.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, NamedTuple

from aiokafka import AIOKafkaProducer

BATCH_BYTES = 512 * 1024
# Batches on their way: enough to keep one broker busy, few enough that memory stays flat.
IN_FLIGHT = 8

Headers = Sequence[tuple[str, bytes | None]]


class Item(NamedTuple):
    """One record to publish."""

    key: bytes | None
    value: bytes | None
    headers: Headers = ()


Change = Callable[[Any], None]  # of a closed batch builder


async def producer(bootstrap: str, compression: str | None = "lz4") -> AIOKafkaProducer:
    """Started; acks=all. Raises KafkaError."""
    made = AIOKafkaProducer(
        bootstrap_servers=bootstrap,
        acks="all",
        max_batch_size=BATCH_BYTES,
        max_request_size=4 * BATCH_BYTES,
        compression_type=compression,
        linger_ms=0,
    )
    await made.start()
    return made


async def flood(
    producer: AIOKafkaProducer,
    places: Sequence[tuple[str, int]],
    items: Iterable[Item],
    change: Change | None = None,
) -> int:
    """Spreads `items` over (topic, partition) `places`, a batch each in turn; returns how many were acknowledged.

    `change` sees every batch when it is full. Raises KafkaError.
    """
    flying: set[asyncio.Task[int]] = set()
    written = 0
    turn = 0
    left = iter(items)
    held: Item | None = next(left, None)
    while held is not None:
        builder, size = producer.create_batch(), 0
        now = int(time.time() * 1000)
        while held is not None:
            if builder.append(timestamp=now, key=held.key, value=held.value, headers=list(held.headers)) is None:
                break
            size += 1
            held = next(left, None)
        topic, partition = places[turn % len(places)]
        turn += 1
        if not size:
            raise ValueError("a record that no batch can hold")
        builder.close()
        if change is not None:
            change(builder)
        flying.add(asyncio.create_task(_send(producer, builder, topic, partition, size)))
        if len(flying) >= IN_FLIGHT:
            done, flying = await asyncio.wait(flying, return_when=asyncio.FIRST_COMPLETED)
            written += sum(task.result() for task in done)
    for task in flying:
        written += await task
    return written


async def _send(producer: AIOKafkaProducer, builder: Any, topic: str, partition: int, size: int) -> int:
    acknowledged: Awaitable[Any] = await producer.send_batch(builder, topic, partition=partition)
    await acknowledged
    return size
