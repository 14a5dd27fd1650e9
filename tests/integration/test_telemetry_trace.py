"""One trace a job in a real collector and a real viewer: ids, parents and durations as they were reported."""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from service.cli.trace import Span, draw, fetch
from service.frames import End, Error, Head, Open, Timing, Usage
from service.settings import Settings, TelemetrySettings
from service.telemetry.propagation import format_traceparent, trace_ids
from service.telemetry.spans import SendSummary, StoreSummary
from service.telemetry.tracer import JobTracer

if TYPE_CHECKING:
    from tests.integration.conftest import TestStack

DEADLINE_S = 30.0
STAGES = ("process", "queue", "admission", "chat", "prefill", "decode", "store", "send")


@pytest.fixture
def viewer(stack: TestStack) -> tuple[str, str]:
    """(OTLP endpoint, Zipkin address)."""
    if not stack.otlp_endpoint or not stack.zipkin:
        pytest.skip("the stack has no collector or no trace viewer")
    return stack.otlp_endpoint, stack.zipkin


def job(trace: dict[str, str]) -> Open:
    name = f"telemetry-{secrets.token_hex(4)}"
    head = Head(
        topic="inference.default.jobs.interactive",
        partition=1,
        offset=7,
        epoch=1,
        origin="inference.default.jobs.interactive/1/7",
        job_id=name,
        run=0,
        tenant="acme",
        tier="interactive",
        endpoint="/v1/chat/completions",
        model="m",
        reply_topic="inference.replies",
        reply_partition=None,
        stream=True,
        progress=False,
        inline_max_bytes=1,
        store="auto",
        ttl_days=None,
        metadata=None,
        digest="",
        trace=trace,
        broker_time=time.time(),
    )
    return Open(
        stream=1, head=head, attempt=f"attempt-{name}", number=1, announce=True, prompt_tokens=5, at=time.time()
    )


async def exported(endpoint: str, opened: Open, end: End, start: float) -> None:
    tracer = JobTracer(Settings(telemetry=TelemetrySettings(otlp_endpoint=endpoint)))
    stored = StoreSummary(start + 0.9, start + 1.0, "outputs", "k", 300_000) if end.kind == "completed" else None
    sends = SendSummary(start + 0.2, start + 1.0, start + 1.1, 3, 900, "inference.replies", 0, ("stop",))
    tracer.ended(opened, end, sends, stored)
    await asyncio.to_thread(tracer.close, 10.0)
    assert not tracer.counters().get("spans_failed"), "the collector refused the spans"


async def test_a_jobs_trace_runs_from_its_publisher_to_the_terminal_event(viewer: tuple[str, str]) -> None:
    endpoint, zipkin = viewer
    trace_id, publisher = secrets.token_hex(16), secrets.token_hex(8)
    opened = job({"traceparent": format_traceparent(int(trace_id, 16), int(publisher, 16), 1)})
    start = time.time() - 2
    timing = Timing(start, start + 0.1, start + 0.15, start + 0.2, start + 0.4, start + 0.8, start + 0.85)
    end = End(stream=1, kind="completed", usage=Usage(5, 20, 0), timing=timing)
    await exported(endpoint, opened, end, start)

    spans = await asyncio.to_thread(fetch, zipkin, trace_id, DEADLINE_S, STAGES)
    named: dict[str, Span] = {str(span["name"]).split()[0]: span for span in spans}
    assert set(named) == set(STAGES)
    assert {span["traceId"] for span in spans} == {trace_id}
    assert named["process"]["parentId"] == publisher and named["process"]["kind"] == "CONSUMER"
    assert named["process"]["id"] == trace_ids(opened.head, opened.attempt)[1]
    for child in ("queue", "admission", "chat", "store", "send"):
        assert named[child]["parentId"] == named["process"]["id"], child
    for child in ("prefill", "decode"):
        assert named[child]["parentId"] == named["chat"]["id"], child
    lengths = {name: round(span["duration"] / 1e6, 2) for name, span in named.items()}
    assert lengths == pytest.approx(
        {
            "process": 1.1,
            "queue": 0.1,
            "admission": 0.05,
            "chat": 0.65,
            "prefill": 0.2,
            "decode": 0.4,
            "store": 0.1,
            "send": 0.9,
        },
        abs=0.011,
    )
    assert named["chat"]["tags"]["gen_ai.usage.output_tokens"] == "20"
    with (terminal := Console(width=120)).capture() as drawn:
        terminal.print(draw(spans))
    assert drawn.get().splitlines()[0].split()[0] == "process"


async def test_a_refused_jobs_trace_says_why(viewer: tuple[str, str]) -> None:
    endpoint, zipkin = viewer
    opened = job({})
    opened.announce = False
    start = time.time() - 2
    end = End(
        stream=1,
        kind="failed",
        usage=Usage(),
        timing=Timing(start, ended=start + 0.001),
        error=Error("model_not_found", "no such model"),
    )
    await exported(endpoint, opened, end, start)
    trace_id = trace_ids(opened.head, opened.attempt)[0]
    spans = await asyncio.to_thread(fetch, zipkin, trace_id, DEADLINE_S, ("process", "send"))
    process = next(span for span in spans if span["name"].startswith("process"))
    assert len(spans) == 2 and "parentId" not in process
    assert process["tags"]["error.type"] == "model_not_found"
