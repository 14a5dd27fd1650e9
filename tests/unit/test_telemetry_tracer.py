"""The way of ended attempts to the collector: nothing waits for it, and it may be away for ever."""

from __future__ import annotations

import socket
import time

import pytest

from service.frames import Dead
from service.telemetry import tracer as room
from service.telemetry.tracer import JobTracer
from tests.unit.telemetry_samples import (
    ATTEMPT,
    STORED,
    TRACE,
    ended,
    head,
    opened,
    receiver,
    sends,
    settings,
)

NEXT = ATTEMPT[:-1] + "S"


def wait_until(condition: object, deadline_s: float = 10.0) -> None:
    assert callable(condition)
    give_up = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < give_up, "the condition was not met in time"
        time.sleep(0.01)


def test_the_collector_gets_every_span_of_a_job_compressed() -> None:
    with receiver() as collector:
        tracer = JobTracer(settings(otlp_endpoint=collector.endpoint))
        tracer.ended(opened(), ended(), sends(), STORED)
        spans = collector.wait_for_spans(8)
        tracer.close()
        assert {span.name.split()[0] for span in spans} == {
            *("process", "queue", "admission", "chat", "prefill", "decode", "store", "send")
        }
        assert {span.trace_id.hex() for span in spans} == {TRACE}
        assert collector.encodings == ["gzip"]
        resource = collector.requests[0].resource_spans[0].resource
        assert {a.key: a.value.string_value for a in resource.attributes}["service.name"] == "headrace-worker"
        assert tracer.counters() == {"spans_exported": 8.0}
        assert tracer.counters() == {}


def test_a_second_attempt_is_linked_to_the_abandoned_one() -> None:
    with receiver() as collector:
        tracer = JobTracer(settings(otlp_endpoint=collector.endpoint))
        tracer.ended(opened(), ended("abandoned"), sends())
        tracer.ended(opened(NEXT, number=2), ended(), sends())
        collector.wait_for_spans(9)
        tracer.close()
        processes = [span for span in collector.spans() if span.name.startswith("process")]
        assert [len(span.links) for span in processes] == [1, 2]
        assert processes[1].links[1].span_id == processes[0].span_id


def test_without_a_collector_there_is_no_thread_and_no_cost() -> None:
    tracer = JobTracer(settings())
    tracer.ended(opened(), ended(), sends())
    assert tracer._thread is None and not tracer._queue and tracer.counters() == {}
    tracer.close()


def test_unwanted_attempts_are_dropped_before_the_queue() -> None:
    with receiver() as collector:
        tracer = JobTracer(settings(otlp_endpoint=collector.endpoint, sample=0.0))
        for _ in range(100):
            tracer.ended(opened(trace={}), ended(), sends())
        assert not tracer._queue
        tracer.close()
        assert collector.spans() == []


def test_a_hanging_collector_costs_memory_up_to_a_bound_and_drops_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "EXPORT_TIMEOUT_S", 30.0)
    with receiver() as collector:
        collector.gate.clear()
        tracer = JobTracer(settings(otlp_endpoint=collector.endpoint))
        tracer.ended(opened(), ended(), sends())
        wait_until(lambda: not tracer._queue)  # the thread hangs in its export now
        for _ in range(room.QUEUE_JOBS + 500):
            tracer.ended(opened(), ended(), sends())
        assert len(tracer._queue) == room.QUEUE_JOBS
        assert 400.0 <= tracer.counters()["span_jobs_dropped"] <= 500.0  # some may be in the hanging export
        began = time.monotonic()
        tracer.close(0.5)
        assert time.monotonic() - began < 15.0  # the export itself would hang for 30 s


def test_a_collector_that_is_away_is_waited_for_and_missed_spans_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "EXPORT_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        nobody = taken.getsockname()[1]
    tracer = JobTracer(settings(otlp_endpoint=f"http://127.0.0.1:{nobody}"))
    tracer.ended(opened(), ended(), sends())
    wait_until(lambda: tracer._failed == 7)
    began = time.monotonic()
    tracer.close(1.0)
    assert time.monotonic() - began < 15.0
    assert tracer.counters() == {"spans_failed": 7.0}


def test_what_is_queued_goes_out_at_the_end() -> None:
    with receiver() as collector:
        tracer = JobTracer(settings(otlp_endpoint=collector.endpoint))
        for _ in range(300):
            tracer.ended(opened(), ended(), sends())
        tracer.close(10.0)
        assert len(collector.spans()) == 300 * 7


def test_a_dead_letters_record_is_not_kept_in_the_queue() -> None:
    with receiver() as collector:
        collector.gate.clear()
        tracer = JobTracer(settings(otlp_endpoint=collector.endpoint))
        end = ended("failed")
        end.dead = Dead(
            topic="t",
            partition=0,
            offset=0,
            epoch=0,
            key=None,
            value=b"x" * 1_000_000,
            headers=[],
            origin="t/0/0",
            code="poison_job",
            message="",
            attempts=2,
            at=0.0,
        )
        tracer.ended(opened(), end, sends())
        assert all(job.end.dead is None for job in tracer._queue)
        assert end.dead is not None
        collector.gate.set()
        tracer.close()


def test_a_broken_attempt_does_not_stop_the_export() -> None:
    with receiver() as collector:
        tracer = JobTracer(settings(otlp_endpoint=collector.endpoint))
        broken = ended()
        broken.timing = "not a timing"  # type: ignore[assignment]
        tracer._queue.append(room._Attempt(opened(), broken, sends(), None, None, ""))
        tracer.ended(opened(), ended(), sends())
        collector.wait_for_spans(7)
        tracer.close()


def test_replies_carry_the_context_of_their_process_span() -> None:
    tracer = JobTracer(settings(sample=0.0))
    version, trace, span, flags = tracer.traceparent(head(), ATTEMPT).split("-")
    assert (version, trace, flags) == ("00", TRACE, "01") and int(span, 16)
    assert tracer.traceparent(head(trace={}), ATTEMPT).endswith("-00")
    tracer.close()
