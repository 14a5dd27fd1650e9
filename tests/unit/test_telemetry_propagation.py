"""What a record's trace headers turn into."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.telemetry.propagation import (
    extract,
    format_traceparent,
    parse_baggage,
    parse_traceparent,
    parse_tracestate,
    remote,
    span_id,
    trace_ids,
)
from tests.unit.telemetry_samples import ATTEMPT, PARENT, TRACE, TRACEPARENT, head


def test_a_valid_context_is_taken_over_with_its_state() -> None:
    found = extract([("traceparent", TRACEPARENT.encode()), ("tracestate", b"a=1, b@v=2"), ("baggage", b"user=u%201")])
    assert found == {"traceparent": TRACEPARENT, "tracestate": "a=1,b@v=2", "baggage": "user=u%201"}
    publisher = remote(found)
    assert publisher is not None
    assert (publisher.trace_id, publisher.span_id, publisher.sampled) == (int(TRACE, 16), int(PARENT, 16), True)
    assert publisher.state == (("a", "1"), ("b@v", "2"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "00",
        TRACEPARENT + "-more",  # version 00 has four fields
        "ff" + TRACEPARENT[2:],
        TRACEPARENT.replace(TRACE, "0" * 32),
        TRACEPARENT.replace(PARENT, "0" * 16),
        TRACEPARENT.replace(TRACE, "g" * 32),
        "سلام",
    ],
)
def test_an_unusable_traceparent_is_ignored(text: str) -> None:
    assert parse_traceparent(text) is None
    assert extract([("traceparent", text.encode()), ("tracestate", b"a=1")]) == {}


def test_a_later_version_and_capital_letters_are_understood() -> None:
    assert parse_traceparent("01" + TRACEPARENT[2:].upper() + "-what-ever") == (int(TRACE, 16), int(PARENT, 16), 1)


def test_the_first_valid_of_repeated_headers_wins() -> None:
    other = TRACEPARENT.replace("-01", "-00")
    headers = [("traceparent", b"junk"), ("Traceparent", TRACEPARENT.encode()), ("traceparent", other.encode())]
    assert extract(headers) == {"traceparent": TRACEPARENT}


def test_one_bad_member_drops_the_whole_tracestate() -> None:
    assert parse_tracestate("a=1,b") == ()
    assert parse_tracestate("a=1,a=2") == ()
    assert parse_tracestate(",".join(f"k{i}=v" for i in range(33))) == ()
    assert len(parse_tracestate(",".join(f"k{i}=v" for i in range(32)))) == 32


def test_baggage_keeps_what_can_be_read() -> None:
    assert parse_baggage("a=1;p=x, b = %F0%9F%98%80 ,broken,(=1") == {"a": "1", "b": "😀"}


@given(st.lists(st.tuples(st.sampled_from(["traceparent", "tracestate", "baggage", "x", "Baggage"]), st.binary())))
def test_no_bytes_make_it_raise(headers: list[tuple[str, bytes | None]]) -> None:
    found = extract(headers)
    remote(found)
    assert extract([(name, value) for name, value in found.items()]) == found


@given(st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1), st.integers(0, 255))
def test_a_written_traceparent_reads_back(trace: int, span: int, flags: int) -> None:
    assert parse_traceparent(format_traceparent(trace, span, flags)) == (trace, span, flags)


def test_null_and_text_headers_are_harmless() -> None:
    assert extract([("traceparent", None), ("baggage", "a=1")]) == {"baggage": "a=1"}


def test_a_job_stays_in_its_publishers_trace() -> None:
    trace, process = trace_ids(head(), ATTEMPT)
    assert trace == TRACE
    assert process == span_id(TRACE, ATTEMPT) and len(process) == 16 and process != PARENT


def test_all_attempts_of_an_untraced_job_share_a_trace_and_no_span() -> None:
    untraced = head(trace={})
    first, second = trace_ids(untraced, ATTEMPT), trace_ids(untraced, ATTEMPT[:-1] + "S")
    assert first[0] == second[0] and first[1] != second[1]
    assert trace_ids(untraced, ATTEMPT) == first
    assert len(first[0]) == 32 and int(first[0], 16)
    assert trace_ids(head(trace={}, run=1), ATTEMPT)[0] != first[0]
