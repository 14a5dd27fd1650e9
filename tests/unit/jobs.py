"""Jobs for unit tests, without intake or broker."""

from __future__ import annotations

import time
from typing import Any

from service.frames import Head
from service.job import Job, Place, Record, Ticket


def job(
    number: int = 0,
    *,
    tenant: str = "acme",
    tier: str = "standard",
    prompt: str = "hello",
    partition: int = 0,
    deadline: float | None = None,
    not_before: float | None = None,
    progress: bool = False,
    **body: Any,
) -> Job:
    place = Place(f"inference.default.jobs.{tier}", partition, number)
    record = Record(place, tenant.encode(), b"x" * 200, (), int(time.time() * 1000))
    head = Head(
        topic=place.topic,
        partition=place.partition,
        offset=place.offset,
        epoch=1,
        origin=str(place),
        job_id=f"job-{number}",
        run=0,
        tenant=tenant,
        tier=tier,
        endpoint="/v1/completions",
        model="m",
        reply_topic="inference.replies",
        reply_partition=None,
        stream=True,
        progress=progress,
        inline_max_bytes=1 << 18,
        store="auto",
        ttl_days=None,
        metadata=None,
        digest="0" * 64,
        trace={},
        broker_time=time.time(),
    )
    return Job(
        ticket=Ticket(place, 1),
        record=record,
        head=head,
        body={"model": "m", "prompt": prompt, "max_tokens": 8, **body},
        received=time.time(),
        deadline=deadline,
        not_before=not_before,
    )
