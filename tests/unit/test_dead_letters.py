"""Dead letters read from the topic, chosen, and turned into replays."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.names import (
    H_ATTEMPTS,
    H_DUE,
    H_MESSAGE,
    H_ORIGIN,
    H_REASON,
    H_REPLAY_OF,
    H_STARTS,
    H_TRACEPARENT,
    SERVICE_HEADERS,
)
from service.dead_letters import Filter, Letter, Note, NotReplayable, Spot, as_json, is_note, newest, replay
from service.delivery.records import dead_headers
from service.frames import Dead, Head
from service.intake.reading import digest_of
from service.job import Place
from service.telemetry.propagation import parse_traceparent, trace_ids

ORIGIN = Place("inference.default.jobs.bulk", 4, 17)
JOB = {"schema_version": 1, "id": "j-1", "tenant": "acme", "body": {"x": 0.5, "big": 9007199254740993}}
TRACE = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def record(
    value: bytes | dict[str, Any] | None = None,
    *,
    headers: tuple[tuple[str, bytes | None], ...] = (),
    origin: Place | None = ORIGIN,
    key: bytes | None = b"acme",
    offset: int = 9,
    at_ms: int = 1_700_000_000_000,
) -> Any:
    """A record as delivery writes it."""
    raw = orjson.dumps(value) if isinstance(value, dict) else value
    dead = Dead(
        topic="t",
        partition=4,
        offset=17,
        epoch=1,
        key=key,
        value=raw,
        headers=list(headers),
        origin=str(origin),
        code="engine_failed",
        message="the engine failed this job 4 times",
        attempts=4,
        at=1_700_000_000.0,
    )
    written = dead_headers(dead) if origin is not None else list(headers)
    return SimpleNamespace(partition=2, offset=offset, timestamp=at_ms, key=key, value=raw, headers=written)


def test_a_letter_tells_what_delivery_wrote() -> None:
    letter = Letter.of(record(JOB, headers=(("mine", b"1"),)))
    assert (letter.spot, letter.origin, letter.code, letter.attempts) == (Spot(2, 9), ORIGIN, "engine_failed", 4)
    assert (letter.tenant, letter.job_id, letter.run) == ("acme", "j-1", 0)
    assert letter.foreign_headers == (("mine", b"1"),)


def test_a_replay_is_the_same_record_under_the_next_run() -> None:
    mine: tuple[tuple[str, bytes | None], ...] = (("mine", b"\xff"), ("null", None), ("mine", b"2"))
    made = replay(Letter.of(record(JOB, headers=(*mine, (H_STARTS, b"3"), (H_DUE, b"1/2")))))
    assert (made.topic, made.partition, made.key, made.run) == (ORIGIN.topic, 4, b"acme", 1)
    assert orjson.loads(made.value) == {**JOB, "run": 1}
    assert digest_of(orjson.loads(made.value), made.value) == digest_of(JOB, b""), "the content is another"
    own = [pair for pair in made.headers if pair[0] in ("mine", "null")]
    assert tuple(own) == mine
    ours = {name for name, _ in made.headers if name.startswith(SERVICE_HEADERS)}
    assert ours == {H_REPLAY_OF}, "a header of the service came along"


@pytest.mark.parametrize(("run", "after", "expected"), [(0, None, 1), (3, None, 4), (3, 4, 5), (3, 9, 10), (3, 1, 4)])
def test_a_further_replay_takes_a_further_run(run: int, after: int | None, expected: int) -> None:
    assert replay(Letter.of(record({**JOB, "run": run})), after).run == expected


def test_a_replay_lies_in_the_trace_of_the_job_that_died() -> None:
    made = replay(Letter.of(record(JOB, headers=((H_TRACEPARENT, TRACE), ("tracestate", b"a=b"), ("baggage", b"k=v")))))
    parent = dict(made.headers)[H_TRACEPARENT]
    assert parent is not None
    found = parse_traceparent(parent.decode())
    former = parse_traceparent(TRACE.decode())
    assert found is not None and former is not None
    assert (found[0], found[2]) == (former[0], former[2])
    assert found[1] != former[1], "the replay is a child of its own"
    assert [name for name, _ in made.headers].count(H_TRACEPARENT) == 1
    assert dict(made.headers)["tracestate"] == b"a=b"
    assert made.trace_id == f"{former[0]:032x}"


def test_a_replay_of_an_untraced_job_lies_in_the_trace_its_attempts_had() -> None:
    head = Head(
        topic="inference.default.deferred",
        partition=4,
        offset=2,
        epoch=1,
        origin=str(ORIGIN),
        job_id="j-1",
        run=2,
        tenant="acme",
        tier="bulk",
        endpoint="",
        model="",
        reply_topic="",
        reply_partition=None,
        stream=True,
        progress=False,
        inline_max_bytes=1,
        store="auto",
        ttl_days=None,
        metadata=None,
        digest=digest_of({**JOB, "run": 2}, b""),
        trace={},
        broker_time=0.0,
    )
    made = replay(Letter.of(record({**JOB, "run": 2})))
    assert made.trace_id == trace_ids(head, "any attempt")[0]
    assert made.trace_id in (dict(made.headers)[H_TRACEPARENT] or b"").decode()


@pytest.mark.parametrize(
    ("value", "origin", "says"),
    [
        (b"no json", ORIGIN, "cannot carry a run"),
        (None, ORIGIN, "cannot carry a run"),
        (b"[1]", ORIGIN, "cannot carry a run"),
        ({"tenant": "acme"}, ORIGIN, "no usable id"),
        ({**JOB, "id": "not an id"}, ORIGIN, "no usable id"),
        (b'{"id": "j", "n": 123456789012345678901234567890}', ORIGIN, "beyond 64 bits"),
        (b'{"id": "j", "n": ' + b"[" * 400 + b"]" * 400 + b"}", ORIGIN, "too deeply"),
        ({**JOB, "run": -1}, ORIGIN, "run that cannot be raised"),
        ({**JOB, "run": "1"}, ORIGIN, "run that cannot be raised"),
        ({**JOB, "run": 2**31 - 1}, ORIGIN, "run that cannot be raised"),
        (JOB, None, "does not say where"),
        (JOB, Place("__consumer_offsets", 0, 1), "no jobs topic"),
        (JOB, Place("inference.default.status", 0, 1), "no jobs topic"),
        (JOB, Place("inference.default.jobs.other", 0, 1), "no jobs topic"),
    ],
)
def test_what_cannot_be_replayed_is_refused_with_a_reason(value: Any, origin: Place | None, says: str) -> None:
    with pytest.raises(NotReplayable, match=says):
        replay(Letter.of(record(value, origin=origin)))


def test_a_note_is_told_from_letters_and_names_its_letter() -> None:
    note = Note(Spot(2, 9), 3, Place(ORIGIN.topic, 4, 99))
    written = SimpleNamespace(
        partition=2, offset=40, timestamp=1, key=b"acme", value=note.value(1.0), headers=note.headers()
    )
    assert is_note(written)
    assert Note.of(written) == note
    assert not is_note(record(JOB))
    assert Note.of(record(JOB)) is None
    written.value = b"{}"
    assert is_note(written), "a note that cannot be read is no letter either"
    assert Note.of(written) is None


def test_filters() -> None:
    letter = Letter.of(record(JOB))
    assert Filter().empty and Filter().takes(letter)
    assert Filter("acme", "engine_failed", ORIGIN.topic).takes(letter)
    for other in (Filter(tenant="globex"), Filter(code="poison_job"), Filter(topic="inference.default.jobs.standard")):
        assert not other.takes(letter)
    unreadable = Letter.of(record(b"\x00", key=b"globex|3"))
    assert Filter(tenant="globex").takes(unreadable), "the key names the tenant where the value does not"


def test_the_newest_letters_of_all_partitions_are_kept() -> None:
    letters = [Letter.of(record(JOB, offset=n, at_ms=1_000 * (n % 5) + n)) for n in range(20)]
    kept = newest(letters, 3)
    assert [letter.at_ms for letter in kept] == sorted(letter.at_ms for letter in letters)[-3:]


def test_content_and_foreign_headers_are_shown_on_demand_only() -> None:
    headers: tuple[tuple[str, bytes | None], ...] = (("authorization", b"secret"), (H_TRACEPARENT, TRACE))
    letter = Letter.of(record({**JOB, "body": {"prompt": "secret"}}, headers=headers))
    for told in (as_json(letter), as_json(letter, whole=True)):
        assert b"secret" not in orjson.dumps(told)
    assert TRACE in orjson.dumps(as_json(letter, whole=True))
    assert orjson.dumps(as_json(letter, whole=True, content=True)).count(b"secret") == 2


@given(
    value=st.none() | st.binary(max_size=200),
    key=st.none() | st.binary(max_size=20),
    names=st.lists(
        st.tuples(st.sampled_from([H_ORIGIN, H_REASON, H_MESSAGE, H_ATTEMPTS, "x", ""]), st.none() | st.binary()),
        max_size=6,
    ),
)
def test_whatever_lies_on_the_topic_can_be_shown(value: Any, key: Any, names: Any) -> None:
    letter = Letter.of(SimpleNamespace(partition=0, offset=0, timestamp=0, key=key, value=value, headers=names))
    orjson.dumps(as_json(letter, whole=True, content=True))
    with pytest.raises(NotReplayable):
        replay(letter)
