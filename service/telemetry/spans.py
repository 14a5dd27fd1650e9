"""The spans of one attempt, built after its end from timestamps (design.md §10).

Pure: no clock, no queue, no network. Who decides that they are wanted and sends them is tracer.py.

    process <jobs topic>                CONSUMER  child of the publisher's span, and linked to it
    ├── queue                           INTERNAL  received → picked by the scheduler
    ├── admission                       INTERNAL  picked → accepted by the engine
    ├── chat <model>                    INTERNAL  accepted → last token
    │   ├── prefill                     INTERNAL  first scheduled → first token
    │   └── decode                      INTERNAL  first token → last token
    ├── store <bucket>                  CLIENT    upload of a large output
    └── send <reply topic>              PRODUCER  first record sent → terminal acknowledged, one for all records
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState
from opentelemetry.util.types import AttributeValue

from schemas.names import CHAT, COMPLETIONS, H_BAGGAGE, group_id
from service.frames import End, Head, Open, Unanswered
from service.settings import Settings
from service.telemetry import names
from service.telemetry.propagation import Remote, own_trace, parse_baggage, remote, span_id, trace_ids

_OPERATION = {CHAT: names.CHAT, COMPLETIONS: names.TEXT_COMPLETION}
_RESPONSE_PREFIX = {CHAT: "chatcmpl-", COMPLETIONS: "cmpl-"}
_ERROR_KINDS = frozenset({"failed", "expired"})
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_OK = Status(StatusCode.UNSET)

Attributes = dict[str, AttributeValue]


@dataclass(frozen=True, slots=True)
class SendSummary:
    """What went to the reply topic for one attempt. Times are wall-clock seconds; None = never happened."""

    first: float | None  # the first record was handed to the producer
    last: float | None  # the last record was handed to the producer
    acked: float | None  # the terminal (or last) record was acknowledged
    chunks: int = 0
    bytes: int = 0
    topic: str = ""
    partition: int | None = None
    finish_reasons: tuple[str, ...] = ()  # one per choice
    error: str | None = None  # an error code if the replies could not be delivered


@dataclass(frozen=True, slots=True)
class Former:
    """The attempt before this one, as far as this process saw it."""

    attempt: str
    ended: float  # wall-clock seconds


@dataclass(frozen=True, slots=True)
class StoreSummary:
    """One output's way into the object store. Times are wall-clock seconds."""

    started: float
    ended: float
    bucket: str
    key: str
    size: int
    tries: int = 1
    error: str | None = None  # an error code if it failed for good


class JobSpans:
    """Turns what is known of an attempt into ready spans. One per process."""

    def __init__(self, settings: Settings) -> None:
        self._group = group_id(settings.pool)
        self._worker = settings.worker
        self._provider = settings.engine.kind
        self._baggage_keys = settings.telemetry.baggage_keys
        self._store_address, _, store_port = settings.store.endpoint.rpartition(":")
        self._store_port = int(store_port) if store_port.isdigit() else None
        self._scope = InstrumentationScope(names.SCOPE)
        self._resource = _resource(settings)

    def build(
        self,
        opened: Open,
        end: End,
        sends: SendSummary,
        store: StoreSummary | None = None,
        *,
        former: Former | None = None,
        kept: str = "",
    ) -> list[ReadableSpan]:
        """The spans of an attempt, root first. `kept` says why they are wanted.

        A further attempt begins where the former ended, so that the time of a job is not counted twice.
        """
        head, timing = opened.head, end.timing
        trace_hex, process_hex = trace_ids(head, opened.attempt)
        publisher = remote(head.trace)
        attempt = _Attempt(self, opened.attempt, trace_hex, publisher)
        ended = timing.ended or timing.last_token or opened.at
        finished = max(ended, sends.acked or 0.0, sends.last or 0.0, store.ended if store else 0.0)
        began = timing.received if former is None else max(timing.received, former.ended)
        attempt.within = (began, max(began, finished))
        error = _error_type(end, sends)

        links = []
        if attempt.parent is not None:
            links.append(Link(attempt.parent, {names.LINK: "publisher"}))
        if former is not None:
            links.append(Link(attempt.context(span_id(trace_hex, former.attempt)), {names.LINK: "earlier_attempt"}))
        process = attempt.add(
            f"{names.PROCESS} {head.topic}",
            attempt.within,
            self._process_attributes(opened, end, sends, kept, error),
            kind=SpanKind.CONSUMER,
            hex_id=process_hex,
            parent=attempt.parent,
            links=links,
            error=error,
        )
        attempt.parent = process
        self._waits(attempt, opened, end, ended)
        if timing.submitted is not None:
            self._inference(attempt, head, end, sends, ended, timing.submitted)
        if store is not None:
            self._store(attempt, store)
        if sends.first is not None:
            self._send(attempt, head, sends)
        return attempt.spans

    def unanswered(self, record: Unanswered) -> ReadableSpan:
        """The one span of a record about which nobody is told: who published it finds it in the trace."""
        origin = f"{record.topic}/{record.partition}/{record.offset}"
        publisher = remote(record.trace)
        if publisher is not None:
            trace_hex = f"{publisher.trace_id:032x}"
        else:
            trace_hex = own_trace(record.tenant, record.job_id, 0, origin, record.code)
        attempt = _Attempt(self, "", trace_hex, publisher)
        attempt.within = (min(record.broker_time, record.at), record.at)
        attributes: Attributes = {
            names.MESSAGING_SYSTEM: "kafka",
            names.MESSAGING_OPERATION_NAME: "process",
            names.MESSAGING_OPERATION_TYPE: "process",
            names.MESSAGING_DESTINATION: record.topic,
            names.MESSAGING_PARTITION: str(record.partition),
            names.MESSAGING_OFFSET: record.offset,
            names.MESSAGING_CLIENT: self._worker,
            names.ORIGIN: origin,
            names.OUTCOME: "refused",
        }
        attributes |= {name: text for name, text in ((names.TENANT, record.tenant), (names.JOB, record.job_id)) if text}
        attempt.add(
            f"{names.PROCESS} {record.topic}",
            attempt.within,
            attributes,
            kind=SpanKind.CONSUMER,
            hex_id=span_id(trace_hex, origin),
            links=[] if attempt.parent is None else [Link(attempt.parent, {names.LINK: "publisher"})],
            error=record.code,
        )
        return attempt.spans[0]

    def _process_attributes(
        self, opened: Open, end: End, sends: SendSummary, kept: str, error: str | None
    ) -> Attributes:
        head = opened.head
        attributes: Attributes = {
            names.MESSAGING_SYSTEM: "kafka",
            names.MESSAGING_OPERATION_NAME: "process",
            names.MESSAGING_OPERATION_TYPE: "process",
            names.MESSAGING_DESTINATION: head.topic,
            names.MESSAGING_PARTITION: str(head.partition),
            names.MESSAGING_OFFSET: head.offset,
            names.MESSAGING_GROUP: self._group,
            names.MESSAGING_CLIENT: self._worker,
            names.MESSAGING_MESSAGE: head.job_id,
            names.TENANT: head.tenant,
            names.TIER: head.tier,
            names.JOB: head.job_id,
            names.RUN: head.run,
            names.ATTEMPT: opened.attempt,
            names.ATTEMPT_NUMBER: opened.number,
            names.ORIGIN: head.origin,
            names.OUTCOME: end.kind,
        }
        if kept:
            attributes[names.KEPT] = kept
        if self._baggage_keys and H_BAGGAGE in head.trace:
            baggage = parse_baggage(head.trace[H_BAGGAGE])
            attributes |= {names.BAGGAGE_PREFIX + key: baggage[key] for key in self._baggage_keys if key in baggage}
        return attributes

    @staticmethod
    def _waits(attempt: _Attempt, opened: Open, end: End, ended: float) -> None:
        """`queue` and `admission`. A job that was refused waited for nothing."""
        timing, began = end.timing, attempt.within[0]
        if timing.admitted is None:
            if opened.announce or end.kind != "failed":
                attempt.add(names.QUEUE, (began, ended))
        elif timing.admitted >= began:  # not so for an attempt that follows a former one in the same place
            attempt.add(names.QUEUE, (began, timing.admitted))
            attempt.add(names.ADMISSION, (timing.admitted, timing.submitted or ended))

    def _inference(
        self, attempt: _Attempt, head: Head, end: End, sends: SendSummary, ended: float, submitted: float
    ) -> None:
        timing, usage = end.timing, end.usage
        operation = _OPERATION.get(head.endpoint, names.EMBEDDINGS)
        attributes: Attributes = {
            names.GEN_AI_OPERATION: operation,
            names.GEN_AI_PROVIDER: self._provider,
            names.GEN_AI_REQUEST_MODEL: head.model,
            names.GEN_AI_RESPONSE_MODEL: head.model,
            names.GEN_AI_STREAM: head.stream,
            names.GEN_AI_RESPONSE_ID: _RESPONSE_PREFIX.get(head.endpoint, "") + attempt.name,
            names.GEN_AI_INPUT_TOKENS: usage.prompt,
            names.GEN_AI_OUTPUT_TOKENS: usage.completion,
            names.GEN_AI_CACHED_TOKENS: usage.cached,
        }
        if usage.reasoning:
            attributes[names.GEN_AI_REASONING_TOKENS] = usage.reasoning
        if sends.finish_reasons:
            attributes[names.GEN_AI_FINISH_REASONS] = sends.finish_reasons
        events: tuple[tuple[str, float], ...] = ()
        if timing.scheduled is not None:
            attributes[names.GEN_AI_TIME_IN_QUEUE] = max(0.0, timing.scheduled - submitted)
        if timing.first_token is not None:
            attributes[names.GEN_AI_TIME_TO_FIRST_TOKEN] = max(0.0, timing.first_token - submitted)
            events = ((names.FIRST_TOKEN, timing.first_token),)
        done = timing.last_token if end.kind == "completed" and timing.last_token is not None else ended
        error = _error_type(end) if end.kind == "failed" else None
        inference = attempt.add(f"{operation} {head.model}", (submitted, done), attributes, events=events, error=error)
        prefill = _interval(timing.scheduled, timing.first_token or (ended if timing.scheduled else None))
        if prefill is not None:
            attempt.add(names.PREFILL, prefill, parent=inference)
        decode = _interval(timing.first_token, timing.last_token)
        if decode is not None:
            attempt.add(names.DECODE, decode, parent=inference)

    def _store(self, attempt: _Attempt, store: StoreSummary) -> None:
        attributes: Attributes = {
            names.S3_BUCKET: store.bucket,
            names.S3_KEY: store.key,
            names.STORE_BYTES: store.size,
            names.STORE_TRIES: store.tries,
            names.SERVER_ADDRESS: self._store_address,
        }
        if self._store_port is not None:
            attributes[names.SERVER_PORT] = self._store_port
        attempt.add(
            f"{names.STORE} {store.bucket}",
            (store.started, store.ended),
            attributes,
            kind=SpanKind.CLIENT,
            error=store.error,
        )

    def _send(self, attempt: _Attempt, head: Head, sends: SendSummary) -> None:
        topic = sends.topic or head.reply_topic
        attributes: Attributes = {
            names.MESSAGING_SYSTEM: "kafka",
            names.MESSAGING_OPERATION_NAME: "send",
            names.MESSAGING_OPERATION_TYPE: "send",
            names.MESSAGING_DESTINATION: topic,
            names.MESSAGING_KEY: head.job_id,
            names.REPLY_CHUNKS: sends.chunks,
            names.REPLY_BYTES: sends.bytes,
        }
        if sends.partition is not None:
            attributes[names.MESSAGING_PARTITION] = str(sends.partition)
        first = sends.first or 0.0
        last = sends.last or first
        attempt.add(
            f"{names.SEND} {topic}",
            (first, max(last, sends.acked or last)),
            attributes,
            kind=SpanKind.PRODUCER,
            events=((names.LAST_RECORD, last),),
            error=sends.error,
        )


class _Attempt:
    """Collects the spans of one attempt. Two processes stamp them, so all are kept within the process span."""

    def __init__(self, home: JobSpans, name: str, trace_hex: str, publisher: Remote | None) -> None:
        self.name = name
        self.spans: list[ReadableSpan] = []
        self.within = (0.0, 0.0)  # seconds
        self._home = home
        self._trace_hex = trace_hex
        self._trace_id = int(trace_hex, 16)
        self._state = TraceState(publisher.state) if publisher and publisher.state else None
        self.parent: SpanContext | None = None
        if publisher is not None:
            flags = _SAMPLED if publisher.sampled else TraceFlags(TraceFlags.DEFAULT)
            self.parent = SpanContext(publisher.trace_id, publisher.span_id, True, flags, self._state)

    def context(self, hex_id: str) -> SpanContext:
        return SpanContext(self._trace_id, int(hex_id, 16), False, _SAMPLED, self._state)

    def add(
        self,
        name: str,
        interval: tuple[float, float],
        attributes: Mapping[str, AttributeValue] | None = None,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        hex_id: str | None = None,
        parent: SpanContext | None = None,
        links: Sequence[Link] = (),
        events: Sequence[tuple[str, float]] = (),
        error: str | None = None,
    ) -> SpanContext:
        """Adds one span and returns its context. Without `parent` it is a child of the process span."""
        context = self.context(hex_id or span_id(self._trace_hex, self.name, name))
        start = self._nanoseconds(interval[0])
        found = dict(attributes or {})
        if error is not None:
            found[names.ERROR_TYPE] = error
        self.spans.append(
            ReadableSpan(
                name,
                context=context,
                parent=parent if parent is not None else self.parent,
                resource=self._home._resource,
                attributes=found,
                events=[Event(event, timestamp=self._nanoseconds(at)) for event, at in events],
                links=links,
                kind=kind,
                # The code alone: a message may quote what the tenant sent.
                status=_OK if error is None else Status(StatusCode.ERROR, error),
                start_time=start,
                end_time=max(start, self._nanoseconds(interval[1])),
                instrumentation_scope=self._home._scope,
            )
        )
        return context

    def _nanoseconds(self, seconds: float) -> int:
        first, last = self.within
        return int(min(max(seconds, first), last) * 1e9)


def _interval(start: float | None, end: float | None) -> tuple[float, float] | None:
    return None if start is None or end is None else (start, end)


def _error_type(end: End, sends: SendSummary | None = None) -> str | None:
    """`error.type` of an attempt: its stable code, or `expired`; undeliverable replies count too."""
    if end.kind in _ERROR_KINDS:
        return end.error.code if end.error is not None and end.kind == "failed" else end.kind
    return sends.error if sends is not None else None


def _resource(settings: Settings) -> Resource:
    attributes: Attributes = {
        names.SERVICE_NAME: settings.telemetry.service_name,
        names.SERVICE_INSTANCE: settings.worker,
        names.POOL: settings.pool,
    }
    with suppress(PackageNotFoundError):  # run from a source tree that is not installed
        attributes[names.SERVICE_VERSION] = version("headrace")
    return Resource.create(attributes)
