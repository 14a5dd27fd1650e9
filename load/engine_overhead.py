"""What the whole service costs over the bare engine, in one run on one machine (`headrace bench engine-overhead`).

The worker runs inside this process, so both sides use one and the same `AsyncLLM`: rounds of the bare engine (A) while
the service idles, and of the service (B: client process → Kafka → worker → delivery process → Kafka → client process),
in the order A B B A …; the local stack and the delivery process are up in every round.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import orjson
import psutil

from load import bare, echo, overhead
from load.generator import scaled
from load.overhead import Round
from load.scenario import Scenario
from service.app import Worker
from service.engine.vllm.engine import VllmEngine
from service.settings import Settings

THRESHOLD = 0.95
# Seconds: a generator's connection, one round, and one round of LLM.generate with its engine's start.
READY_S, ROUND_S, LLM_S = 30.0, 180.0, 300.0
FIRST_TOKEN_JOBS = 100
# A round is to last so long (seconds): long beside its ends, short enough for the whole to end within ten minutes.
FILL_S = 15.0
MAX_JOBS = 4000
ECHO_TRIPS = 200

Say = Callable[[str], None]


class BenchFailed(Exception):
    """A round did not do what it was measured for; the message says which and why."""


class Load:
    """A generator process that runs its scenario once for each `round()`."""

    def __init__(self, name: str, options: list[str], bootstrap: str, model: str) -> None:
        self._command = [sys.executable, "-m", "load.generator", name, "--wait", "--json", "--rounds", "1000"]
        self._command += ["--bootstrap", bootstrap, "--model", model, *options]

    async def __aenter__(self) -> Load:
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(*self._command, stdin=pipe, stdout=pipe)
        await self._line(READY_S)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), 5)
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    async def round(self) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(b"go\n")
        report = await self._line(ROUND_S)
        if report["completed"] != report["planned"] or report["duplicated"] or report["seq_gaps"]:
            raise BenchFailed(f"a round of the service did not complete every job once: {report}")
        return report

    async def _line(self, deadline_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = await asyncio.wait_for(self._process.stdout.readline(), deadline_s)
        if not line:
            raise BenchFailed(f"the load generator ended with {await self._process.wait()}; its lines above say why")
        report: dict[str, Any] = orjson.loads(line)
        return report


@contextlib.asynccontextmanager
async def _worker(settings: Settings) -> AsyncIterator[Worker]:
    worker = Worker(settings)
    await worker.start()
    try:
        yield worker
    finally:
        await worker.stop(drain_s=0.0)


async def run(settings: Settings, *, pairs: int, jobs: int, output_tokens: int, say: Say) -> dict[str, Any]:
    """The whole measurement; returns what the command prints as its last line. `jobs` = 0: as many as fill a round.

    Raises BenchFailed.
    """
    began = time.monotonic()
    model = settings.engine.served_name
    in_flight = int(settings.engine.max_num_seqs * settings.engine.overfill)
    scenario = scaled(Scenario.load("engine-overhead"), jobs=jobs or 2 * in_flight, output_tokens=output_tokens)
    say(f"LLM.generate: {scenario.jobs} prompts, {output_tokens} tokens each, in a process of its own …")
    offline = await _llm_generate(scenario)
    if not jobs:
        speed = statistics.median(r.tokens_per_s for r in offline)
        jobs = max(2 * in_flight, min(MAX_JOBS, round(speed * FILL_S / output_tokens)))
        scenario = scaled(scenario, jobs=jobs)
    say("AsyncLLM and the service: starting the worker …")
    async with _worker(settings) as worker:
        engine = cast(VllmEngine, worker.engine.current)
        planned = bare.planned(scenario, model)
        options = ["--jobs", str(jobs), "--output-tokens", str(output_tokens)]
        async with Load("engine-overhead", options, settings.kafka.bootstrap, model) as load:
            say(f"warm-up, then {pairs} pairs of rounds with {jobs} jobs each …")
            await bare.stream(engine, planned, in_flight)
            await load.round()
            rounds = []
            for number, side in enumerate(overhead.order(pairs)):
                one = await (bare.stream(engine, planned, in_flight) if side == "A" else _service(worker, load))
                rounds.append(one)
                name = "bare   " if side == "A" else "service"
                say(f"round {number + 1:>2} {name} {one.tokens_per_s:8.1f} tokens/s in {one.wall_s:.1f} s")
        first = scaled(Scenario.load("first-token"), jobs=FIRST_TOKEN_JOBS)
        say(f"first token, one job in flight, {FIRST_TOKEN_JOBS} jobs …")
        bare_first = await bare.first_tokens(engine, bare.planned(first, model))
        async with Load("first-token", ["--jobs", str(FIRST_TOKEN_JOBS)], settings.kafka.bootstrap, model) as load:
            service_first = (await load.round())["first_token_ms"]["p50"]
        trips = await echo.measure(settings.kafka.bootstrap, ECHO_TRIPS)
    summary = overhead.summary(rounds, THRESHOLD)
    async_llm = statistics.median(r.tokens_per_s for r in rounds if r.side == "A")
    service = statistics.median(r.tokens_per_s for r in rounds if r.side == "B")
    bare_p50 = statistics.median(bare_first) * 1e3
    return {
        "ratio_vs_async_llm": summary["ratio"],
        "ratio_ci95": summary["ratio_ci95"],
        "threshold": THRESHOLD,
        "verdict": "pass" if summary["ratio_ci95"][1] >= THRESHOLD else "fail",
        "verdict_whole_interval": summary["verdict"],
        "ratio_vs_llm_generate": round(service / statistics.median(r.tokens_per_s for r in offline), 4),
        "added_cpu_us_per_token": summary["added_cpu_us_per_token"],
        "bare_cpu_us_per_token": round(
            statistics.median(r.cpu_us_per_token for r in rounds if r.side == "A" and r.cpu_us_per_token), 1
        ),
        "added_first_token_ms_p50": round(service_first - bare_p50, 2),
        "first_token_ms_p50": {"bare": round(bare_p50, 2), "service": service_first},
        "echo_hops_ms_p50": echo.p50_ms(trips),
        "tokens_per_s": {
            "llm_generate": round(statistics.median(r.tokens_per_s for r in offline), 1),
            "async_llm": round(async_llm, 1),
            "service": round(service, 1),
        },
        "pairs": summary["pairs"],
        "runs": summary["rounds"],
        "llm_generate_runs": [round(r.tokens_per_s, 1) for r in offline],
        "workload": {"jobs": jobs, "output_tokens": output_tokens, "in_flight": in_flight, "model": model},
        "engine": worker.engine.capacity.version,
        "seconds": round(time.monotonic() - began, 1),
    }


async def _service(worker: Worker, load: Load) -> Round:
    """One round of the service; its CPU time is that of this process and of the delivery process."""
    delivery = psutil.Process(worker.link.pid) if worker.link.pid else None
    cpu, other = time.process_time(), _cpu_s(delivery)
    report = await load.round()
    spent = time.process_time() - cpu + _cpu_s(delivery) - other
    return Round("B", report["completion_tokens"], report["wall_s"], spent)


def _cpu_s(process: psutil.Process | None) -> float:
    if process is None:
        return 0.0
    times = process.cpu_times()
    return float(times.user + times.system)


async def _llm_generate(scenario: Scenario, rounds: int = 2) -> list[Round]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "load.bare", scenario.model_dump_json(), str(rounds)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, errors = await asyncio.wait_for(process.communicate(), LLM_S)
    except TimeoutError:
        process.kill()
        await process.wait()
        raise BenchFailed(f"LLM.generate did not end within {LLM_S:g} s") from None
    lines = [orjson.loads(line) for line in out.splitlines() if line.startswith(b"{")]
    if len(lines) != rounds:
        raise BenchFailed(f"LLM.generate failed: {errors.decode(errors='replace').strip().splitlines()[-1:]}")
    return [Round("A", line["tokens"], line["wall_s"]) for line in lines]
