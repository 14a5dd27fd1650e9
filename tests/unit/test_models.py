"""The registry of models: names that mean another one, and jobs whose model another pool serves."""

from __future__ import annotations

import asyncio

import orjson
import pytest

from schemas.errors import ErrorCode, ModelNotFound
from schemas.names import H_HOP, H_ORIGIN, overflow_topic, status_topic
from schemas.records import StatusRecord
from schemas.tenants import ModelEntry
from service.deferred.relay import Unwanted
from service.deferred.transfer import Transfer
from service.intake.verdict import Elsewhere, Refused
from service.job import Job, Place
from service.ledger import Book
from service.models import ModelRefused, Models, read_entry, write_entry
from service.overflow.hops import Hops
from service.settings import Settings
from tests.unit.jobs import job
from tests.unit.test_intake import Door, body
from tests.unit.test_intake import job as record_of

POOL = "default"
FAST = ModelEntry(name="fast", pool=POOL, alias_of="small")
LARGE = ModelEntry(name="large", pool="big")


def models(*entries: ModelEntry) -> Models:
    known = Models()
    known.take((entry.name.encode(), write_entry(entry)) for entry in entries)
    return known


def door(*entries: ModelEntry) -> Door:
    made = Door()
    made.intake._registry = models(*entries)
    return made


# Entries


def test_an_entry_is_read_as_it_was_written_and_a_wrong_one_leaves_the_former_in_force() -> None:
    known = models(FAST, LARGE)
    assert (known.get("fast"), known.get("large"), known.get("x")) == (FAST, LARGE, None)
    known.take(
        [(b"fast", b"{"), (b"fast", b'{"name": "fast", "pool": "a b"}'), (b"fast", b'{"name": "x", "pool": "a"}')]
    )
    assert (known.get("fast"), known.refused) == (FAST, 3)
    known.take([(b"fast", None)])
    assert known.get("fast") is None
    with pytest.raises(ModelRefused, match="model fast: pool must match"):
        read_entry("fast", b'{"name": "fast", "pool": "a b"}')


# What jobs mean


def test_an_alias_means_the_served_model() -> None:
    verdict = door(FAST).judge(record_of(body=body(model="fast")))
    assert isinstance(verdict, Job) and verdict.body["model"] == verdict.head.model == "small"


def test_a_job_for_another_pools_model_goes_there_and_only_once() -> None:
    verdict = door(LARGE).judge(record_of(body=body(model="large")))
    assert isinstance(verdict, Elsewhere) and verdict.pool == "big"
    again = door(LARGE).judge(
        record_of(body=body(model="large")),
        headers=((H_HOP, b"other"), (H_ORIGIN, b"inference.other.jobs.standard/0/0")),
        place=Place(overflow_topic(POOL), 4, 17),
    )
    assert isinstance(again, Refused) and again.refusal.code == ErrorCode.MODEL_NOT_FOUND
    forged = door(LARGE).judge(record_of(body=body(model="large")), headers=((H_HOP, b"other"),))
    assert isinstance(forged, Elsewhere), "a caller's header counts for nothing"


def test_a_model_that_nobody_names_is_not_found_and_one_the_tenant_may_not_use_goes_nowhere() -> None:
    unknown = door(LARGE).judge(record_of(body=body(model="nobody")))
    assert isinstance(unknown, Refused) and unknown.refusal.code == ErrorCode.MODEL_NOT_FOUND
    barred = door(LARGE).judge(record_of(tenant="globex", body=body(model="large")))
    assert isinstance(barred, Refused) and barred.refusal.code == ErrorCode.NOT_AUTHORIZED


def test_the_pools_own_model_needs_no_entry() -> None:
    wrong = ModelEntry(name="small", pool="big")
    assert isinstance(door(wrong).judge(record_of()), Job), "what is served here is served here"


# Going there


class Way:
    def __init__(self) -> None:
        self.book = Book(high=10, max_span=100)
        one = job(0)
        self.book.take(one.place[:2], None, 0, 100)
        self.book.settled(0, 0)
        ticket = self.book.register(one.place)
        assert ticket is not None
        self.elsewhere = Elsewhere(one.head, "big", one.record, ticket, one.received, 0)
        self.log: list[Transfer] = []
        self.refused: list[ModelNotFound] = []
        self.fails: Exception | None = None
        self.hops = Hops(Settings(), self.book, self, lambda elsewhere, refusal: self.refused.append(refusal))

    async def publish(self, transfer: Transfer) -> None:
        if self.fails is not None:
            raise self.fails
        self.log.append(transfer)

    async def go(self) -> None:
        self.hops.send(self.elsewhere)
        while self.hops._tasks:
            await asyncio.sleep(0)


async def test_a_job_goes_whole_and_this_pool_notes_that_it_went() -> None:
    way = Way()
    await way.go()
    there, note = way.log
    headers = dict(there.headers)
    assert (there.topic, there.partition, there.key) == (overflow_topic("big"), None, b"acme")
    assert headers[H_HOP] == POOL.encode() and headers[H_ORIGIN] == way.elsewhere.head.origin.encode()
    assert there.value == way.elsewhere.record.value
    told = StatusRecord.model_validate_json(note.value or b"")
    assert (note.topic, note.partition, told.kind, told.origin) == (
        status_topic(POOL),
        0,
        "moved",
        way.elsewhere.head.origin,
    )
    assert "terminal" not in orjson.loads(note.value or b"")
    assert not way.book.owns(way.elsewhere.ticket) and not way.refused


async def test_a_pool_that_is_not_there_is_told_to_the_caller() -> None:
    way = Way()
    way.fails = Unwanted("no such topic")
    await way.go()
    (refusal,) = way.refused
    assert "pool big" in refusal.message and way.book.owns(way.elsewhere.ticket)
