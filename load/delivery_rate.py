"""How much the delivery room carries: a link and its real process, both on one core, fed with synthetic deltas.

    python -m load.delivery_rate streams [--streams 512] [--rate 98] [--seconds 10]
    python -m load.delivery_rate finals [--seconds 10] [--in-flight 512]

`streams`: every stream gets one token a step, as from an engine; ends when all are acknowledged. `finals`: jobs whose
streams nobody wants, as many as are acknowledged. Prints one JSON object. Needs a broker with the service's topics for
the pool (default `delivery-rate`; made if missing); no engine, no store.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import uvloop
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import TopicAlreadyExistsError

from schemas.names import CHAT, DEAD_LETTERS, USAGE, status_topic
from service.delivery.link import Link
from service.delivery.stream import Stream
from service.frames import Delta, Ended, Head, Pressure, Timing, Usage
from service.settings import DeliverySettings, KafkaSettings, Settings

POOL = "delivery-rate"
REPLIES = f"{POOL}.replies"
TEXT = " water"  # an ordinary token
LEASE_S = 3600.0


class Bench:
    def __init__(self, settings: Settings) -> None:
        self.link = Link(settings, self._ended, self._pressure)
        self.ended = 0
        self.counters: dict[str, float] = {}
        self.unacknowledged = 0
        self._offsets = 0
        self.free = asyncio.Semaphore(0)
        self.in_link = 0.0  # seconds of this loop inside the link's calls
        self.deltas = 0

    def _ended(self, ended: Ended) -> None:
        self.ended += 1
        self.free.release()

    def _pressure(self, pressure: Pressure) -> None:
        self.unacknowledged = max(self.unacknowledged, pressure.unacknowledged)
        for name, value in pressure.counters.items():
            self.counters[name] = self.counters.get(name, 0) + value

    def open(self, stream: bool) -> Stream:
        self._offsets += 1
        head = Head(
            topic=f"inference.{POOL}.jobs.standard",
            partition=self._offsets % 6,
            offset=self._offsets,
            epoch=1,
            origin=f"inference.{POOL}.jobs.standard/0/{self._offsets}",
            job_id=f"rate-{os.getpid()}-{self._offsets}",
            run=0,
            tenant=f"tenant-{self._offsets % 10}",
            tier="standard",
            endpoint=CHAT,
            model="simulated:rate",
            reply_topic=REPLIES,
            reply_partition=None,
            stream=stream,
            progress=False,
            inline_max_bytes=262_144,
            store="auto",
            ttl_days=None,
            metadata=None,
            digest="0" * 64,
            trace={},
            broker_time=time.time(),
        )
        return self.link.open(head, announce=True, prompt_tokens=100)

    def send(self, stream: Stream, finish: str | None = None) -> None:
        delta = [Delta(0, TEXT, 1, finish_reason=finish)]
        start = time.perf_counter()
        stream.send(delta)
        self.in_link += time.perf_counter() - start
        self.deltas += 1

    def end(self, stream: Stream, tokens: int) -> None:
        now = time.time()
        stream.end("completed", Usage(100, tokens), Timing(now - 1, now - 1, now - 1, now - 1, now - 0.9, now, now))


async def prepare(settings: Settings) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=settings.kafka.bootstrap)
    await admin.start()
    for topic, count in ((REPLIES, 6), (status_topic(POOL), 6), (USAGE, 6), (DEAD_LETTERS, 6)):
        with suppress(TopicAlreadyExistsError):
            await admin.create_topics([NewTopic(topic, count, 1)])
    await admin.close()


async def streams(bench: Bench, count: int, rate: float, seconds: float) -> dict[str, Any]:
    """Open loop: the steps come when they are due, whatever delivery makes of them."""
    opened = [bench.open(True) for _ in range(count)]
    steps = int(rate * seconds)
    begin = time.monotonic()
    late = 0.0
    for step in range(steps):
        for stream in opened:
            bench.send(stream, "length" if step == steps - 1 else None)
        due = begin + (step + 1) / rate
        late = max(late, time.monotonic() - due)
        await asyncio.sleep(max(0.0, due - time.monotonic()))
    fed = time.monotonic() - begin
    for stream in opened:
        bench.end(stream, steps)
    while bench.ended < count:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    took = time.monotonic() - begin
    return {
        "tokens": count * steps,
        "tokens_per_s": round(count * steps / fed),
        "fed_s": round(fed, 2),
        "acknowledged_after_s": round(took - fed, 3),
        "latest_step_ms": round(late * 1000, 1),
    }


async def finals(bench: Bench, in_flight: int, seconds: float) -> dict[str, Any]:
    for _ in range(in_flight):
        bench.free.release()
    begin = time.monotonic()
    opened = 0
    while time.monotonic() < begin + seconds:
        await bench.free.acquire()
        stream = bench.open(False)
        for i in range(8):
            bench.send(stream, "length" if i == 7 else None)
        bench.end(stream, 8)
        opened += 1
        if opened % 32 == 0:
            await asyncio.sleep(0)
    while bench.ended < opened:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    took = time.monotonic() - begin
    return {"jobs": opened, "jobs_per_s": round(opened / took), "took_s": round(took, 2)}


async def run(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as state:
        settings = Settings(
            pool=POOL,
            worker=f"rate-{os.getpid()}",
            state_dir=Path(state),
            kafka=KafkaSettings(bootstrap=args.bootstrap),
            delivery=DeliverySettings(),
        )
        await prepare(settings)
        bench = Bench(settings)
        await bench.link.start()
        assert bench.link.pid is not None
        process = psutil.Process(bench.link.pid)
        bench.link.lease(time.monotonic() + LEASE_S)
        here, there = time.process_time(), process.cpu_times()
        begin = time.monotonic()
        if args.what == "streams":
            found = await streams(bench, args.streams, args.rate, args.seconds)
        else:
            found = await finals(bench, args.in_flight, args.seconds)
        wall = time.monotonic() - begin
        after = process.cpu_times()
        worker = time.process_time() - here
        delivery = after.user + after.system - there.user - there.system
        await asyncio.sleep(0.6)  # the last counters
        await bench.link.stop(10.0)
    return {
        "what": args.what,
        **found,
        "cores": sorted(os.sched_getaffinity(0)),
        "worker_cpu": round(worker / wall, 3),
        "delivery_cpu": round(delivery / wall, 3),
        "worker_us_per_delta": round(worker / bench.deltas * 1e6, 2),
        "link_send_us_per_delta": round(bench.in_link / bench.deltas * 1e6, 2),
        "delivery_us_per_delta": round(delivery / bench.deltas * 1e6, 2),
        "most_unacknowledged_bytes": bench.unacknowledged,
        "restarts": bench.link.restarts,
        "counters": {name: round(value) for name, value in sorted(bench.counters.items())},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("streams", "finals"))
    parser.add_argument("--bootstrap", default=KafkaSettings().bootstrap)
    parser.add_argument("--streams", type=int, default=512)
    parser.add_argument("--rate", type=float, default=98.0, help="tokens per second and stream")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--in-flight", type=int, default=512)
    parser.add_argument("--core", type=int, default=0, help="both processes run on this one core")
    args = parser.parse_args()
    os.sched_setaffinity(0, {args.core})
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(json.dumps(runner.run(run(args))))


if __name__ == "__main__":
    main()
