"""Dead letters: what one says, which are meant, and what its replay looks like (R15). Pure: reads and sends nothing.

A dead letter is the original record whole (key, value, headers) with the service's reasons in further headers. A note
lies beside it, in the same partition, once it was replayed; so whoever reads the topic knows, as long as the letter is
there at all, what was replayed and under which run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import orjson

from schemas.decode import NotJson, decode
from schemas.fields import ID_PATTERN, INT32_MAX, at
from schemas.names import (
    DEAD_LETTERS,
    H_ATTEMPTS,
    H_BAGGAGE,
    H_FAILED_AT,
    H_MESSAGE,
    H_ORIGIN,
    H_REASON,
    H_REPLAY_OF,
    H_REPLAYED,
    H_SEAL,
    H_TRACEPARENT,
    H_TRACESTATE,
    SERVICE_HEADERS,
    parse_jobs_topic,
)
from service.credentials.seal import Seal, Sealer, seal_in
from service.intake.reading import digest_of
from service.job import Place
from service.telemetry.propagation import SAMPLED, extract, format_traceparent, own_trace, parse_traceparent, span_id

Headers = tuple[tuple[str, bytes | None], ...]

_ID = re.compile(ID_PATTERN, re.ASCII)
_TRACE = frozenset({H_TRACEPARENT, H_TRACESTATE, H_BAGGAGE})


class NotReplayable(Exception):
    """This letter cannot be replayed; the message says why and what to do instead."""


class Read(Protocol):
    """A consumed record of the dead-letter topic; `timestamp` in milliseconds."""

    partition: int
    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: Any


@dataclass(frozen=True, slots=True)
class Spot:
    """Where a letter lies on the dead-letter topic; written `partition/offset`."""

    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.partition}/{self.offset}"

    @classmethod
    def parse(cls, text: str) -> Spot:
        """Raises ValueError."""
        partition, offset = text.rsplit("/", 2)[-2:]
        spot = cls(int(partition), int(offset))
        if spot.partition < 0 or spot.offset < 0:
            raise ValueError(f"no place has negative numbers: {text}")
        return spot


@dataclass(frozen=True, slots=True)
class Letter:
    """One dead letter. Identity is what its value states, as far as it can be read."""

    spot: Spot
    at_ms: int  # broker time
    key: bytes | None
    value: bytes | None = field(repr=False)
    headers: Headers = field(repr=False)
    origin: Place | None
    code: str
    message: str
    attempts: int
    failed_at: str | None
    tenant: str
    job_id: str
    run: int
    size: int  # bytes of the value

    @classmethod
    def of(cls, record: Read) -> Letter:
        """Never raises: whatever lies on the topic can be shown."""
        headers = tuple((str(name), value) for name, value in record.headers or ())
        said = {name: (value or b"").decode("utf-8", "replace") for name, value in headers}
        document = _document(record.value)
        tenant, job_id, run = (document.get(name) for name in ("tenant", "id", "run"))
        attempts = said.get(H_ATTEMPTS, "")
        return cls(
            spot=Spot(record.partition, record.offset),
            at_ms=record.timestamp,
            key=record.key,
            value=record.value,
            headers=headers,
            origin=_place(said.get(H_ORIGIN, "")),
            code=said.get(H_REASON, ""),
            message=said.get(H_MESSAGE, ""),
            attempts=int(attempts) if attempts.isascii() and attempts.isdigit() and len(attempts) < 10 else 0,
            failed_at=said.get(H_FAILED_AT),
            tenant=tenant if isinstance(tenant, str) and tenant else _tenant_of(record.key),
            job_id=job_id if isinstance(job_id, str) else "",
            run=run if type(run) is int else 0,
            size=len(record.value or b""),
        )

    def without_content(self) -> Letter:
        """For lists of thousands: all but value and headers."""
        return replace(self, value=None, headers=())

    @property
    def foreign_headers(self) -> Headers:
        """The record's own headers, those of the service left out."""
        return tuple((name, value) for name, value in self.headers if not name.startswith(SERVICE_HEADERS))


@dataclass(frozen=True, slots=True)
class Note:
    """Says that a letter was replayed: under which run, and where the new record lies."""

    letter: Spot
    run: int
    place: Place

    @classmethod
    def of(cls, record: Read) -> Note | None:
        """None for everything that is no note."""
        for name, value in record.headers or ():
            if name == H_REPLAYED and value:
                break
        else:
            return None
        try:
            told = orjson.loads(record.value or b"")
            return cls(Spot.parse(value.decode()), int(told["run"]), Place.parse(told["place"]))
        except (ValueError, KeyError, TypeError, AttributeError):
            return None

    def value(self, now: float) -> bytes:
        return orjson.dumps({"schema_version": 1, "run": self.run, "place": str(self.place), "at": at(now)})

    def headers(self) -> list[tuple[str, bytes | None]]:
        return [(H_REPLAYED, str(self.letter).encode())]


def is_note(record: Read) -> bool:
    """Whether this record is the service's own beside the letters, readable or not."""
    return any(name == H_REPLAYED for name, _ in record.headers or ())


@dataclass(frozen=True, slots=True)
class Filter:
    """Which letters are meant; None = all. `topic` is the topic of the letter's origin."""

    tenant: str | None = None
    code: str | None = None
    topic: str | None = None

    @property
    def empty(self) -> bool:
        return self == Filter()

    def takes(self, letter: Letter) -> bool:
        return (
            (self.tenant is None or letter.tenant == self.tenant)
            and (self.code is None or letter.code == self.code)
            and (self.topic is None or (letter.origin is not None and letter.origin.topic == self.topic))
        )


@dataclass(frozen=True, slots=True)
class Replay:
    """The record that goes back to the jobs topic."""

    letter: Spot
    topic: str
    partition: int
    key: bytes | None
    value: bytes = field(repr=False)
    headers: Headers = field(repr=False)
    tenant: str
    job_id: str
    run: int
    trace_id: str


def replay(letter: Letter, after: int | None = None, *, sealer: Sealer | None = None, now: float = 0.0) -> Replay:
    """The letter's job once more, under the next run. `after`: the highest run it was replayed under before.

    The record keeps topic, partition number, key and its own headers. `sealer`: the service believes signed jobs only;
    it then vouches, at `now` (wall clock), for a letter whose sender it believed when the job came. Raises
    NotReplayable.
    """
    origin = letter.origin
    if origin is None:
        raise NotReplayable("does not say where its record came from; publish the job anew")
    if parse_jobs_topic(origin.topic) is None:
        raise NotReplayable(f"came from {origin.topic}, which is no jobs topic; publish the job anew")
    document, digest = _job(letter.value)
    former = document.get("run", 0)
    if type(former) is not int or not 0 <= former < INT32_MAX:
        raise NotReplayable("has a run that cannot be raised; publish the job anew with a run of its own")
    run = max(former, after if after is not None else former) + 1
    if run > INT32_MAX:
        raise NotReplayable("was replayed under the highest run there is; publish the job anew with an id of its own")
    document["run"] = run
    trace_id, trace = _trace(letter, origin, former, digest, run)
    headers = [(name, value) for name, value in letter.foreign_headers if name.lower() not in _TRACE]
    headers += [(name, text.encode("latin-1", "replace")) for name, text in trace.items()]
    place = f"{DEAD_LETTERS}/{letter.spot}"
    headers.append((H_REPLAY_OF, place.encode()))
    value = orjson.dumps(document)
    if sealer is not None:
        _must_be_believed(letter, sealer)
        headers.append((H_SEAL, sealer.mark(Seal("replay", round(now * 1000), place), value)))
    return Replay(
        letter=letter.spot,
        topic=origin.topic,
        partition=origin.partition,
        key=letter.key,
        value=value,
        headers=tuple(headers),
        tenant=letter.tenant,
        job_id=letter.job_id,
        run=run,
        trace_id=trace_id,
    )


def _must_be_believed(letter: Letter, sealer: Sealer) -> None:
    seal = sealer.check(seal_in(letter.headers) or b"", letter.value)
    if seal is None or seal.kind != "copy" or seal.place != str(letter.origin):
        raise NotReplayable("does not bear the service's mark: its sender was not believed; have the job signed anew")


def newest(letters: Iterable[Letter], limit: int) -> list[Letter]:
    """The newest `limit` of them, oldest first."""
    ordered = sorted(letters, key=lambda letter: (letter.at_ms, letter.spot.partition, letter.spot.offset))
    return ordered[-limit:]


def as_json(letter: Letter, note: Note | None = None, *, whole: bool = False, content: bool = False) -> dict[str, Any]:
    """`whole`: with its headers; `content`: with their values and its own, which may hold prompts and tokens."""
    told: dict[str, Any] = {
        "letter": str(letter.spot),
        "at": at(letter.at_ms / 1000),
        "code": letter.code,
        "message": letter.message,
        "attempts": letter.attempts,
        "failed_at": letter.failed_at,
        "tenant": letter.tenant,
        "job_id": letter.job_id,
        "run": letter.run,
        "origin": str(letter.origin) if letter.origin is not None else None,
        "size": letter.size,
        "replayed": {"run": note.run, "place": str(note.place)} if note is not None else None,
    }
    if whole:
        told["key"] = text_of(letter.key)
        told["headers"] = [
            [
                name,
                text_of(value) if content or name.startswith(SERVICE_HEADERS) or name.lower() in _TRACE else "(hidden)",
            ]
            for name, value in letter.headers
        ]
    if content:
        told["value"] = text_of(letter.value)
    return told


def text_of(value: bytes | None) -> str | None:
    """Bytes for people; what is no UTF-8 shows as \\xff."""
    return None if value is None else value.decode("utf-8", "backslashreplace")


def _document(value: bytes | None) -> dict[str, Any]:
    try:
        return decode(value).document
    except NotJson:
        return {}


def _job(value: bytes | None) -> tuple[dict[str, Any], str]:
    """The job and the digest of its content. Raises NotReplayable where a run cannot be written into the value."""
    try:
        decoded = decode(value)
    except NotJson as wrong:
        raise NotReplayable(f"cannot carry a run ({wrong}); publish a corrected job") from None
    document = decoded.document
    if decoded.too_big is not None:
        raise NotReplayable(
            "holds an integer beyond 64 bits, which would come out as another number; publish a corrected job"
        )
    job_id = document.get("id")
    if not isinstance(job_id, str) or not _ID.fullmatch(job_id):
        raise NotReplayable("has no usable id, so nobody could be told again; publish a corrected job")
    try:
        orjson.dumps(document)
    except TypeError:
        raise NotReplayable("is nested too deeply to be written again; publish a corrected job") from None
    return document, digest_of(document, value or b"")


def _trace(letter: Letter, origin: Place, run: int, digest: str, again: int) -> tuple[str, dict[str, str]]:
    """The trace of the job that died, and headers that make the replay a child within it."""
    found = extract(letter.foreign_headers)
    parent = parse_traceparent(found.get(H_TRACEPARENT, ""))
    if parent is not None:
        trace_id, flags = f"{parent[0]:032x}", parent[2]
    else:
        trace_id, flags = own_trace(letter.tenant, letter.job_id, run, str(origin), digest), SAMPLED
    ours = span_id(trace_id, str(letter.spot), f"replay {again}")
    found[H_TRACEPARENT] = format_traceparent(int(trace_id, 16), int(ours, 16), flags)
    return trace_id, found


def _place(text: str) -> Place | None:
    try:
        place = Place.parse(text)
    except ValueError:
        return None
    return place if place.topic and place.partition >= 0 and place.offset >= 0 else None


def _tenant_of(key: bytes | None) -> str:
    """Of a record whose value tells none: its key is `tenant` or `tenant|k`."""
    return (key or b"").partition(b"|")[0].decode("utf-8", "backslashreplace")
