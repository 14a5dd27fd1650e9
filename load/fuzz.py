"""Hostile records through a real worker: no crash, and each record answered or among the dead letters.

The count is made from the log alone, once everything is committed: each record's origin has a status record, which
names a terminal event that lies where it says, or a dead letter that names the origin. Owns the joining; the records
are `load/hostile.py`'s.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import orjson
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError
from aiokafka.record.util import calc_crc32c

from consumers import lenient
from infra.progress import Progress
from load.arena import Arena, Spawn
from load.flood import flood, producer
from load.group import Group
from load.hostile import BROKEN_BYTES, BROKEN_NAME, items
from schemas.events import TERMINAL
from schemas.names import DEAD_LETTERS, H_ORIGIN, H_REASON, REPLIES, TIERS, jobs_topic, status_topic

POOL = "fuzz"
PARTITIONS = 6  # of the jobs topics, and no more than shared topics have (service/topics.py)
# Seconds without any progress of the group before the run is given up.
STUCK_S = 60.0
POLL_S = 1.0
READ_MS = 1000
# Of a record batch of format 2: the checksum, and what it covers.
CRC, COVERED = slice(17, 21), 21

Say = Callable[[str], None]


@dataclass(slots=True)
class Found:
    """What the log holds after the run. Places are "topic/partition/offset"."""

    status: dict[str, dict[str, Any]] = field(default_factory=dict)  # by origin
    again: int = 0  # further status records of one origin
    terminals: dict[str, str] = field(default_factory=dict)  # by place → job id
    letters: Counter[str] = field(default_factory=Counter)  # by origin
    kinds: Counter[str] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)


async def run(spawn: Spawn, count: int, seed: int, say: Say, show: Progress) -> dict[str, Any]:
    """The whole run; returns what the command prints. Raises ArenaFailed, KafkaError."""
    environment = {
        "HEADRACE_ENGINE__KIND": "simulated",
        "HEADRACE_ENGINE__MAX_NUM_SEQS": "256",
        "HEADRACE_ENGINE__SIM_STEP_BASE_S": "0.001",
        "HEADRACE_ENGINE__SIM_STEP_PER_SEQ_S": "0.0",
        "HEADRACE_LOG_LEVEL": "WARNING",
    }
    lenient.install()  # this process reads its own dead letters back
    async with Arena(spawn, POOL, partitions=PARTITIONS, show=show, environment=environment) as arena:
        worker = await arena.start("eater")
        say(f"worker ready after {arena.start_s:.1f} s; logs in {arena.folder / 'logs'}")
        pid, delivery = worker.process.pid, arena.delivery("eater")
        places = [(jobs_topic(POOL, tier), number) for tier in TIERS for number in range(PARTITIONS)]
        began = time.monotonic()
        model = arena.settings.engine.served_name
        published = await _publish(arena.bootstrap, places, count, seed, model)
        say(f"{published} records published in {time.monotonic() - began:.1f} s")
        rested = await _rest(arena, say)
        took = time.monotonic() - began
        found = await _read(arena.bootstrap)
        crashes = int(worker.process.returncode is not None or worker.process.pid != pid)
        same = arena.delivery("eater") if not crashes else None
        restarts = int(same is None or delivery is None or same.pid != delivery.pid)
        report = _report(found, published, took, rested, crashes, restarts)
        report["tracebacks"] = worker.log.read_text(errors="replace").count("Traceback")
        arena.keep = report["verdict"] != "pass" or report["tracebacks"] > 0
        return {**report, "seed": seed}


async def _publish(bootstrap: str, places: list[tuple[str, int]], count: int, seed: int, model: str) -> int:
    # Uncompressed: the names of headers are broken in the finished batch.
    publishing = await producer(bootstrap, compression=None)
    try:
        run = f"z{time.time_ns() // 1_000_000}"
        return await flood(publishing, places, items(count, seed, run, model), change=_break_names)
    finally:
        await publishing.stop()


def _break_names(builder: Any) -> None:
    """Header names that are no UTF-8, which the client library would not write."""
    data = builder._build()
    if BROKEN_NAME in data:
        patched = bytearray(bytes(data).replace(BROKEN_NAME, BROKEN_BYTES))
        patched[CRC] = calc_crc32c(bytes(patched[COVERED:])).to_bytes(4, "big")
        builder._buffer = patched


async def _rest(arena: Arena, say: Say) -> bool:
    """Until everything is committed as finished; False if nothing moves any more, or the worker is gone."""
    consumer = AIOKafkaConsumer(bootstrap_servers=arena.bootstrap, enable_auto_commit=False)
    await consumer.start()
    group = Group(arena.bootstrap, POOL)
    last: list[str] = []
    moved = told = time.monotonic()
    try:
        while arena.workers["eater"].process.returncode is None:
            try:
                behind = await group.behind(consumer, PARTITIONS)
            except (KafkaError, TimeoutError) as problem:
                behind = [repr(problem)]
            if not behind:
                return True
            now = time.monotonic()
            if behind != last:
                last, moved = behind, now
            elif now - moved > STUCK_S:
                break
            if now - told > 10.0:
                told = now
                say(f"  {len(behind)} partitions are not done, the first: {behind[0][:100]}")
            await asyncio.sleep(POLL_S)
    finally:
        await group.close()
        await consumer.stop()
    say(f"  ! not at rest: {'; '.join(last)[:500]}")
    return False


async def _read(bootstrap: str) -> Found:
    """Everything that came out, from the beginning of the topics to their end."""
    found = Found()
    consumer = AIOKafkaConsumer(
        bootstrap_servers=bootstrap,
        enable_auto_commit=False,
        auto_offset_reset="earliest",
        max_partition_fetch_bytes=4 << 20,
    )
    await consumer.start()
    try:
        topics = (REPLIES, DEAD_LETTERS, status_topic(POOL))
        tps = [TopicPartition(topic, number) for topic in topics for number in range(PARTITIONS)]
        consumer.assign(tps)
        ends = await consumer.end_offsets(tps)
        left = {tp for tp in tps if ends[tp]}
        while left:
            for tp, records in (await consumer.getmany(timeout_ms=READ_MS, max_records=5000)).items():
                for record in records:
                    _note(found, tp, record)
            left = {tp for tp in left if await consumer.position(tp) < ends[tp]}
    finally:
        await consumer.stop()
    return found


def _note(found: Found, tp: TopicPartition, record: Any) -> None:
    if tp.topic == DEAD_LETTERS:
        headers = {name: value or b"" for name, value in record.headers}
        found.letters[headers.get(H_ORIGIN, b"").decode()] += 1
        found.codes[f"dead {headers.get(H_REASON, b'').decode()}"] += 1
        return
    if record.value is None:
        return
    told = orjson.loads(record.value)
    if tp.topic == REPLIES:
        if told["type"] in TERMINAL:
            found.terminals[f"{tp.topic}/{tp.partition}/{record.offset}"] = told["job_id"]
            found.codes[(told.get("error") or {}).get("code", told["type"])] += 1
    elif told["origin"] in found.status:
        found.again += 1
    else:
        found.status[told["origin"]] = told
        found.kinds[told["kind"]] += 1


def _report(found: Found, published: int, took: float, rested: bool, crashes: int, restarts: int) -> dict[str, Any]:
    answered = buried = neither = 0
    for origin, told in found.status.items():
        terminal = told.get("terminal")
        if terminal:
            place = f"{terminal['topic']}/{terminal['partition']}/{terminal['offset']}"
            here = found.terminals.get(place) == told["job_id"]
            answered += here
            neither += not here
        elif found.letters[origin]:
            buried += 1
        else:
            neither += 1
    internal = found.codes["internal"] + found.codes["dead internal"]
    good = (
        rested
        and answered + buried == published == len(found.status)
        and not (crashes or restarts or neither or internal)
    )
    return {
        "bench": "fuzz",
        "records": published,
        "answered": answered,
        "dead_letters": buried,
        "neither": neither,
        "missing": published - len(found.status),
        "told_twice": found.again,
        "terminals_on_the_log": len(found.terminals),
        "letters_on_the_log": found.letters.total(),
        "internal": internal,
        "crashes": crashes,
        "delivery_restarts": restarts,
        "at_rest": rested,
        "kinds": dict(found.kinds.most_common()),
        "codes": dict(found.codes.most_common()),
        "took_s": round(took, 1),
        "records_per_s": round(published / took, 1) if took else None,
        "verdict": "pass" if good else "fail",
    }
