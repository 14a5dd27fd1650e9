"""A stream keeps its consumer's memory bounded and never loses the result."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from client.errors import ClientError, Closed, ResultTimeout
from client.result import Chunk, ResultOnly, ResumeToken, Started, Waiting
from client.stream import GAP, JOINED_LATE, SLOW, Stream
from client.submitted import Submitted


def event(kind: str, seq: int = 0, attempt: str = "A", **more: Any) -> dict[str, Any]:
    return {"type": kind, "attempt": attempt, "seq": seq, "run": 0, "tenant": "acme", "job_id": "j", **more}


def chunk(seq: int, attempt: str = "A") -> dict[str, Any]:
    data = {"choices": [{"index": 0, "delta": {"content": f"{attempt}{seq} "}}]}
    return event("chunk", seq, attempt, offset=seq - 1, tokens=1, chunk=data)


def stream(limit: int = 100, streaming: bool = True, offset: int = 0) -> Stream:
    return Stream("acme", "j", 0, partition=0, offset=offset, limit=limit, streaming=streaming)


async def all_of(one: Stream) -> list[Any]:
    items = []
    while (item := await one.take()) is not None:
        items.append(item)
    return items


def feed(one: Stream, *events: dict[str, Any], first: int = 0) -> None:
    for offset, each in enumerate(events, first):
        one.feed(each, offset)


async def test_events_come_in_order_and_the_stream_ends_with_the_job() -> None:
    one = stream()
    feed(
        one,
        event("waiting", reason="quota", since="t"),
        event("started", model="m"),
        chunk(1),
        chunk(2),
        event("completed", 3),
    )
    items = await all_of(one)
    assert isinstance(items[0], Waiting) and items[0].reason == "quota"
    assert isinstance(items[1], Started) and items[1].model == "m"
    assert [item.text for item in items[2:]] == ["A1 ", "A2 "]
    assert [item.first for item in items[2:]] == [True, False]
    assert (await one.end())[1] == 4


async def test_a_consumer_that_waits_is_woken_by_each_event() -> None:
    one = stream()
    waiting = asyncio.create_task(all_of(one))
    for offset, each in enumerate((event("started"), chunk(1), event("completed", 2))):
        await asyncio.sleep(0)
        one.feed(each, offset)
    assert len(await asyncio.wait_for(waiting, 2)) == 2


async def test_a_slow_reader_drops_to_result_only_and_still_gets_the_result() -> None:
    one = stream(limit=10)
    feed(one, event("started"), *(chunk(n) for n in range(1, 1000)), event("completed", 1000))
    assert one.result_only
    items = await all_of(one)
    assert items == [ResultOnly(SLOW)]
    assert (await one.end(1))[0]["type"] == "completed"


async def test_a_new_attempt_streams_again_after_a_drop_and_voids_what_was_not_taken() -> None:
    one = stream(limit=3)
    feed(one, event("started"), chunk(1), chunk(2), chunk(3), chunk(4))
    assert one.result_only
    feed(one, event("started", 0, "B"), chunk(1, "B"), event("completed", 2, "B"), first=10)
    assert not one.result_only
    items = await all_of(one)
    assert isinstance(items[0], Started) and items[0].attempt == "B"
    assert isinstance(items[1], Chunk) and items[1].first and items[1].text == "B1 "
    assert len(items) == 2


async def test_a_gap_is_told_and_shown_text_never_jumps_over_it() -> None:
    one = stream()
    feed(one, event("started"), chunk(1), chunk(3), chunk(4), event("completed", 5))
    assert await all_of(one) == [ResultOnly(GAP)]


async def test_joining_without_the_started_event_is_result_only() -> None:
    one = stream()
    feed(one, chunk(7), chunk(8), event("completed", 9))
    assert await all_of(one) == [ResultOnly(JOINED_LATE)]
    assert (await one.end())[0]["type"] == "completed"


async def test_records_read_again_after_a_seek_are_not_shown_twice() -> None:
    one = stream(offset=5)
    log = [event("started"), chunk(1), chunk(2)]
    feed(one, *log, first=5)
    feed(one, *log, event("completed", 3), first=5)
    assert [item.text for item in await all_of(one) if isinstance(item, Chunk)] == ["A1 ", "A2 "]


async def test_events_of_another_tenant_with_the_same_job_id_are_not_ours() -> None:
    one = stream()
    one.feed({**event("completed"), "tenant": "globex"}, 0)
    assert not one.ended


async def test_a_malformed_event_is_passed_over() -> None:
    one = stream()
    feed(
        one,
        event("started"),
        {"type": "chunk", "run": 0, "tenant": "acme", "attempt": "A"},
        chunk(1),
        event("completed", 2),
    )
    assert [item.text for item in await all_of(one) if isinstance(item, Chunk)] == ["A1 "]


async def test_without_streaming_nothing_is_kept_but_the_end() -> None:
    one = stream(streaming=False)
    feed(one, event("started"), chunk(1), event("completed", 2))
    assert [type(item) for item in await all_of(one)] == [Started]


async def test_waiting_for_a_result_is_bounded_and_says_that_the_job_goes_on() -> None:
    with pytest.raises(ResultTimeout, match="goes on"):
        await stream().end(0.01)


async def test_a_lost_connection_reaches_everybody_who_waits() -> None:
    one = stream()
    waiting = asyncio.create_task(one.take())
    await asyncio.sleep(0)
    one.fail(Closed("gone"))
    with pytest.raises(Closed):
        await waiting
    with pytest.raises(Closed):
        await one.end()


def submitted(one: Stream) -> Submitted:
    async def never(*_: Any) -> Any:
        raise AssertionError

    return Submitted(one, ResumeToken("r", 0, 0, "acme", "j"), close=lambda _: None, cancel=never, fetch=None)


async def test_after_close_everybody_gets_closed_at_once_who_waits_too() -> None:
    one = stream()
    feed(one, event("started"), chunk(1))
    job = submitted(one)
    taken: list[str] = []

    async def read() -> None:
        async for piece in job:
            taken.append(piece.text)  # noqa: PERF401

    waiting = [asyncio.create_task(read()), asyncio.create_task(job.result())]
    while not taken:
        await asyncio.sleep(0)
    feed(one, chunk(2), first=2)
    job.close()
    async with asyncio.timeout(5):
        for task in waiting:
            with pytest.raises(Closed, match=r"resume\(job.token\)"):
                await task
        with pytest.raises(Closed):
            await job.result()
        with pytest.raises(Closed):
            await read()
    assert taken == ["A1 "], "what was not taken before close() is not shown after it"


async def test_close_takes_nothing_from_a_job_that_has_ended() -> None:
    one = stream()
    feed(one, event("started"), chunk(1), event("completed", 2, response={"choices": []}))
    job = submitted(one)
    job.close()
    assert [piece.text async for piece in job] == ["A1 "]
    assert (await job.result()).attempt == "A"


@pytest.mark.parametrize("data", [None, 5, [], {"choices": 5}, {"choices": [5]}])
async def test_a_chunk_that_is_no_chunk_object_ends_the_showing_and_nothing_else(data: Any) -> None:
    one = stream()
    feed(one, event("started"), {**chunk(1), "chunk": data}, chunk(2), event("completed", 3))
    assert await all_of(one) == [ResultOnly(GAP)]


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("completed", {"response": 5}),
        ("completed", {"output": 5}),
        ("completed", {"finish_reasons": 5}),
        ("failed", {"error": 5}),
        ("failed", {"error": {"code": 5}}),
        ("cancelled", {"partial": 5, "usage": 7}),
    ],
)
async def test_an_end_that_lacks_what_the_contract_says_is_still_an_error_of_the_clients(
    kind: str, more: dict[str, Any]
) -> None:
    one = stream()
    feed(one, event(kind, **more))
    with pytest.raises(ClientError):
        await submitted(one).result()
