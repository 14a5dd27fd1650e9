"""The bare engine on a scenario's prompts: `AsyncLLM` beside the service in one process, `LLM.generate` in its own.

`python -m load.bare SCENARIO-JSON ROUNDS` runs `LLM.generate` and prints one JSON line a round.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from load.overhead import Round
from load.scenario import Planned, Scenario, plan
from schemas.names import CHAT, COMPLETIONS
from service.engine import bounds
from service.engine.vllm.engine import VllmEngine
from service.frames import Head
from service.job import Job, Place, Record, Ticket
from service.settings import Settings

TENANT = "acme"


def planned(scenario: Scenario, model: str) -> list[Planned]:
    return [job for part in plan(scenario, "bare", model) for job in part]


def as_job(planned: Planned) -> Job:
    """What the service's intake would make of it, as far as rendering looks."""
    place = Place("inference.bench.jobs.standard", 0, 0)
    head = Head(
        topic=place.topic,
        partition=place.partition,
        offset=place.offset,
        epoch=0,
        origin=str(place),
        job_id=planned.id,
        run=0,
        tenant=TENANT,
        tier="standard",
        endpoint=CHAT if "messages" in planned.body else COMPLETIONS,
        model=planned.body["model"],
        reply_topic="",
        reply_partition=None,
        stream=True,
        progress=False,
        inline_max_bytes=0,
        store="never",
        ttl_days=None,
        metadata=None,
        digest="",
        trace={},
        broker_time=0.0,
    )
    record = Record(place, None, b"", (), 0)
    return Job(ticket=Ticket(place, 0), record=record, head=head, body=planned.body, received=time.time())


async def stream(engine: VllmEngine, jobs: Sequence[Planned], in_flight: int) -> Round:
    """One round of `AsyncLLM`: same rendering, arguments, number in flight; tokens only counted."""
    core: Any = engine.async_llm
    slots = asyncio.Semaphore(in_flight)

    async def one(number: int, job: Planned) -> int:
        async with slots:
            prepared = await engine.prepare(as_job(job))
            tokens = 0
            async for output in core.generate(
                prepared.request.input, prepared.request.params, f"bare-{time.time_ns()}"
            ):
                tokens += sum(len(choice.token_ids) for choice in output.outputs)
            return tokens

    cpu, began = time.process_time(), time.perf_counter()
    tokens = sum(await asyncio.gather(*(one(n, job) for n, job in enumerate(jobs))))
    return Round("A", tokens, time.perf_counter() - began, time.process_time() - cpu)


async def first_tokens(engine: VllmEngine, jobs: Sequence[Planned]) -> list[float]:
    """Seconds from request to first output, one request in flight; rendering included."""
    core: Any = engine.async_llm
    delays = []
    for job in jobs:
        began = time.perf_counter()
        first = None
        prepared = await engine.prepare(as_job(job))
        async for _ in core.generate(prepared.request.input, prepared.request.params, f"bare-{time.time_ns()}"):
            if first is None:
                first = time.perf_counter() - began
        assert first is not None
        delays.append(first)
    return delays


def generate(scenario: Scenario, rounds: int) -> None:
    """`LLM.generate` with the engine arguments of the worker, as far as it knows them."""
    settings = Settings()
    settings.engine.max_num_seqs = bounds.slots(settings.engine)  # as the worker's engine
    from service.engine.vllm import arguments

    forced, defaults = arguments.environment(settings.engine, Path("/dev/null"))
    forced.pop("VLLM_LOGGING_CONFIG_PATH")
    os.environ.update(forced)
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM, SamplingParams

    from service.engine.vllm import compat

    wanted = arguments.arguments(
        settings.engine, compat.is_cpu(), arguments.cpu_flags() if compat.is_cpu() else frozenset()
    )
    for name in ("enable_log_requests", "stream_interval", "max_num_queued_reqs"):
        wanted.pop(name)
    llm = LLM(**wanted)
    jobs = planned(scenario, settings.engine.served_name)
    params = [
        SamplingParams(
            max_tokens=job.body["max_tokens"], min_tokens=job.body["min_tokens"], temperature=0, ignore_eos=True
        )
        for job in jobs
    ]
    prompts = [job.prompt for job in jobs]
    llm.generate(prompts[:8], params[:8], use_tqdm=False)
    for _ in range(rounds):
        began = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        wall = time.perf_counter() - began
        tokens = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
        sys.stdout.write(orjson.dumps({"tokens": tokens, "wall_s": wall}).decode() + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    generate(Scenario.model_validate(orjson.loads(sys.argv[1])), int(sys.argv[2]))
