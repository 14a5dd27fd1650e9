"""The load generator: publishes a scenario's jobs, reads every event back, and reports in one JSON line what it saw.

A process of its own, so that its work is not the service's: `python -m load.generator SCENARIO --bootstrap HOST:PORT`.
With `--wait` it prints `{"ready": true}` once it is connected and begins at the line `go` on standard input.
Raw aiokafka on both sides: it measures the service, not the client library.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import resource
import sys
import threading
import time
import uuid
from collections.abc import Iterable
from typing import Annotated, Any, TextIO

import orjson
import typer
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.errors import KafkaError

from load.scenario import Closed, Planned, Scenario, ScenarioError, plan, record
from load.tally import Tally
from schemas.names import REPLIES, jobs_topic
from schemas.security import PLAINTEXT, KafkaSecurity
from service.settings import Settings

FAILED, USAGE, UNREACHABLE = 1, 2, 3
CONNECT_S = 10.0
# Milliseconds one poll waits at most: how late the end of the time limit may be noticed.
POLL_MS = 200
# Records handled between two turns of the publishers.
BATCH = 2000
# Events that still come after the last job has ended are worth a short look: late terminals would be doubles.
LINGER_S = 0.5


class GeneratorError(Exception):
    """One line saying why no load can be generated; `code` is the process's exit code."""

    def __init__(self, message: str, code: int = UNREACHABLE) -> None:
        super().__init__(message)
        self.code = code


class Generator:
    """One connection for any number of runs. An async context manager."""

    def __init__(
        self,
        bootstrap: str,
        *,
        pool: str = "default",
        reply_topic: str = REPLIES,
        security: KafkaSecurity = PLAINTEXT,
    ) -> None:
        self._bootstrap = bootstrap
        self._security = security
        self._pool = pool
        self._reply_topic = reply_topic
        self._places: list[TopicPartition] = []

    async def __aenter__(self) -> Generator:
        connection = {"bootstrap_servers": self._bootstrap, **self._security.arguments()}
        self._consumer = AIOKafkaConsumer(
            **connection,
            enable_auto_commit=False,
            fetch_max_bytes=50 << 20,
            max_partition_fetch_bytes=8 << 20,
        )
        self._producer = AIOKafkaProducer(
            **connection, acks="all", max_batch_size=262_144, linger_ms=0, compression_type="lz4"
        )
        try:
            async with asyncio.timeout(CONNECT_S):
                await self._consumer.start()
                await self._producer.start()
                topics = await self._consumer.topics()
                if self._reply_topic not in topics:
                    raise GeneratorError(f"there is no topic {self._reply_topic}: run `headrace topics apply`")
                partitions = await self._producer.partitions_for(self._reply_topic)
        except (KafkaError, TimeoutError):
            await self.__aexit__()
            raise GeneratorError(f"no Kafka broker answers at {self._bootstrap}") from None
        except BaseException:
            await self.__aexit__()
            raise
        self._topics = topics
        self._places = [TopicPartition(self._reply_topic, number) for number in sorted(partitions)]
        self._consumer.assign(self._places)
        return self

    async def __aexit__(self, *_: object) -> None:
        for connection in (self._producer, self._consumer):
            stopping = asyncio.create_task(connection.stop())
            await asyncio.wait((stopping,), timeout=5)

    async def run(self, scenario: Scenario, model: str, run: str | None = None) -> dict[str, Any]:
        """Runs a scenario once and returns its report. Raises GeneratorError."""
        run = run or uuid.uuid4().hex[:10]
        for load in scenario.tenants:
            if jobs_topic(self._pool, load.tier) not in self._topics:
                raise GeneratorError(
                    f"there is no topic {jobs_topic(self._pool, load.tier)}: run `headrace topics apply`"
                )
        ends = await self._consumer.end_offsets(self._places)
        for place in self._places:
            self._consumer.seek(place, ends[place])
        parts = plan(scenario, run, model)
        tally = Tally(_names(scenario))
        freed = [
            asyncio.Semaphore(load.arrivals.in_flight if isinstance(load.arrivals, Closed) else 0)
            for load in scenario.tenants
        ]
        finished = asyncio.Event()
        cpu = _cpu_s()
        began, began_at = time.monotonic(), time.time()
        tasks: set[asyncio.Task[Any]] = {
            asyncio.create_task(self._read(tally, f"{run}-".encode(), freed, scenario.jobs, finished)),
            asyncio.create_task(finished.wait()),
            *(
                asyncio.create_task(self._publish(scenario, jobs, tally, freed[n], began))
                for n, jobs in enumerate(parts)
            ),
        }
        try:
            await _until(finished, tasks, began + scenario.limit_s)
            await asyncio.sleep(LINGER_S)
        except KafkaError as error:
            raise GeneratorError(f"the broker at {self._bootstrap} went away: {type(error).__name__}") from error
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        return {
            "scenario": scenario.name,
            "run": run,
            "began_at": round(began_at, 3),
            "planned": scenario.jobs,
            **tally.report(),
            "generator_cpu_s": round(_cpu_s() - cpu, 3),
        }

    async def _publish(
        self, scenario: Scenario, jobs: Iterable[Planned], tally: Tally, freed: asyncio.Semaphore, began: float
    ) -> None:
        """One tenant's jobs at their times. A failed send ends the run: its job could not be counted."""
        acknowledged: set[asyncio.Future[Any]] = set()
        for job in jobs:
            load = scenario.tenants[job.load]
            if job.at_s is None:
                await freed.acquire()
            elif (ahead := began + job.at_s - time.monotonic()) > 0:
                await asyncio.sleep(ahead)
            value = record(scenario, job, self._reply_topic)
            tally.published(job.id, job.load, time.monotonic())
            sent = await self._producer.send(jobs_topic(self._pool, load.tier), value, key=load.tenant.encode())
            acknowledged.add(sent)
            if len(acknowledged) >= 1000:
                done = {one for one in acknowledged if one.done()}
                for one in done:
                    one.result()
                acknowledged -= done
        await asyncio.gather(*acknowledged)

    async def _read(
        self, tally: Tally, prefix: bytes, freed: list[asyncio.Semaphore], jobs: int, finished: asyncio.Event
    ) -> None:
        while True:
            for place, records in (await self._consumer.getmany(timeout_ms=POLL_MS, max_records=BATCH)).items():
                now = time.monotonic()
                for one in records:
                    if one.value is None or not (one.key or b"").startswith(prefix):
                        continue
                    load = tally.take(orjson.loads(one.value), place.partition, len(one.value), now)
                    if load is not None:
                        freed[load].release()
            if tally.ended >= jobs:
                finished.set()


async def _until(finished: asyncio.Event, tasks: set[asyncio.Task[Any]], limit: float) -> None:
    """Until `finished`, or the monotonic time `limit`. Raises what a task failed with, or loops would wait for it."""
    pending = tasks
    while not finished.is_set() and (left := limit - time.monotonic()) > 0:
        done, pending = await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()


def _names(scenario: Scenario) -> list[str]:
    """The parts by tenant; a tenant with several gets numbered ones."""
    names: list[str] = []
    for load in scenario.tenants:
        again = sum(name == load.tenant or name.startswith(f"{load.tenant}#") for name in names)
        names.append(load.tenant if not again else f"{load.tenant}#{again + 1}")
    return names


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def good(report: dict[str, Any]) -> bool:
    """Everything came, once, in full."""
    return bool(
        report["completed"] == report["planned"] and not (report["lost"] or report["duplicated"] or report["seq_gaps"])
    )


def main(
    scenario: Annotated[str, typer.Argument(help="A scenario's name, or a YAML file.")],
    bootstrap: Annotated[
        str, typer.Option(envvar="HEADRACE_KAFKA__BOOTSTRAP", help="Kafka address.")
    ] = "127.0.0.1:9092",
    model: Annotated[str, typer.Option(help="Model of jobs whose scenario names none.")] = "smollm2-135m-instruct",
    pool: Annotated[str, typer.Option(help="Pool to publish to.")] = "default",
    reply_topic: Annotated[str, typer.Option(help="Where events come back.")] = REPLIES,
    jobs: Annotated[int | None, typer.Option(min=1, help="Jobs of each tenant, instead of the scenario's.")] = None,
    in_flight: Annotated[
        int | None, typer.Option(min=1, help="Jobs in flight of closed loops, instead of the scenario's.")
    ] = None,
    output_tokens: Annotated[int | None, typer.Option(min=1, help="Output tokens, instead of the scenario's.")] = None,
    run: Annotated[str | None, typer.Option(help="Prefix of the job ids; random by default.")] = None,
    wait: Annotated[bool, typer.Option("--wait", help='Print {"ready": true}, then begin at the line "go".')] = False,
    rounds: Annotated[int, typer.Option(min=1, help="How often to run the scenario; one report line each.")] = 1,
    json: Annotated[bool, typer.Option("--json", help="Report in one JSON line, else for people.")] = False,
) -> None:
    """Publishes a scenario's jobs and reports what came back. Exit codes: 0 all completed once, 1 not, 2 usage, 3
    not reachable.
    """
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
    try:
        found = scaled(Scenario.load(scenario), jobs=jobs, in_flight=in_flight, output_tokens=output_tokens)
    except ScenarioError as error:
        typer.echo(f"load: {error}", err=True)
        raise typer.Exit(USAGE) from None

    async def work() -> bool:
        all_good = True
        security = Settings().kafka.security
        async with Generator(bootstrap, pool=pool, reply_topic=reply_topic, security=security) as generator:
            lines = _Lines(sys.stdin) if wait else None
            if lines is not None:
                print('{"ready": true}', flush=True)
            for number in range(rounds):
                if lines is not None and await lines.next() != "go":
                    break
                name = run if run is None or rounds == 1 else f"{run}{number}"
                report = await generator.run(found, model, name)
                print(orjson.dumps(report).decode() if json else told(report), flush=True)
                all_good = all_good and good(report)
        return all_good

    try:
        import uvloop

        all_good = uvloop.run(work())
    except GeneratorError as error:
        typer.echo(f"load: {error}", err=True)
        raise typer.Exit(error.code) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    raise typer.Exit(0 if all_good else FAILED)


def scaled(
    scenario: Scenario, *, jobs: int | None = None, in_flight: int | None = None, output_tokens: int | None = None
) -> Scenario:
    """The scenario with other numbers, as a benchmark sets them for the machine at hand."""
    parts = []
    for load in scenario.tenants:
        change: dict[str, Any] = {}
        if jobs is not None:
            change["jobs"] = jobs
        if in_flight is not None and isinstance(load.arrivals, Closed):
            change["arrivals"] = Closed(kind="closed", in_flight=in_flight)
        if output_tokens is not None:
            change["output_tokens"] = load.output_tokens.model_copy(update={"min": output_tokens, "max": output_tokens})
        parts.append(load.model_copy(update=change))
    return scenario.model_copy(update={"tenants": parts})


def told(report: dict[str, Any]) -> str:
    """The report for people."""
    first = report["first_token_ms"] or {}
    return (
        f"{report['scenario']}: {report['completed']} of {report['planned']} jobs completed, {report['failed']} "
        "failed, "
        f"{report['lost']} lost, {report['duplicated']} doubled, {report['seq_gaps']} gaps; "
        f"{report['tokens_per_s']} tokens/s, {report['jobs_per_s']} jobs/s, "
        f"first token p50 {first.get('p50')} ms, p95 {first.get('p95')} ms"
    )


class _Lines:
    """Lines of a file without blocking the loop, read by a thread that ends with the process."""

    def __init__(self, file: TextIO) -> None:
        self._queue: asyncio.Queue[str] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def read() -> None:
            for line in itertools.chain(file, [""]):
                loop.call_soon_threadsafe(self._queue.put_nowait, line.strip())

        threading.Thread(target=read, daemon=True, name="load-stdin").start()

    async def next(self) -> str:
        """The next line; empty at the end."""
        return await self._queue.get()


if __name__ == "__main__":
    typer.run(main)
