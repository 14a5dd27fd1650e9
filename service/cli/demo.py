"""`headrace demo`: the main job on real parts, from an empty machine to a summary table, and nothing left behind."""

from __future__ import annotations

import asyncio
import statistics
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from rich.console import Console
from rich.table import Table

from client import Client, ClientError, JobEnded, Result, StoreAccess, Submitted
from infra import store
from infra.errors import StackError
from infra.stack import Addresses, Stack
from schemas.names import REPLIES
from service.cli import session
from service.cli import trace as traces
from service.cli.process import WorkerProcess, WorkerStopped
from service.cli.raw import terminals_since, topic_ends
from service.cli.terminal import Screen
from service.topics import BrokerUnreachable, TopicsRefused

MODEL = "smollm2-135m-instruct"
TENANTS = ("acme", "globex", "initech")
COLOURS = dict(zip(TENANTS, ("cyan", "magenta", "green"), strict=True))
PROMPTS = (
    "Name three rivers in Europe.",
    "Why does a water wheel turn?",
    "Write one sentence about the sea.",
    "What is a mill?",
)
UNICODE_PROMPT = "سلام! 🌊 یک جمله درباره رودخانه بنویس."
STREAM_TOKENS = 40
# 200 tokens with 20 alternatives each make a response of about 400 kB: over the default inline limit of 256 KiB.
LARGE = {"max_tokens": 220, "min_tokens": 200, "logprobs": True, "top_logprobs": 20}
# Over two blocks of the prefix cache (128 tokens each on a CPU).
SHARED_PREFIX = "The headrace carries water from the weir to the wheel, and the tailrace carries it away. " * 24
SPANS = ("process", "queue", "admission", "chat", "prefill", "decode", "send")
WORKER_START_S = 240.0
JOB_S = 120.0
TRACE_S = 30.0


@dataclass(slots=True)
class Outcome:
    """What the demo saw, and what its last line says."""

    jobs: int = 0
    completed: int = 0
    failed: int = 0
    lost: int = 0
    duplicated: int = 0
    tokens: int = 0
    seconds: float = 0.0
    first_token_ms: list[float] = field(default_factory=list)
    by_tenant: dict[str, list[int]] = field(default_factory=lambda: {t: [0, 0] for t in TENANTS})  # jobs, tokens
    blob: dict[str, Any] | None = None
    trace: dict[str, Any] | None = None
    cached: dict[str, int] = field(default_factory=dict)
    viewer: str = ""  # address of the trace that was drawn

    def line(self) -> dict[str, Any]:
        firsts = self.first_token_ms
        return {
            "jobs": self.jobs,
            "completed": self.completed,
            "failed": self.failed,
            "lost": self.lost,
            "duplicated": self.duplicated,
            "first_token_ms_p50": round(statistics.median(firsts), 1) if firsts else None,
            "tokens_per_s": round(self.tokens / self.seconds, 1) if self.seconds else None,
            "blob": self.blob,
            "trace": self.trace,
            "cached_tokens": self.cached,
        }

    def good(self, *, traced: bool) -> bool:
        return (
            self.completed == self.jobs
            and not (self.failed or self.lost or self.duplicated)
            and bool(self.blob and self.blob["verified"])
            and self.cached.get("other_tenant") == 0
            and (not traced or self.trace is not None)
        )


def register(app: typer.Typer) -> None:
    app.command("demo")(demo)


def demo(
    json: Annotated[bool, typer.Option("--json", help="End with one JSON object on the last line.")] = False,
    keep: Annotated[bool, typer.Option(help="Leave the local stack running afterwards.")] = False,
) -> None:
    """Shows the whole service at work on real parts: Kafka, S3, vLLM, Collector, trace viewer.

    Exit code 0 when every job completed exactly once, the stored output was fetched back whole, and no tenant saw
    another's cache.
    """
    console = Screen(stderr=json, highlight=False)
    stack = Stack()
    was_up = stack.running
    code = 1
    try:
        stack.up()
        outcome = asyncio.run(_show(stack, console))
        code = 0 if outcome.good(traced=bool(stack.addresses.zipkin)) else 1
        _summary(console, outcome, stack)
        if outcome.viewer:
            stays = "" if keep or was_up else "  (stops with the stack now: run with --keep to open it)"
            console.print(f"trace: {outcome.viewer}{stays}", soft_wrap=True)
        if json:
            session.print_json(outcome.line())
    except (StackError, TopicsRefused, BrokerUnreachable, WorkerStopped, ClientError) as problem:
        console.print(f"[red]headrace demo:[/] {problem}")
    finally:
        if not (keep or was_up):
            stack.down()
    raise typer.Exit(code)


async def _show(stack: Stack, console: Console) -> Outcome:
    addresses = stack.addresses
    provider = _tracing(addresses.otlp_endpoint)
    outcome = Outcome()
    run = uuid.uuid4().hex[:6]
    async with WorkerProcess("demo", stack.folder / "logs", stack.environment()) as worker:
        with console.status("worker: loading the model into the engine (20 to 60 s) …"):
            await worker.ready(WORKER_START_S)
        console.print(f"[green]✓[/] worker ready: {MODEL} on vLLM, in the worker's own process")
        starts = await topic_ends(addresses.bootstrap, REPLIES, addresses.security)
        access = StoreAccess(addresses.store_endpoint, store.ACCESS_KEY, store.SECRET_KEY, bucket=store.BUCKET)
        async with Client(addresses.bootstrap, model=MODEL, store=access, security=addresses.security) as client:
            jobs = await _streams(client, outcome, console, run)
            await _large(client, outcome, console, run, jobs)
            await _cache(client, outcome, console, run, jobs)
        await _count(addresses, starts, jobs, outcome)
        if provider is not None:
            await asyncio.to_thread(provider.force_flush, 5000)
        await _trace(addresses.zipkin, jobs, outcome, console)
        with console.status("worker: draining …"):
            await worker.stop()
    if provider is not None:
        await asyncio.to_thread(provider.shutdown)
    return outcome


async def _streams(client: Client, outcome: Outcome, console: Console, run: str) -> list[Submitted]:
    """Three tenants at once, their tokens as they arrive."""
    console.rule("tokens as they arrive")
    began = time.monotonic()
    prompts = [*PROMPTS, UNICODE_PROMPT]
    follows = []
    jobs = []
    for number, prompt in enumerate(prompts):
        for tenant in TENANTS:
            body = {
                "messages": [{"role": "user", "content": prompt}],
                "max_tokens": STREAM_TOKENS,
                "temperature": 0.7,
                "seed": TENANTS.index(tenant),
            }
            published = time.monotonic()
            tier = "interactive" if number == 0 else "standard"
            job = await client.publish(body, tenant=tenant, id=f"demo-{run}-{tenant}-{number}", tier=tier)
            jobs.append(job)
            follows.append(_follow(job, published, outcome, console, show=number == 0))
    await asyncio.gather(*follows)
    outcome.seconds += time.monotonic() - began
    return jobs


async def _follow(job: Submitted, published: float, outcome: Outcome, console: Console, *, show: bool) -> None:
    outcome.jobs += 1
    line, first = "", True
    colour = COLOURS[job.tenant]
    try:
        async with asyncio.timeout(JOB_S):
            async for chunk in job:
                if first:
                    outcome.first_token_ms.append((time.monotonic() - published) * 1000)
                    first = False
                if show:
                    line = _print_words(console, job.tenant, colour, line + chunk.text)
            result = await job.result()
    except (JobEnded, TimeoutError) as problem:
        outcome.failed += 1
        console.print(f"[red]✗[/] {job.id}: {problem}")
        return
    if show and line.strip():
        console.print(f"[{colour}]{job.tenant:>8} │[/] ", end="")
        console.print(line.strip(), markup=False)
    _done(outcome, job, result)


def _print_words(console: Console, tenant: str, colour: str, line: str) -> str:
    """Prints what has arrived once it fills part of a line; returns the rest. Tenants interleave as they really do."""
    if len(line) < 48 and "\n" not in line:
        return line
    head, _, rest = line.rpartition(" ") if " " in line else (line, "", "")
    console.print(f"[{colour}]{tenant:>8} │[/] ", end="")
    console.print(" ".join(head.split()), markup=False)
    return rest


def _done(outcome: Outcome, job: Submitted, result: Result) -> None:
    outcome.completed += 1
    outcome.tokens += result.usage.completion_tokens
    share = outcome.by_tenant[job.tenant]
    share[0] += 1
    share[1] += result.usage.completion_tokens


async def _large(client: Client, outcome: Outcome, console: Console, run: str, jobs: list[Submitted]) -> None:
    """An output over the inline limit: stored, referenced by the terminal event, fetched back and checked."""
    console.rule("an output over the inline limit")
    body = {"messages": [{"role": "user", "content": "Tell a long story about a river."}], **LARGE}
    began = time.monotonic()
    outcome.jobs += 1
    job = await client.publish(body, tenant="acme", id=f"demo-{run}-large", stream=False)
    jobs.append(job)
    try:
        result = await job.result(JOB_S, download=False)
        outcome.seconds += time.monotonic() - began
        reference = result.output
        if reference is None:
            outcome.failed += 1
            console.print("[red]✗[/] the output came inline: it was smaller than the limit")
            return
        await result.download(30.0)  # raises when size or digest differ from what the event states
    except (JobEnded, ClientError) as problem:
        outcome.failed += 1
        console.print(f"[red]✗[/] {problem}")
        return
    outcome.blob = {"key": reference.key, "size": reference.size, "sha256": reference.sha256, "verified": True}
    console.print(f"[green]✓[/] stored  {reference.bucket}/{reference.key}", soft_wrap=True)
    console.print(f"[green]✓[/] fetched {reference.size:,} bytes, sha256 {reference.sha256[:16]}… as the event states")
    _done(outcome, job, result)


async def _cache(client: Client, outcome: Outcome, console: Console, run: str, jobs: list[Submitted]) -> None:
    """The same long prompt from one tenant twice and from another: the prefix cache serves its own tenant only."""
    console.rule("one prompt, two tenants: the prefix cache is each tenant's own")
    body = {"messages": [{"role": "user", "content": SHARED_PREFIX + "What is a headrace?"}], "max_tokens": 8}
    for name, tenant in (("first", "acme"), ("same_tenant", "acme"), ("other_tenant", "globex")):
        outcome.jobs += 1
        began = time.monotonic()
        job = await client.publish(body, tenant=tenant, id=f"demo-{run}-cache-{name}", stream=False)
        jobs.append(job)
        try:
            result = await job.result(JOB_S)
        except (JobEnded, ClientError) as problem:
            outcome.failed += 1
            console.print(f"[red]✗[/] {problem}")
            continue
        outcome.seconds += time.monotonic() - began
        _done(outcome, job, result)
        cached, prompt = result.usage.cached_tokens, result.usage.prompt_tokens
        if name != "first":
            outcome.cached[name] = cached
        console.print(
            f"  {tenant:>8} {name.replace('_', ' '):<12} {cached:>4} of {prompt} prompt tokens from the cache"
        )


async def _count(at: Addresses, starts: dict[int, int], jobs: list[Submitted], outcome: Outcome) -> None:
    """Lost and duplicated, from the raw log: not what the client made of it."""
    seen: Counter[str] = await terminals_since(at.bootstrap, REPLIES, starts, at.security)
    outcome.lost = sum(1 for job in jobs if not seen[job.id])
    outcome.duplicated = sum(max(0, seen[job.id] - 1) for job in jobs)


async def _trace(zipkin: str, jobs: list[Submitted], outcome: Outcome, console: Console) -> None:
    traced = next((job for job in jobs if job.trace_id), None)
    if not zipkin or traced is None or traced.trace_id is None:
        console.print("[yellow]–[/] no trace: the collector or the viewer is not running (`headrace status` says why)")
        return
    console.rule("one trace, publisher to terminal event")
    try:
        spans = await asyncio.to_thread(traces.fetch, zipkin, traced.trace_id, TRACE_S, SPANS)
    except traces.TraceUnavailable as problem:
        console.print(f"[red]✗[/] {problem}")
        return
    console.print(traces.draw(spans))
    outcome.trace = {"id": traced.trace_id, "spans": [span["name"] for span in spans]}
    outcome.viewer = f"{zipkin}/zipkin/traces/{traced.trace_id}"


def _tracing(otlp: str) -> TracerProvider | None:
    """The publisher's own spans go to the same collector, as those of any instrumented backend would."""
    if not otlp:
        return None
    provider = TracerProvider(resource=Resource.create({"service.name": "headrace-demo-publisher"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(f"{otlp.rstrip('/')}/v1/traces", timeout=5)))
    trace.set_tracer_provider(provider)
    return provider


def _summary(console: Console, outcome: Outcome, stack: Stack) -> None:
    line = outcome.line()
    table = Table(title="summary", show_header=True, header_style="bold")
    for column in ("tenant", "jobs completed", "output tokens"):
        table.add_column(column, justify="left" if column == "tenant" else "right")
    for tenant, (jobs, tokens) in outcome.by_tenant.items():
        table.add_row(f"[{COLOURS[tenant]}]{tenant}[/]", str(jobs), str(tokens))
    table.add_section()
    table.add_row("all", f"{outcome.completed} of {outcome.jobs}", str(outcome.tokens))
    console.print(table)
    console.print(
        f"lost {outcome.lost} · duplicated {outcome.duplicated} · first token p50 {line['first_token_ms_p50']} ms"
        f" · {line['tokens_per_s']} tokens/s",
        soft_wrap=True,
    )
    if not stack.addresses.zipkin:
        for note in stack.notes:
            console.print(f"[yellow]–[/] {note}", soft_wrap=True)
