"""Every record becomes a job, one answerable refusal, or a dead letter: the table of bad input, and fuzz."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
import time
from collections.abc import Awaitable
from datetime import UTC, datetime, timedelta
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from schemas import names
from schemas.errors import ErrorCode, Expired
from schemas.tenants import Tenant, TenantLimits
from service.intake.intake import LARGE, Intake
from service.intake.reading import digest_of
from service.intake.verdict import Lookup, Refused, Undeliverable, Verdict
from service.job import Job, Place, Record, Ticket
from service.settings import Settings
from service.store import BlobMissing, DigestMismatch, StoreUnavailable

MODEL = "small"
JOBS = "inference.default.jobs.standard"
PARTITIONS = {names.REPLIES: 6, "acme.replies": 3, "open": 1}


class FakeTopics:
    """The broker's topics: those in `asked` are known already, others need a look-up."""

    def __init__(self) -> None:
        self.asked: dict[str, int] = {names.REPLIES: 6}
        self.look_ups: list[str] = []

    def known(self, topic: str) -> int | None:
        return self.asked.get(topic)

    async def look_up(self, topic: str) -> int | None:
        self.look_ups.append(topic)
        self.asked[topic] = PARTITIONS.get(topic, 0)
        return self.asked[topic] or None


class FakeStore:
    def __init__(self) -> None:
        self.blobs: dict[tuple[str, str], bytes] = {}
        self.fails: Exception | None = None

    async def get(self, bucket: str, key: str, size: int, sha256: str) -> bytes:
        if self.fails is not None:
            raise self.fails
        if (bucket, key) not in self.blobs:
            raise BlobMissing("no such object")
        data = self.blobs[bucket, key]
        if len(data) != size or hashlib.sha256(data).hexdigest() != sha256:
            raise DigestMismatch("another digest")
        return data


REGISTRY = {
    tenant.id: tenant
    for tenant in (
        Tenant(id="acme"),
        Tenant(id="globex", limits=TenantLimits(n=1), models=["other"]),
        Tenant(id="initech", enabled=False),
        Tenant(id="owner", blob_buckets=["owner-inputs"], reply_topics=["*"]),
    )
}


class Door:
    """An intake on fakes, and a way to put records through it whole."""

    def __init__(self) -> None:
        config = Settings()
        config.engine.served_name = MODEL
        config.store.max_input_bytes = 200_000
        self.topics = FakeTopics()
        self.store = FakeStore()
        self.intake = Intake(config, REGISTRY, self.topics, self.store, models={MODEL})

    def read(self, value: Any, **more: Any) -> Verdict | Lookup:
        return self.intake.read(record(value, **more), TICKET)

    def judge(self, value: Any, **more: Any) -> Verdict:
        found = self.read(value, **more)
        return finished(found.finish()) if isinstance(found, Lookup) else found


PLACE = Place(JOBS, 4, 17)
TICKET = Ticket(PLACE, 3)


def record(
    value: Any,
    headers: tuple[tuple[str, bytes | None], ...] = (),
    place: Place = PLACE,
    published: float | None = None,
) -> Record:
    raw = value if value is None or isinstance(value, bytes) else orjson.dumps(value)
    return Record(place, b"acme", raw, headers, int((published or time.time()) * 1000))


def finished(waiting: Awaitable[Verdict]) -> Verdict:
    async def run() -> Verdict:
        return await waiting

    return asyncio.run(run())


def job(**fields: Any) -> dict[str, Any]:
    whole = {
        "schema_version": 1,
        "id": "job-1",
        "tenant": "acme",
        "endpoint": names.CHAT,
        "body": {"model": MODEL, "messages": [{"role": "user", "content": "Name three rivers."}], "max_tokens": 8},
        "reply": {"topic": names.REPLIES, "stream": True},
        **fields,
    }
    return {key: value for key, value in whole.items() if value is not ...}


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "Name three rivers."}], **fields}


def when(offset_s: float) -> str:
    return datetime.fromtimestamp(time.time() + offset_s, UTC).isoformat()


INPUT = {"bucket": "outputs", "key": "v1/acme/in.json", "size": 3, "sha256": "0" * 64}

# value, code, what the message must contain
REFUSED = {
    "unknown field": (job(prioritty=3), "invalid_job", "prioritty is not a known field"),
    "unknown field in reply": (
        job(reply={"topic": names.REPLIES, "steam": True}),
        "invalid_job",
        "did you mean stream",
    ),
    "unknown schema version": (job(schema_version=99), "invalid_job", "schema_version must be 1"),
    "schema version true": (job(schema_version=True), "invalid_job", "schema_version must be 1"),
    "no schema version": (job(schema_version=...), "invalid_job", "schema_version must be 1"),
    "no tenant": (job(tenant=...), "invalid_job", "tenant is missing"),
    "unknown tenant": (job(tenant="nobody-here"), "unknown_tenant", "registry"),
    "disabled tenant": (job(tenant="initech"), "not_authorized", "disabled"),
    "unknown endpoint": (job(endpoint="/v1/audio/speech"), "invalid_job", "endpoint must be one of /v1/chat"),
    "no endpoint": (job(endpoint=...), "invalid_job", "endpoint is missing"),
    "no body and no input": (job(body=...), "invalid_job", "exactly one of body and input"),
    "body and input": (job(input=INPUT), "invalid_job", "exactly one of body and input"),
    "body a list": (job(body=[1]), "invalid_job", "body must be an object"),
    "run negative": (job(run=-1), "invalid_job", "run must be at least 0"),
    "run text": (job(run="2"), "invalid_job", "run must be an integer"),
    "stream text": (
        job(reply={"topic": names.REPLIES, "stream": "yes"}),
        "invalid_job",
        "reply.stream must be true or",
    ),
    "metadata of 17": (job(metadata={str(n): "x" for n in range(17)}), "invalid_job", "metadata must have at most 16"),
    "metadata number": (job(metadata={"a": 5}), "invalid_job", "metadata.a must be a string"),
    "metadata long": (job(metadata={"a": "x" * 513}), "invalid_job", "metadata.a must have at most 512"),
    "output.store": (job(output={"store": "maybe"}), "invalid_job", "output.store must be"),
    "inline limit": (job(output={"inline_max_bytes": 10**8}), "invalid_job", "output.inline_max_bytes must be at most"),
    "deadline naive": (job(deadline="2030-01-01T00:00:00"), "invalid_job", "deadline must be an RFC 3339 time"),
    "deadline number": (job(deadline=5), "invalid_job", "deadline must be an RFC 3339 time"),
    "deadline impossible": (job(deadline="2030-02-31T00:00:00Z"), "invalid_job", "deadline is not a date"),
    "deadline far": (job(deadline=when(4 * 86400)), "invalid_job", "deadline lies more than 84 hours"),
    "not_before far": (job(not_before="9999-12-31T23:59:59+14:00"), "invalid_job", "not_before lies more than"),
    "not_before after deadline": (job(not_before=when(60), deadline=when(30)), "invalid_job", "before deadline"),
    "messages empty": (job(body=body(messages=[])), "invalid_request", "body.messages"),
    "unknown body field": (job(body=body(max_tokenss=5)), "invalid_request", "max_tokens"),
    "caller's cache salt": (job(body=body(cache_salt="mine")), "invalid_request", "cache_salt"),
    "unknown model": (job(body=body(model="gpt-99")), "model_not_found", "serves small"),
    "model of others": (job(tenant="globex", body=body(model=MODEL)), "not_authorized", "body.model"),
    "n over the tenant's": (job(tenant="globex", body=body(n=2)), "quota_exceeded", "limit of this tenant is 1"),
    "n 20000": (job(body=body(n=20_000)), "invalid_request", "body.n"),
    "embeddings": (
        job(endpoint=names.EMBEDDINGS, body={"model": MODEL, "input": "hello"}),
        "model_not_found",
        "embedding",
    ),
    "seed over 64 bits": (
        orjson.dumps(job()).replace(b'"max_tokens":8', b'"seed":1180591620717411303424'),
        "invalid_job",
        "seed is an integer beyond 64 bits",
    ),
    "seed of 5,000 digits": (
        orjson.dumps(job()).replace(b'"max_tokens":8', b'"seed":' + b"7" * 5_000),
        "invalid_job",
        "seed is an integer beyond 64 bits",
    ),
    "nested 300 levels": (
        orjson.dumps(job(body=5)).replace(b":5", b":" + b'{"a":' * 300 + b"1" + b"}" * 300, 1),
        "invalid_request",
        "body.a is not a known field",
    ),
    "foreign bucket": (job(body=..., input={**INPUT, "bucket": "not-ours"}), "not_authorized", "input.bucket"),
    "foreign key": (job(body=..., input={**INPUT, "key": "v1/globex/in.json"}), "not_authorized", "'v1/acme/'"),
    **{
        f"input key {key[:20]!a}": (
            job(body=..., input={**INPUT, "key": key}),
            "invalid_job",
            "input.key must be a plain",
        )
        for key in (
            *("v1/acme/../globex/x", "/v1/acme/x", "v1/acme//x", "v1/acme/", "v1/acme/./x", ".."),
            *("v1/acme/\0", "v1/acme/a\\b", "v1/acme/\n", "v1/acme/\x7f", "v1/acme/\x85", "v1/acme/" + "ä" * 510),
        )
    },
    "missing key": (job(body=..., input=INPUT), "input_unavailable", "run + 1"),
    "input too large": (job(body=..., input={**INPUT, "size": 10**9}), "quota_exceeded", "200000"),
    "input digest": (job(body=..., input={**INPUT, "sha256": "xyz"}), "invalid_job", "input.sha256 must match"),
}


@pytest.mark.parametrize("value, code, message", REFUSED.values(), ids=REFUSED.keys())
def test_a_wrong_job_that_can_be_answered_gets_one_refusal(value: Any, code: str, message: str) -> None:
    verdict = Door().judge(value)
    assert isinstance(verdict, Refused), verdict
    assert verdict.refusal.terminal == "failed"
    assert verdict.refusal.code == code
    assert message in verdict.refusal.message
    assert "\n" not in verdict.refusal.message and len(verdict.refusal.message) < 600
    assert (verdict.head.job_id, verdict.head.reply_topic) == ("job-1", names.REPLIES)
    assert len(verdict.head.digest) == 64


# value, headers, code, what the message must contain
DEAD: dict[str, tuple[Any, tuple[tuple[str, bytes | None], ...], str, str]] = {
    "not JSON": (b"this is not json", (), "invalid_job", "not JSON"),
    "NaN": (orjson.dumps(job()).replace(b'"max_tokens":8', b'"temperature":NaN'), (), "invalid_job", "not JSON"),
    "empty": (b"", (), "invalid_job", "empty"),
    "null": (None, (), "invalid_job", "null"),
    "noise": (bytes(range(256)) * 200, (), "invalid_job", "not JSON"),
    "invalid UTF-8": (b'{"id": "\xff\xfe\xff"}', (), "invalid_job", "not JSON"),
    "list": (b"[1, 2]", (), "invalid_job", "not a JSON object"),
    "no id": (job(id=...), (), "invalid_job", "id must be a string"),
    "id null": (job(id=None), (), "invalid_job", "id must be a string"),
    "id a number": (job(id=5), (), "invalid_job", "id must be a string"),
    "id with a space": (job(id="a b"), (), "invalid_job", "id must be a string"),
    "id with a newline at its end": (job(id="a\n"), (), "invalid_job", "id must be a string"),
    "id in Persian": (job(id="کار"), (), "invalid_job", "id must be a string"),
    "id of 129": (job(id="a" * 129), (), "invalid_job", "id must be a string"),
    "tenant a list": (job(tenant=["acme"]), (), "invalid_job", "tenant must be"),
    "tenant with a slash": (job(tenant="../acme"), (), "invalid_job", "tenant must be"),
    "internal reply topic": (job(reply={"topic": "__consumer_offsets"}), (), "reply_topic_refused", "internal"),
    "jobs topic": (job(reply={"topic": JOBS}), (), "reply_topic_refused", "internal"),
    "jobs topic of another pool": (
        job(reply={"topic": "inference.gpu.jobs.bulk"}, tenant="owner"),
        (),
        "reply_topic_refused",
        "internal",
    ),
    "pool called replies": (
        job(reply={"topic": "inference.replies.jobs.bulk"}, tenant="owner"),
        (),
        "reply_topic_refused",
        "internal",
    ),
    **{
        f"the service's {topic}": (job(reply={"topic": topic}, tenant="owner"), (), "reply_topic_refused", "internal")
        for topic in (
            names.DEAD_LETTERS,
            names.CANCEL,
            names.CONTROL,
            names.USAGE,
            names.TENANTS,
            names.MODELS,
            names.status_topic("default"),
            names.deferred_topic("default"),
            names.overflow_topic("x"),
        )
    },
    "missing reply topic": (job(reply={"topic": "acme.none"}), (), "reply_topic_refused", "does not exist"),
    "foreign reply topic": (job(reply={"topic": "globex.replies"}), (), "reply_topic_refused", "not among the topics"),
    "unknown tenant's topic": (job(tenant="who", reply={"topic": "who.replies"}), (), "unknown_tenant", "registry"),
    "reply topic no name": (job(reply={"topic": "a b"}), (), "reply_topic_refused", "name of a Kafka topic"),
    "reply topic a dot": (job(reply={"topic": ".."}), (), "reply_topic_refused", "name of a Kafka topic"),
    "reply topic a number": (job(reply={"topic": 5}), (), "reply_topic_refused", "name of a Kafka topic"),
    "reply text": (job(reply="acme.replies"), (), "reply_topic_refused", "reply must be an object"),
    "partition too high": (
        job(reply={"topic": "acme.replies", "partition": 3}),
        (),
        "reply_topic_refused",
        "has 3 partitions",
    ),
    "partition negative": (job(reply={"partition": -1}), (), "reply_topic_refused", "reply.partition"),
    "partition of 20 digits": (
        json.dumps(job(reply={"topic": "acme.replies", "partition": 10**20 - 1})).encode(),
        (),
        "reply_topic_refused",
        "reply.partition",
    ),
    "partition of 20 digits behind another": (
        json.dumps(job(metadata={"a": 10**30}, reply={"topic": "acme.replies", "partition": 10**30})).encode(),
        (),
        "reply_topic_refused",
        "reply.partition",
    ),
    "partition text": (job(reply={"partition": "1"}), (), "reply_topic_refused", "reply.partition"),
    "partition true": (job(reply={"partition": True}), (), "reply_topic_refused", "reply.partition"),
    "header topic": (job(reply=...), ((names.H_REPLY_TO, b"__transaction_state"),), "reply_topic_refused", "internal"),
    "header topic not UTF-8": (
        job(reply=...),
        ((names.H_REPLY_TO, b"\xff"),),
        "reply_topic_refused",
        "name of a Kafka",
    ),
    "header partition unreadable": (
        job(reply=...),
        ((names.H_REPLY_TO, b"acme.replies"), (names.H_REPLY_PARTITION, b"two")),
        "reply_topic_refused",
        "reply.partition",
    ),
}


@pytest.mark.parametrize("value, headers, code, message", DEAD.values(), ids=DEAD.keys())
def test_a_record_that_nobody_can_be_told_of_is_a_dead_letter(
    value: Any, headers: tuple[tuple[str, bytes | None], ...], code: str, message: str
) -> None:
    verdict = Door().judge(value, headers=headers)
    assert isinstance(verdict, Undeliverable), verdict
    dead = verdict.dead
    assert dead.code == code
    assert message in dead.message and "\n" not in dead.message
    assert (dead.topic, dead.partition, dead.offset, dead.epoch) == (JOBS, 4, 17, 3)
    assert dead.value == record(value).value and dead.key == b"acme" and dead.headers == list(headers)
    assert dead.origin == f"{JOBS}/4/17"


def test_a_good_job_comes_through_whole() -> None:
    deadline = time.time() + 60
    headers = (
        ("traceparent", b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
        ("baggage", b"user=1"),
        ("x-binary", b"\xff\xfe\x00"),
        ("x-null", None),
        (names.H_REPLY_TO, None),
    )
    verdict = Door().read(
        job(
            run=2,
            reply={"topic": names.REPLIES, "partition": 5, "stream": False, "progress": True},
            deadline=datetime.fromtimestamp(deadline, UTC).isoformat(),
            conversation="c",
            metadata={"کلید": "مقدار"},
            output={"store": "always", "inline_max_bytes": 64, "ttl_days": 2},
        ),
        headers=headers,
        place=Place("inference.default.jobs.interactive", 4, 17),
    )
    assert isinstance(verdict, Job)
    head = verdict.head
    assert verdict.identity == ("acme", "job-1", 2)
    assert (head.topic, head.partition, head.offset, head.epoch) == ("inference.default.jobs.interactive", 4, 17, 3)
    assert head.origin == "inference.default.jobs.interactive/4/17" and head.tier == "interactive"
    assert (head.endpoint, head.model) == (names.CHAT, MODEL)
    assert (head.reply_topic, head.reply_partition, head.stream, head.progress) == (names.REPLIES, 5, False, True)
    assert (head.store, head.inline_max_bytes, head.ttl_days) == ("always", 64, 2)
    assert head.metadata == {"کلید": "مقدار"}
    assert head.trace["traceparent"].startswith("00-0af7651916cd43dd8448eb211c80319c")
    assert head.trace["baggage"] == "user=1"
    assert verdict.deadline == pytest.approx(deadline, abs=1e-3) and verdict.conversation == "c"
    assert abs(head.broker_time - time.time()) < 5 and abs(verdict.received - time.time()) < 5


def test_a_malformed_traceparent_is_ignored() -> None:
    verdict = Door().read(job(), headers=(("traceparent", b"00-zz-yy-01"),))
    assert isinstance(verdict, Job) and verdict.head.trace == {}


def test_a_job_without_reply_goes_to_the_default_topic_streamed() -> None:
    verdict = Door().read(job(reply=...))
    assert isinstance(verdict, Job)
    assert (verdict.head.reply_topic, verdict.head.reply_partition, verdict.head.stream) == (names.REPLIES, None, True)
    assert not verdict.head.progress


@pytest.mark.parametrize(
    "headers, address",
    [
        (((names.H_REPLY_TO, b"acme.replies"), (names.H_REPLY_PARTITION, b"2")), ("acme.replies", 2)),
        (
            ((names.H_SPRING_REPLY_TO, b"acme.replies"), (names.H_SPRING_REPLY_PARTITION, b"\0\0\0\x02")),
            ("acme.replies", 2),
        ),
        (((names.H_SPRING_REPLY_TO, b"acme.replies"), (names.H_SPRING_CORRELATION, bytes(16))), ("acme.replies", None)),
        (((names.H_REPLY_TO, b"acme.replies"), (names.H_REPLY_PARTITION, None)), ("acme.replies", None)),
    ],
)
def test_reply_headers_are_read_in_springs_forms_too(
    headers: tuple[tuple[str, bytes | None], ...], address: tuple[str, int | None]
) -> None:
    verdict = Door().judge(job(reply=...), headers=headers)
    assert isinstance(verdict, Job)
    assert (verdict.head.reply_topic, verdict.head.reply_partition) == address


def test_the_jobs_own_reply_topic_goes_before_the_header() -> None:
    headers = ((names.H_REPLY_TO, b"acme.replies"), (names.H_REPLY_PARTITION, b"2"))
    verdict = Door().judge(job(), headers=headers)
    assert isinstance(verdict, Job)
    assert (verdict.head.reply_topic, verdict.head.reply_partition) == (names.REPLIES, None)


@pytest.mark.parametrize("offset_s, kind", [(-60, Refused), (-1, Job), (60, Job)])
def test_a_deadline_that_has_passed_expires_the_job_with_tolerance(offset_s: float, kind: type) -> None:
    verdict = Door().read(job(deadline=when(offset_s)))
    assert isinstance(verdict, kind)
    if isinstance(verdict, Refused):
        assert verdict.refusal.terminal == "expired"


def test_the_horizon_is_half_of_what_the_topics_really_keep() -> None:
    door = Door()
    door.intake.jobs_retention_s = 2 * 3600.0
    assert isinstance(door.read(job(deadline=when(3500))), Job)
    verdict = door.read(job(deadline=when(3700)))
    assert isinstance(verdict, Refused) and "more than 1 hours" in verdict.refusal.message
    door.intake.jobs_retention_s = float("inf")
    assert isinstance(door.read(job(deadline=when(400 * 86_400))), Job)


def test_a_job_that_queued_for_hours_is_measured_from_its_publication() -> None:
    verdict = Door().read(job(deadline=when(3600)), published=time.time() - 4 * 86_400)
    assert isinstance(verdict, Refused) and "deadline lies more than" in verdict.refusal.message


def test_an_unknown_topic_is_looked_up_once_and_not_on_the_loop() -> None:
    door = Door()
    first = door.read(job(reply={"topic": "acme.replies"}))
    assert isinstance(first, Lookup) and first.record.place == PLACE and first.ticket == TICKET
    assert isinstance(finished(first.finish()), Job)
    assert isinstance(door.read(job(reply={"topic": "acme.replies"})), Job)
    assert door.topics.look_ups == ["acme.replies"]


def test_what_cannot_be_answered_costs_no_look_up() -> None:
    door = Door()
    assert isinstance(door.read(job(reply={"topic": "globex.replies"})), Undeliverable)
    assert isinstance(door.read(job(reply={"topic": "acme.replies"}, id="a b")), Undeliverable)
    assert door.topics.look_ups == []


def stored(door: Door, content: bytes, key: str = "v1/acme/in.json", bucket: str = "outputs") -> dict[str, Any]:
    door.store.blobs[bucket, key] = content
    return {"bucket": bucket, "key": key, "size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def test_a_claim_checked_input_is_fetched_and_checked_like_a_body() -> None:
    door = Door()
    ref = stored(door, orjson.dumps(body(max_tokens=5)))
    found = door.read(job(body=..., input=ref))
    assert isinstance(found, Lookup)
    verdict = finished(found.finish())
    assert isinstance(verdict, Job) and verdict.body["max_tokens"] == 5 and verdict.head.model == MODEL


def test_a_large_input_and_a_bucket_of_the_tenants_own_work_too() -> None:
    door = Door()
    content = orjson.dumps(body(messages=[{"role": "user", "content": "river " * 20_000}]))
    assert len(content) > LARGE
    ref = stored(door, content, "any/key", "owner-inputs")
    assert isinstance(door.judge(job(tenant="owner", body=..., input=ref)), Job)
    assert isinstance(door.judge(job(body=..., input=ref)), Refused), "not acme's bucket"


@pytest.mark.parametrize(
    "content, code, message",
    [
        (b"not json", "invalid_request", "input is not a request body"),
        (b"[1]", "invalid_request", "not a JSON object"),
        (b'{"seed": 99999999999999999999}', "invalid_request", "seed is an integer beyond 64 bits"),
        (b'{"model": "small", "echo": true}', "invalid_request", "echo"),
    ],
)
def test_a_wrong_input_is_refused_like_a_wrong_body(content: bytes, code: str, message: str) -> None:
    door = Door()
    verdict = door.judge(job(body=..., input=stored(door, content)))
    assert isinstance(verdict, Refused) and verdict.refusal.code == code and message in verdict.refusal.message


def test_a_wrong_digest_is_input_unavailable_and_retriable() -> None:
    door = Door()
    ref = stored(door, b"{}")
    verdict = door.judge(job(body=..., input={**ref, "sha256": "1" * 64}))
    assert isinstance(verdict, Refused) and verdict.refusal.code == ErrorCode.INPUT_UNAVAILABLE
    assert verdict.refusal.retriable


def test_a_store_that_is_away_has_a_code_of_its_own() -> None:
    door = Door()
    ref = stored(door, b"{}")
    door.store.fails = StoreUnavailable("the store is away")
    verdict = door.judge(job(body=..., input=ref))
    assert isinstance(verdict, Refused) and verdict.refusal.code == ErrorCode.STORE_UNAVAILABLE


async def test_a_deadline_ends_a_job_whose_input_is_being_fetched() -> None:
    door = Door()
    ref = stored(door, b"{}")

    async def get(*_: object) -> bytes:
        await asyncio.sleep(60)
        return b""

    door.store.get = get  # type: ignore[method-assign]
    deadline = (datetime.now(UTC) + timedelta(seconds=0.05)).isoformat()
    found = door.read(job(body=..., input=ref, deadline=deadline))
    assert isinstance(found, Lookup)
    verdict = await asyncio.wait_for(found.finish(), 2)
    assert isinstance(verdict, Refused) and isinstance(verdict.refusal, Expired)


def test_large_records_are_read_in_a_thread() -> None:
    found = Door().read(job(body=body(messages=[{"role": "user", "content": "x" * LARGE}])))
    assert isinstance(found, Lookup)
    assert isinstance(finished(found.finish()), Job)
    noise = Door().read(b"\xff" * (LARGE + 1))
    assert isinstance(noise, Lookup)
    assert isinstance(finished(noise.finish()), Undeliverable)


def test_origin_and_starts_are_believed_on_the_services_own_topics_only() -> None:
    headers = ((names.H_ORIGIN, b"inference.default.jobs.bulk/4/9"), (names.H_STARTS, b"2"))
    door = Door()
    for topic in (names.deferred_topic("default"), names.overflow_topic("default")):
        verdict = door.read(job(), headers=headers, place=Place(topic, 4, 1))
        assert isinstance(verdict, Job)
        assert (verdict.head.origin, verdict.starts, verdict.head.tier) == (
            "inference.default.jobs.bulk/4/9",
            2,
            "bulk",
        )
    forged = door.read(job(), headers=headers)
    assert isinstance(forged, Job) and (forged.head.origin, forged.starts) == (f"{JOBS}/4/17", 0)
    dead = door.read(b"", headers=headers, place=Place(names.deferred_topic("default"), 4, 1))
    assert isinstance(dead, Undeliverable) and dead.dead.origin == "inference.default.jobs.bulk/4/9"
    assert dead.dead.attempts == 2


@pytest.mark.parametrize("origin", [b"", b"x", b"a/b/c", b"a/1/-1", b"\xff/1/1", b"/1/1"])
def test_a_damaged_origin_falls_back_to_the_records_place(origin: bytes) -> None:
    place = Place(names.deferred_topic("default"), 4, 1)
    verdict = Door().read(job(), headers=((names.H_ORIGIN, origin), (names.H_STARTS, b"x")), place=place)
    assert isinstance(verdict, Job) and verdict.head.origin == str(place) and verdict.starts == 0


def test_the_digest_is_of_what_is_asked_for_not_of_where_and_until_when_it_is_awaited() -> None:
    door = Door()

    def digest(value: Any) -> str:
        verdict = door.judge(value)
        assert not isinstance(verdict, Undeliverable)
        return verdict.head.digest

    first = digest(job())
    assert digest(dict(reversed(job().items()))) == first
    assert digest(job(run=7)) == first
    assert digest(job(reply={"topic": names.REPLIES, "partition": 3, "stream": False})) == first
    assert digest(job(deadline="2099-01-01T00:00:00Z")) == first
    assert digest(job(metadata={"a": "b"})) != first
    assert digest(job(body=body(max_tokens=9))) != first
    stored = {"bucket": "b", "key": "k", "size": 9, "sha256": "0" * 64, "expires_at": "2099-01-01T00:00:00Z"}
    again = stored | {"key": "later/k", "expires_at": "2099-01-02T00:00:00Z"}
    assert digest_of({"input": stored}, b"") == digest_of({"input": again}, b"")
    assert digest_of({"input": stored}, b"") != digest_of({"input": stored | {"sha256": "1" * 64}}, b"")
    assert digest_of({"input": 7}, b"") != digest_of({}, b"")


def test_a_refusal_never_carries_what_the_contract_does_not_allow() -> None:
    verdict = Door().judge(job(run=-5, metadata={"a": 5}, body=body(model=7), endpoint=9))
    assert isinstance(verdict, Refused)
    assert (verdict.head.run, verdict.head.metadata, verdict.head.model, verdict.head.endpoint) == (0, None, "", "")


@pytest.mark.parametrize("mode", ["topic", "signed"])
def test_an_identity_mode_that_lacks_its_secret_is_not_silently_trusted(mode: Any) -> None:
    config = Settings(identity=mode)
    with pytest.raises(ValueError, match="HEADRACE_SERVICE_SECRET"):
        Intake(config, REGISTRY, FakeTopics(), FakeStore())


# -- fuzz

anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=12), inner, max_size=3)
    ),
    max_leaves=8,
)
HEADER_NAMES = (names.H_REPLY_TO, names.H_REPLY_PARTITION, names.H_SPRING_REPLY_PARTITION, names.H_ORIGIN)
headers_of_anybody = st.lists(
    st.tuples(
        st.sampled_from([*HEADER_NAMES, names.H_STARTS, "traceparent", "tracestate", "baggage", "x"]),
        st.none() | st.binary(max_size=60),
    ),
    max_size=4,
).map(tuple)
places = st.sampled_from([PLACE, Place(names.deferred_topic("default"), 4, 17)])


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A good job with some of its parts replaced, dropped or added, at any depth."""
    document: Any = copy.deepcopy(job(run=1, metadata={"a": "b"}, output={"store": "auto"}, deadline=when(60)))
    for _ in range(draw(st.integers(1, 4))):
        node = document
        while True:
            if isinstance(node, list):
                keys: list[Any] = list(range(len(node)))
            else:
                keys = list(node)
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if isinstance(node[key], dict | list) and draw(st.booleans()):
                node = node[key]
                continue
            action = draw(st.sampled_from(["replace", "drop", "add"]))
            if action == "replace":
                node[key] = draw(anything)
            elif action == "drop":
                del node[key]
            elif isinstance(node, dict):
                node[draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=12))] = draw(anything)
            break
    return orjson.dumps(document)


def check(verdict: Verdict, raw: bytes | None) -> None:
    if isinstance(verdict, Refused):
        assert verdict.refusal.message and "\n" not in verdict.refusal.message
        assert verdict.head.job_id and len(verdict.head.digest) == 64
    elif isinstance(verdict, Undeliverable):
        assert verdict.dead.message and "\n" not in verdict.dead.message and verdict.dead.value == raw
    else:
        assert verdict.head.model == MODEL


LOOP = asyncio.new_event_loop()


def settle(found: Verdict | Lookup) -> Verdict:
    return LOOP.run_until_complete(found.finish()) if isinstance(found, Lookup) else found  # type: ignore[arg-type]


@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(mutated(), headers_of_anybody, places)
def test_mutated_jobs_always_get_a_verdict(
    raw: bytes, headers: tuple[tuple[str, bytes | None], ...], place: Place
) -> None:
    check(settle(Door().read(raw, headers=headers, place=place)), raw)


@settings(max_examples=300, deadline=None)
@given(st.none() | st.binary(max_size=400), headers_of_anybody)
def test_random_bytes_always_get_a_dead_letter(
    raw: bytes | None, headers: tuple[tuple[str, bytes | None], ...]
) -> None:
    verdict = settle(Door().read(raw, headers=headers))
    check(verdict, raw)
    assert isinstance(verdict, Undeliverable)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 400), st.integers(0, 255), headers_of_anybody)
def test_flipped_and_cut_bytes_always_get_a_verdict(
    at: int, byte: int, headers: tuple[tuple[str, bytes | None], ...]
) -> None:
    raw = orjson.dumps(job())
    for damaged in (raw[:at], raw[:at] + bytes([byte]) + raw[at + 1 :]):
        check(settle(Door().read(damaged, headers=headers)), damaged)
