"""One trace per job: which spans an attempt leaves, whose children they are, and how long they say they took."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, StatusCode

from service.frames import Error, Timing
from service.telemetry.propagation import span_id, trace_ids
from service.telemetry.sampling import keep, likely
from service.telemetry.spans import Former, JobSpans
from tests.unit.telemetry_samples import (
    ATTEMPT,
    PARENT,
    STORED,
    T0,
    TRACE,
    TRACEPARENT,
    by_name,
    ended,
    head,
    opened,
    refused,
    sends,
    settings,
)

BUILD = JobSpans(settings(baggage_keys=("team",))).build
NEXT = ATTEMPT[:-1] + "S"


def ms(span: ReadableSpan) -> tuple[float, float]:
    """Start and end, milliseconds after the job's receipt."""
    assert span.start_time is not None and span.end_time is not None
    return round(span.start_time / 1e6 - T0 * 1e3, 1), round(span.end_time / 1e6 - T0 * 1e3, 1)


def test_a_completed_job_leaves_every_stage_with_its_parent_and_time() -> None:
    spans = BUILD(opened(), ended(), sends(), STORED)
    named = by_name(spans)
    ids = {span.context.span_id: span.name for span in spans}
    assert {name: ms(span) for name, span in named.items()} == {
        "process": (0.0, 1470.0),
        "queue": (0.0, 100.0),
        "admission": (100.0, 150.0),
        "chat": (150.0, 1300.0),
        "prefill": (200.0, 300.0),
        "decode": (300.0, 1300.0),
        "store": (1320.0, 1440.0),
        "send": (160.0, 1470.0),
    }
    process, inference = named["process"].name, named["chat"].name
    parents = {name: ids.get(span.parent.span_id) for name, span in named.items() if span.parent}
    assert parents == {
        "process": None,  # the publisher's span is not ours
        "queue": process,
        "admission": process,
        "chat": process,
        "prefill": inference,
        "decode": inference,
        "store": process,
        "send": process,
    }
    assert len(ids) == 8
    assert {span.context.trace_id for span in spans} == {int(TRACE, 16)}
    assert spans[0].name == "process inference.p1.jobs.interactive"
    assert named["chat"].name == "chat m1" and named["send"].name == "send inference.replies"
    assert {name: span.kind for name, span in named.items() if span.kind is not SpanKind.INTERNAL} == {
        "process": SpanKind.CONSUMER,
        "send": SpanKind.PRODUCER,
        "store": SpanKind.CLIENT,
    }
    assert all(span.status.status_code is StatusCode.UNSET for span in spans)


def test_the_process_span_is_the_publishers_child_and_linked_to_it() -> None:
    process = BUILD(opened(trace={"traceparent": TRACEPARENT, "tracestate": "v=1"}), ended(), sends())[0]
    assert process.parent is not None and process.parent.is_remote
    assert f"{process.parent.span_id:016x}" == PARENT
    assert process.context.trace_state.get("v") == "1"
    (link,) = process.links
    assert link.context == process.parent


def test_the_ids_are_those_announced_when_the_attempt_began() -> None:
    for trace in ({"traceparent": TRACEPARENT}, {}):
        process = BUILD(opened(trace=trace), ended(), sends())[0]
        announced = trace_ids(head(trace=trace), ATTEMPT)
        assert (f"{process.context.trace_id:032x}", f"{process.context.span_id:016x}") == announced


def test_an_untraced_job_has_a_root_of_its_own() -> None:
    process, *children = BUILD(opened(trace={}), ended(), sends())
    assert process.parent is None and not process.links
    assert {child.parent.span_id for child in children if child.parent} >= {process.context.span_id}


def test_attributes_follow_the_conventions() -> None:
    named = by_name(BUILD(opened(trace={"baggage": "team=red,secret=x"}), ended(), sends(), STORED, kept="ratio"))
    process, inference = dict(named["process"].attributes or {}), dict(named["chat"].attributes or {})
    assert process["messaging.system"] == "kafka"
    assert process["messaging.kafka.offset"] == 41
    assert process["messaging.destination.partition.id"] == "3"
    assert process["messaging.consumer.group.name"] == "headrace.p1"
    assert process["messaging.operation.type"] == "process"
    assert process["headrace.tenant.tier"] == "interactive" and process["headrace.attempt.number"] == 1
    assert process["headrace.outcome"] == "completed" and process["headrace.sampling.reason"] == "ratio"
    assert process["baggage.team"] == "red" and "baggage.secret" not in process
    assert inference["gen_ai.operation.name"] == "chat" and inference["gen_ai.provider.name"] == "vllm"
    assert inference["gen_ai.usage.input_tokens"] == 20 and inference["gen_ai.usage.output_tokens"] == 11
    assert inference["gen_ai.usage.cache_read.input_tokens"] == 16
    assert inference["gen_ai.response.finish_reasons"] == ("stop",)
    assert inference["gen_ai.response.id"] == f"chatcmpl-{ATTEMPT}"
    assert inference["gen_ai.latency.time_to_first_token"] == pytest.approx(0.15)
    assert (named["store"].attributes or {})["headrace.store.bytes"] == 300_000
    assert (named["send"].attributes or {})["headrace.reply.chunks"] == 5
    assert named["process"].resource.attributes["service.name"] == "headrace-worker"
    (event,) = named["chat"].events
    assert event.name == "first_token" and event.timestamp == int((T0 + 0.3) * 1e9)


def test_a_completion_is_named_for_what_it_does() -> None:
    named = by_name(BUILD(opened(endpoint="/v1/completions"), ended(), sends()))
    assert (named["text_completion"].attributes or {})["gen_ai.response.id"] == f"cmpl-{ATTEMPT}"


def test_a_refused_job_leaves_process_and_send_with_an_error() -> None:
    spans = BUILD(opened(announce=False), refused(), sends(first=T0 + 0.001, last=T0 + 0.001, acked=T0 + 0.004))
    assert [span.name.split()[0] for span in spans] == ["process", "send"]
    process, send = spans
    assert process.status.status_code is StatusCode.ERROR
    assert (process.attributes or {})["error.type"] == "model_not_found"
    assert "no such" not in process.to_json() and send.status.status_code is StatusCode.UNSET


def test_a_job_that_expired_in_the_queue_shows_the_queue() -> None:
    end = ended("expired", admitted=None, submitted=None, scheduled=None, first_token=None, last_token=None)
    spans = BUILD(opened(announce=False), end, sends(first=T0 + 1.32, last=T0 + 1.32))
    assert [span.name.split()[0] for span in spans] == ["process", "queue", "send"]
    assert (spans[0].attributes or {})["error.type"] == "expired"
    assert ms(spans[1]) == (0.0, 1310.0)


def test_an_engine_failure_marks_the_inference_span_too() -> None:
    end = ended("failed", Error("engine_failed", "it failed"), first_token=None, last_token=None)
    named = by_name(BUILD(opened(), end, sends()))
    assert (named["chat"].attributes or {})["error.type"] == "engine_failed"
    assert ms(named["prefill"]) == (200.0, 1310.0) and "decode" not in named


def test_replies_that_could_not_be_delivered_are_an_error() -> None:
    named = by_name(BUILD(opened(), ended(), sends(error="undeliverable")))
    assert named["process"].status.status_code is StatusCode.ERROR
    assert (named["send"].attributes or {})["error.type"] == "undeliverable"


def test_a_further_attempt_is_a_new_span_in_the_same_trace_linked_to_the_former() -> None:
    process = BUILD(opened(NEXT, number=2), ended(), sends(), former=Former(ATTEMPT, T0 + 0.12))[0]
    assert process.context.trace_id == int(TRACE, 16)
    assert f"{process.context.span_id:016x}" != trace_ids(head(), ATTEMPT)[1]
    assert process.links[1].context.span_id == int(span_id(TRACE, ATTEMPT), 16)
    assert ms(process) == (120.0, 1470.0)


def test_time_before_the_former_attempts_end_is_not_counted_again() -> None:
    spans = BUILD(opened(NEXT, number=2), ended(), sends(), former=Former(ATTEMPT, T0 + 0.12))
    assert "queue" not in by_name(spans)


def test_clocks_that_disagree_make_no_span_end_before_it_began_or_leave_its_parent() -> None:
    spans = BUILD(opened(), ended(scheduled=T0 - 5, first_token=T0 - 4, last_token=T0 - 6), sends(acked=T0 - 1))
    process = spans[0]
    for span in spans:
        assert span.start_time is not None and span.end_time is not None
        assert process.start_time is not None and process.end_time is not None
        assert process.start_time <= span.start_time <= span.end_time <= process.end_time


def test_an_attempt_of_which_nothing_is_known_but_its_receipt_still_has_a_span() -> None:
    end = ended("abandoned")
    end.timing = Timing(T0)
    spans = BUILD(opened(), end, sends(first=None, last=None, acked=None))
    assert [span.name.split()[0] for span in spans] == ["process", "queue"]


@pytest.mark.parametrize("kind", ["failed", "expired", "abandoned"])
def test_what_went_wrong_is_always_kept(kind: str) -> None:
    assert keep(opened(trace={}), ended(kind), settings(sample=0.0).telemetry) == kind


def test_retried_slow_and_publisher_sampled_jobs_are_always_kept() -> None:
    none = settings(sample=0.0).telemetry
    assert keep(opened(number=2, trace={}), ended(), none) == "retried"
    assert keep(opened(trace={}), ended(ended=T0 + 31), none) == "slow"
    assert keep(opened(), ended(), none) == "publisher"


def test_of_the_rest_a_share_is_kept_by_trace_id() -> None:
    unsampled = TRACEPARENT[:-2] + "00"
    some = settings(sample=0.25).telemetry
    jobs = [opened(trace={}, job_id=f"job-{i}") for i in range(4_000)]
    kept = [job for job in jobs if keep(job, ended(), some)]
    assert 0.2 < len(kept) / len(jobs) < 0.3
    assert all(likely(job.head, trace_ids(job.head, ATTEMPT)[0], some) for job in kept)
    assert keep(opened(trace={"traceparent": unsampled}), ended(), settings(sample=0.0).telemetry) is None
    assert keep(opened(trace={"traceparent": unsampled}), ended(), settings(sample=1.0).telemetry) == "ratio"
