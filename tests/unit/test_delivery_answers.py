"""A copy's answer on its way out: the first one's event byte for byte, a status record of the copy's own (R7)."""

from __future__ import annotations

import time
from typing import Any

import orjson

from schemas.records import StatusRecord
from service.frames import Answer, End, Ended, Error, Open, Timing, Usage, Vanished
from tests.unit.test_delivery_core import REPLIES, STATUS, Desk, desk
from tests.unit.test_delivery_gather import head

__all__ = ["desk"]

FIRST = "01JZ8X4T5V6W7X8Y9Z0A1B2C3D"
EVENT = orjson.dumps({"type": "completed", "attempt": FIRST, "seq": 9, "duplicate": True})
USAGE_OF_FIRST = {
    "prompt_tokens": 3,
    "completion_tokens": 4,
    "total_tokens": 7,
    "prompt_tokens_details": {"cached_tokens": 1},
}


def answered(desk: Desk, stream: int = 1, kind: str = "completed", event: bytes = EVENT, **changes: Any) -> None:
    changes.setdefault("job_id", f"job-{stream}")
    changes.setdefault("digest", "0" * 64)
    opened = Open(
        stream=stream,
        head=head(**changes),
        attempt=f"{stream:026d}",
        number=1,
        announce=False,
        prompt_tokens=0,
        at=time.time(),
    )
    answer = Answer(event=event, attempt=FIRST, seq=9, usage=USAGE_OF_FIRST, code=None, output=None)
    end = End(stream=stream, kind=kind, usage=Usage(), timing=Timing(time.time()), answer=answer, repeat=True)
    desk.core.receive([opened, end])


def status_of(desk: Desk) -> list[tuple[bytes | None, StatusRecord]]:
    return [
        (key, StatusRecord.model_validate_json(value))
        for topic, _, key, value in desk.producer.written
        if topic == STATUS and value
    ]


async def test_an_answer_is_one_event_and_a_status_record_with_the_copys_origin(desk: Desk) -> None:
    answered(desk)
    await desk.until(lambda: desk.got(Ended))
    assert [(t, v) for t, _, _, v in desk.producer.written if t != STATUS] == [(REPLIES, EVENT)]  # no usage record
    ((key, status),) = status_of(desk)
    opened = head(job_id="job-1")
    assert key == opened.origin.encode()  # compaction leaves the first one's own status record
    assert (status.origin, status.attempt, status.repeat) == (opened.origin, FIRST, True)
    assert status.usage is not None and status.usage.total_tokens == 7
    assert status.terminal is not None and (status.terminal.topic, status.terminal.offset) == (REPLIES, 0)
    (ended,) = desk.got(Ended)
    assert (ended.kind, ended.stored) == ("completed", False)


async def test_an_answer_waits_for_the_lease_like_any_end(desk: Desk) -> None:
    desk.lease(-1.0)
    answered(desk)
    await desk.still()
    assert not desk.producer.written
    desk.lease()
    await desk.until(lambda: desk.got(Ended))


async def test_an_answer_too_large_for_the_copys_topic_is_output_too_large(desk: Desk) -> None:
    desk.producer.limit = 600
    answered(desk, event=orjson.dumps({**orjson.loads(EVENT), "response": "x" * 1000}))
    await desk.until(lambda: desk.got(Ended))
    (event,) = [orjson.loads(v) for t, _, _, v in desk.producer.written if t == REPLIES and v]
    assert (event["type"], event["error"]["code"]) == ("failed", "output_too_large")
    ((key, status),) = status_of(desk)
    assert (status.kind, status.repeat, key) == ("failed", True, status.origin.encode())


async def test_a_copy_whose_reply_topic_is_gone_is_reported(desk: Desk) -> None:
    answered(desk, reply_topic=REPLIES, reply_partition=5)
    await desk.until(lambda: desk.got(Vanished))
    assert not desk.got(Ended) and not status_of(desk)


async def test_a_refused_copy_does_not_replace_the_first_ones_status(desk: Desk) -> None:
    desk.open(1)
    end = End(
        stream=1,
        kind="failed",
        usage=Usage(),
        timing=Timing(time.time()),
        error=Error("id_conflict", "other content"),
        repeat=True,
    )
    desk.core.receive([end])
    await desk.until(lambda: desk.got(Ended))
    ((key, status),) = status_of(desk)
    assert (key, status.code, status.repeat) == (head().origin.encode(), "id_conflict", True)
