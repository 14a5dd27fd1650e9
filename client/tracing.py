"""The publisher's part of a job's trace: one PRODUCER span per job record, and its context in the record's headers.

Uses the application's own OpenTelemetry provider and propagator. Without a provider no span is made, and a context that
is there already is still passed on.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Self

from opentelemetry import context, propagate, trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from schemas.names import H_TRACEPARENT

# Semantic conventions of messaging, still in development: spelled here and nowhere else in the client.
SYSTEM = "messaging.system"
OPERATION = "messaging.operation.name"
OPERATION_TYPE = "messaging.operation.type"
DESTINATION = "messaging.destination.name"
PARTITION = "messaging.destination.partition.id"
OFFSET = "messaging.kafka.offset"
MESSAGE_ID = "messaging.message.id"
MESSAGE_KEY = "messaging.kafka.message.key"


class Sending:
    """The span `send <topic>` around the publication of one job, a context manager that ends it."""

    def __init__(self, topic: str, job_id: str, key: str, traceparent: str | None = None) -> None:
        parent = context.get_current()
        if traceparent is not None:
            parent = propagate.extract({H_TRACEPARENT: traceparent}, parent)
        self._span: Span = trace.get_tracer("headrace.client").start_span(
            f"send {topic}",
            parent,
            SpanKind.PRODUCER,
            {
                SYSTEM: "kafka",
                OPERATION: "send",
                OPERATION_TYPE: "send",
                DESTINATION: topic,
                MESSAGE_ID: job_id,
                MESSAGE_KEY: key,
            },
        )
        carrier: dict[str, str] = {}
        propagate.inject(carrier, trace.set_span_in_context(self._span, parent))
        self.headers: Mapping[str, str] = carrier
        spanned = self._span.get_span_context()
        self.trace_id: str | None = trace.format_trace_id(spanned.trace_id) if spanned.is_valid else None

    def sent(self, partition: int, offset: int) -> None:
        self._span.set_attribute(PARTITION, str(partition))
        self._span.set_attribute(OFFSET, offset)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._span.set_attribute("error.type", type(error).__name__)
            self._span.set_status(Status(StatusCode.ERROR, str(error)))
        self._span.end()
