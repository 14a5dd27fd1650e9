"""The flood: one tenant's jobs at a steady rate, whatever becomes of them. A process of its own, so that its work is
not the measuring client's.

`python -m load.fairness.offer OFFER-JSON` prints `ready` once it is connected, begins at the first line on standard
input and ends with it.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import sys
import time
from collections.abc import Iterator

import orjson
from aiokafka import AIOKafkaProducer
from pydantic import BaseModel

from load.fairness.plan import TIER, Writer
from load.flood import Item, flood, producer
from schemas.keys import partition_of
from schemas.names import jobs_topic

# A steady rate, not a crowd ten times a second.
SLICE_S = 0.02
# Records are built from so many templates: most of the speed. Their ids and first words differ.
TEMPLATES = 64
MARK = "00000000000"


class Offer(BaseModel):
    bootstrap: str
    pool: str
    partitions: int
    tenant: str
    run: str
    model: str
    per_s: float
    prompt: int  # tokens
    low: int  # tokens of the output
    high: int


def records(offer: Offer) -> Iterator[Item]:
    """Without end."""
    writer = Writer(offer.run, offer.model)
    chance = random.Random(offer.run)
    key, mark = offer.tenant.encode(), MARK.encode()
    templates = []
    for _ in range(TEMPLATES):
        value = writer.value(offer.tenant, int("1" + MARK), offer.prompt, chance.randint(offer.low, offer.high))
        templates.append(value.split(b"1" + mark))
    for number in itertools.count():
        yield Item(key, (b"1%011d" % number).join(templates[number % TEMPLATES]))


async def run(offer: Offer) -> int:
    """Until it is cancelled, or standard input ends; returns how many were written."""
    publishing: AIOKafkaProducer = await producer(offer.bootstrap)
    places = [(jobs_topic(offer.pool, TIER), partition_of(offer.tenant, offer.partitions))]
    endless = records(offer)
    written = 0
    try:
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        over = asyncio.create_task(asyncio.to_thread(sys.stdin.readline))
        began = time.monotonic()
        while not over.done():
            due = int((time.monotonic() - began) * offer.per_s)
            if due > written:
                written += await flood(publishing, places, itertools.islice(endless, due - written))
            await asyncio.wait({over}, timeout=SLICE_S)
    finally:
        await publishing.stop()
    return written


if __name__ == "__main__":
    print(asyncio.run(run(Offer.model_validate(orjson.loads(sys.argv[1])))), flush=True)
