"""What the status record and the terminal of a job's first copy mean for a further copy (R7)."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from schemas.events import read_event
from schemas.records import StatusRecord
from service.delivery import records
from service.identity.retelling import End, Known, identity_of, judge, read_status, retell
from service.job import Place
from tests.unit.jobs import job

ATTEMPT = "01JZ8X4T5V6W7X8Y9Z0A1B2C3D"
FIRST = job(1).head


def status(**changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "kind": "completed",
        "attempt": ATTEMPT,
        "usage": None,
        "code": None,
        "terminal": {"topic": "inference.replies", "partition": 1, "offset": 5521},
        "output": None,
        "at": 1.9e9,
    }
    fields.update({name: changes.pop(name) for name in list(changes) if name in fields or name == "repeat"})
    found = read_status(records.status(FIRST, **fields))
    assert found is not None
    return {**found, **changes}


def copy(**changes: Any) -> Any:
    head = job(1).head
    head.origin = "inference.default.jobs.standard/0/77"
    for name, value in changes.items():
        setattr(head, name, value)
    return head


def event(**changes: Any) -> bytes:
    told = {
        "schema_version": 1,
        "type": "cancelled",
        "job_id": "job-1",
        "run": 0,
        "tenant": "acme",
        "at": "2030-01-31T12:00:03.250Z",
        "attempt": ATTEMPT,
        "seq": 3,
        "partial": {"choices": []},
    }
    return orjson.dumps({**told, **changes})


def test_status_records_are_what_the_schema_says() -> None:
    for repeat in (False, True):
        assert StatusRecord.model_validate_json(orjson.dumps(status(repeat=repeat))).repeat is repeat


def test_the_same_content_is_answered_from_the_terminals_place() -> None:
    end = judge(status(output={"bucket": "b"}, code="x"), copy())
    assert isinstance(end, End)
    assert (end.kind, end.attempt, end.terminal) == ("completed", ATTEMPT, Place("inference.replies", 1, 5521))
    assert (end.output, end.code) == ({"bucket": "b"}, "x")


def test_the_same_origin_is_the_same_record() -> None:
    assert judge(status(), copy(origin=FIRST.origin)) is Known.SAME_RECORD


def test_another_digest_is_other_content() -> None:
    assert judge(status(), copy(digest="1" * 64)) is Known.OTHER_CONTENT


@pytest.mark.parametrize(
    "changes",
    [
        {"job_id": "job-2"},
        {"run": 1},
        {"tenant": "globex"},
        {"terminal": None},
        {"terminal": {"topic": "t"}},
        {"attempt": None},
        {"kind": "undeliverable"},
        {"kind": "dead"},
        {"repeat": True},
        {"tenant": ""},
    ],
)
def test_what_tells_nothing_lets_the_copy_run(changes: dict[str, Any]) -> None:
    assert judge(status(**changes), copy()) is None
    assert judge(None, copy()) is None


def test_only_a_jobs_own_end_fills_the_window() -> None:
    assert identity_of(status()) == ("acme", "job-1", 0)
    assert identity_of(status(repeat=True)) is None
    assert identity_of(status(kind="dead")) is None
    assert identity_of({"kind": "completed", "tenant": "acme", "job_id": "x", "run": "0"}) is None
    assert read_status(b"[]") is read_status(b"{") is read_status(None) is None


END = End("cancelled", ATTEMPT, Place("inference.replies", 1, 5521), None, None, None)


def test_the_terminal_is_told_again_with_its_attempt_and_number() -> None:
    answer = retell(event(), END, copy())
    assert answer is not None
    assert (answer.attempt, answer.seq) == (ATTEMPT, 3)
    assert orjson.loads(answer.event) == {**orjson.loads(event()), "duplicate": True}
    read_event(answer.event)


@pytest.mark.parametrize(
    "changes",
    [
        {"job_id": "other"},
        {"tenant": "globex"},
        {"run": 1},
        {"attempt": "01JZ8X4T5V6W7X8Y9Z0A1B2C3E"},
        {"type": "failed"},
    ],
)
def test_another_record_at_its_place_is_not_told(changes: dict[str, Any]) -> None:
    assert retell(event(**changes), END, copy()) is None


@pytest.mark.parametrize("value", [None, b"", b"no json", b"[1]", b"{}", event(seq="x")])
def test_whatever_lies_there_raises_nothing(value: bytes | None) -> None:
    assert retell(value, END, copy()) is None
