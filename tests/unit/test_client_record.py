"""What is published is checked against the contract first, lies where Java puts it, and is refused in clear words."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from aiokafka.errors import RequestTimedOutError
from opentelemetry import context, trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

from client import (
    BlobRef,
    Client,
    ClientError,
    Closed,
    InvalidJob,
    JobFailed,
    PublishFailed,
    Result,
    ResumeToken,
    StoreError,
    Unreachable,
)
from client.errors import JobCancelled, JobExpired, ended
from client.record import build, moment
from client.tracing import Sending
from schemas.job import Job
from schemas.keys import job_key, partition_of


def fields(**more: Any) -> dict[str, Any]:
    return {
        "id": "j-1",
        "tenant": "acme",
        "endpoint": "/v1/chat/completions",
        "body": {"model": "m", "messages": []},
        **more,
    }


def test_a_record_is_a_job_of_the_contract_with_the_tenant_as_key() -> None:
    record = build(fields(run=2, metadata=None, output={"store": "always"}))
    job = Job.model_validate(orjson.loads(record.value))
    assert (record.id, record.run, record.tenant, record.key) == ("j-1", 2, "acme", b"acme")
    assert job.output is not None and job.output.store == "always" and job.metadata is None


@pytest.mark.parametrize(
    ("more", "names"),
    [
        ({"id": "no spaces"}, "id: takes 1 to 128 of"),
        ({"tenant": ""}, "tenant"),
        ({"endpoint": "/v2/chat"}, "endpoint: takes /v1/chat/completions, "),
        ({"metadata": {"k": "v" * 513}}, "metadata"),
        ({"metadata": {f"k{n}": "" for n in range(17)}}, "metadata"),
        ({"run": -1}, "run"),
        ({"body": None}, "body and input"),
        ({"deadline": "tomorrow"}, "deadline"),
        ({"output": {"ttl": 3}}, "output.ttl"),
        ({"body": {"seed": 2**64}}, "64-bit"),
        ({"body": {"messages": object()}}, "JSON"),
    ],
)
def test_what_the_contract_refuses_is_refused_before_it_is_sent_in_one_line(more: dict[str, Any], names: str) -> None:
    with pytest.raises(InvalidJob) as refused:
        build(fields(**more))
    assert names in str(refused.value) and "\n" not in str(refused.value)


def test_times_count_from_now_and_naive_ones_are_refused() -> None:
    now = datetime.now(UTC)
    for when in (60, 60.0, timedelta(minutes=1), now + timedelta(minutes=1)):
        text = moment(when)
        assert text is not None and abs(datetime.fromisoformat(text) - now - timedelta(minutes=1)) < timedelta(
            seconds=2
        )
    assert moment("2030-01-31T12:00:00Z") == "2030-01-31T12:00:00Z" and moment(None) is None
    with pytest.raises(InvalidJob, match="zone"):
        moment(datetime(2030, 1, 1))


def test_partitions_are_those_of_javas_partitioner() -> None:
    # Values of org.apache.kafka.common.utils.Utils.murmur2 for these strings, from Kafka's own test.
    for key, number in {"21": -973932308, "foobar": -790332482, "a-little-bit-long-string": -985981536}.items():
        assert partition_of(key, 1 << 20) == (number & 0x7FFFFFFF) % (1 << 20)
    assert job_key("acme", 1, "x") == "acme"
    assert job_key("acme", 8, "foobar") == f"acme|{(-790332482 & 0x7FFFFFFF) % 8}"


def test_a_spread_tenants_conversation_stays_on_one_key() -> None:
    keys = {build(fields(id=f"j{n}", conversation="c"), spread=8).key for n in range(50)}
    assert len(keys) == 1
    assert len({build(fields(id=f"j{n}"), spread=8).key for n in range(50)}) > 4


def test_the_publishers_span_is_the_parent_in_the_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    provider = TracerProvider()
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    with provider.get_tracer("app").start_as_current_span("request") as request:
        sending = Sending("inference.default.jobs.standard", "j", "acme")
    sending.sent(3, 9)
    assert sending.trace_id == trace.format_trace_id(request.get_span_context().trace_id)
    assert sending.trace_id in sending.headers["traceparent"]
    assert trace.format_span_id(request.get_span_context().span_id) not in sending.headers["traceparent"]


def test_a_given_traceparent_is_passed_on_even_without_a_tracing_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "get_tracer", trace.NoOpTracerProvider().get_tracer)
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    assert Sending("t", "j", "k", parent).headers["traceparent"] == parent
    current = NonRecordingSpan(SpanContext(1, 2, True, TraceFlags(1)))
    token = context.attach(trace.set_span_in_context(current))
    try:
        assert f"{1:032x}-{2:016x}" in Sending("t", "j", "k").headers["traceparent"]
    finally:
        context.detach(token)
    assert Sending("t", "j", "k").headers == {}


def test_a_token_survives_being_written_down() -> None:
    token = ResumeToken("inference.replies", 3, 42, "acme", "j", 1)
    assert ResumeToken.parse(str(token)) == token
    for text in ("", "{}", "[1]", '{"topic":"t","partition":-1,"offset":0,"tenant":"a","id":"j"}'):
        with pytest.raises(ClientError, match="resume token"):
            ResumeToken.parse(text)


def test_terminal_events_become_results_or_errors_of_their_own() -> None:
    base = {"job_id": "j", "run": 0, "tenant": "acme", "attempt": "A", "at": "t"}
    assert ended({**base, "type": "completed"}) is None
    error = ended({**base, "type": "failed", "error": {"code": "model_not_found", "message": "no", "retriable": False}})
    assert (
        isinstance(error, JobFailed) and error.code == "model_not_found" and not error.retriable and error.job_id == "j"
    )
    assert isinstance(ended({**base, "type": "cancelled", "partial": {"choices": []}}), JobCancelled)
    assert isinstance(ended({**base, "type": "expired"}), JobExpired)


async def test_a_stored_response_says_what_it_needs_when_there_is_no_store() -> None:
    ref = {"bucket": "outputs", "key": "k", "size": 1, "sha256": "0" * 64, "later_field": 1}
    result = Result.of({"job_id": "j", "run": 0, "tenant": "acme", "type": "completed", "output": ref}, ("t", 0, 0))
    assert isinstance(result.output, BlobRef)
    with pytest.raises(StoreError, match="download"):
        _ = result.response
    with pytest.raises(StoreError, match="StoreAccess"):
        await result.download()


async def test_no_broker_is_one_clear_error_within_the_time_given() -> None:
    with pytest.raises(Unreachable, match=r"127\.0\.0\.1:9 "):
        async with Client("127.0.0.1:9", connect_timeout_s=0.3):
            pass


async def test_a_client_that_is_not_open_says_so() -> None:
    with pytest.raises(Closed, match="async with"):
        await Client("127.0.0.1:9", tenant="acme").publish({})


class FlakyProducer:
    """Fails so many sends, then acknowledges; remembers what it was given."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.sent: list[tuple[str, bytes]] = []

    async def send_and_wait(self, topic: str, value: bytes, **_: Any) -> Any:
        self.sent.append((topic, value))
        if len(self.sent) <= self.failures:
            raise RequestTimedOutError
        return SimpleNamespace(topic=topic, partition=1, offset=7)


async def test_a_failed_send_is_repeated_byte_for_byte_until_it_is_acknowledged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("client.connection.RETRY_S", 0.01)
    client, producer = Client("127.0.0.1:9", publish_timeout_s=5), FlakyProducer(2)
    client._connection._producer = producer
    assert await client._connection.send("t", b"k", b"v", {}) == ("t", 1, 7)
    assert producer.sent == [("t", b"v")] * 3


async def test_a_publication_nobody_acknowledges_is_bounded_and_says_that_repeating_is_safe() -> None:
    client = Client("127.0.0.1:9", publish_timeout_s=0.6)
    client._connection._producer = FlakyProducer(10**6)
    began = time.monotonic()
    with pytest.raises(PublishFailed, match="safe"):
        await client._connection.send("t", b"k", b"v", {})
    assert time.monotonic() - began < 20


async def test_text_where_a_body_or_messages_belong_is_refused_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client("nowhere:1", tenant="acme", model="m")
    monkeypatch.setattr(client, "_open", lambda: (None, None))
    with pytest.raises(ValueError, match=r"^body: takes a request body, such as \{.*, not str$"):
        await client.publish("text")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^messages: takes a list, such as \[.*, not str$"):
        await client.chat("hello")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("body", "where"),
    [
        ({"temperature": float("nan")}, "body.temperature"),
        ({"a": [None, {"b": (1.0, float("inf"))}]}, r"body.a\[1\].b\[1\]"),
    ],
)
def test_numbers_that_json_has_not_are_refused_and_never_become_null(body: dict[str, Any], where: str) -> None:
    with pytest.raises(InvalidJob, match=rf"^{where}: NaN and Infinity are not JSON$"):
        build(fields(body=body))
    assert b"null" in build(fields(body={"stop": None, "text": "null"})).value


LAST = datetime.max.replace(tzinfo=timezone(timedelta(hours=-1)))


@pytest.mark.parametrize("when", [float("nan"), float("inf"), 1e18, timedelta.max, LAST])
def test_a_time_beyond_the_calendar_is_an_error_of_the_clients(when: Any) -> None:
    with pytest.raises(InvalidJob, match="no time"):
        moment(when)


async def test_odd_arguments_are_errors_of_the_clients_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client("nowhere:1", tenant="acme", model="m")
    monkeypatch.setattr(client, "_open", lambda: (None, None))
    odd: Any
    for odd in ({"headers": {"a": b"x"}}, {"headers": {"a": None}}, {"headers": {"a": "\ud800"}}, {"headers": 5},
                {"traceparent": 5}, {"id": 5}, {"id": "\ud800"}, {"input": {"bucket": "b"}}):  # fmt: skip
        with pytest.raises(InvalidJob) as refused:
            await client.publish({}, **odd)
        assert "\n" not in str(refused.value)
    with pytest.raises(InvalidJob, match=r"^messages: takes a list"):
        await client.chat(5)  # type: ignore[arg-type]
    for odd in (None, 5, "", '{"topic":1,"partition":0,"offset":0,"tenant":"a","id":"j"}'):
        with pytest.raises(ClientError, match="resume token"):
            await client.resume(odd)
    for odd in ("a b", 5, "\ud800"):
        with pytest.raises(InvalidJob, match=r"^job_id: takes 1 to 128 of \S+ \S+ 0-9 \. _ : -$"):
            await client.cancel(odd)


@pytest.mark.parametrize("address", ["localhost:abc", "localhost:99999", "a..b:1", "[::1", "", ":9092", "h:1,"])
async def test_an_address_that_is_none_is_told_at_once(address: str) -> None:
    began = time.monotonic()
    with pytest.raises(Unreachable, match="host:port"):
        async with Client(address, connect_timeout_s=30):
            pass
    assert time.monotonic() - began < 10
