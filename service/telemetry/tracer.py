"""Takes ended attempts off the delivery process's loop, and sends their spans to a collector (OTLP/HTTP).

Owns one thread and a bounded queue. `ended` decides, appends and returns: it never waits, never fails, and costs
nothing while there is no collector. Building, encoding, compressing and sending happen in the thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from typing import NamedTuple

import msgspec
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from service.frames import End, Head, Open, Unanswered
from service.settings import Settings
from service.telemetry.propagation import SAMPLED, format_traceparent, trace_ids
from service.telemetry.sampling import keep, likely
from service.telemetry.spans import Former, JobSpans, SendSummary, StoreSummary

log = logging.getLogger(__name__)

QUEUE_JOBS = 2048  # about 16,000 spans: ten seconds at 200 jobs/s; beyond it the oldest are dropped
BATCH_JOBS = 64  # about 512 spans, 0.3 MB before gzip; a larger batch holds the interpreter for longer
BATCH_DELAY_S = 0.5  # how long a lone job waits for company
EXPORT_TIMEOUT_S = 5.0  # one batch, the exporter's own retries included
MAX_FORMER = 4096  # abandoned attempts remembered, for the link from the next attempt


class _Attempt(NamedTuple):
    opened: Open
    end: End
    sends: SendSummary
    store: StoreSummary | None
    former: Former | None
    kept: str


class JobTracer:
    """`JobTracer(settings)`, `ended(…)` once per attempt from one thread, `close(timeout_s)` at the end."""

    def __init__(self, settings: Settings, exporter: SpanExporter | None = None) -> None:
        self._settings = settings.telemetry
        self._former: OrderedDict[str, Former] = OrderedDict()  # origin → the attempt that was abandoned last
        self._queue: deque[_Attempt | Unanswered] = deque(maxlen=QUEUE_JOBS)
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._dropped_jobs = 0  # written by the loop only
        self._exported = self._failed = 0  # spans; written by the thread only
        self._reported = (0, 0, 0)
        self._thread: threading.Thread | None = None
        endpoint = self._settings.otlp_endpoint
        if exporter is None and not endpoint:
            return
        self._exporter = exporter or OTLPSpanExporter(
            endpoint=f"{endpoint.rstrip('/').removesuffix('/v1/traces')}/v1/traces",
            timeout=EXPORT_TIMEOUT_S,
            compression=Compression.Gzip,
        )
        self._spans = JobSpans(settings)
        self._thread = threading.Thread(target=self._export, name="span-export", daemon=True)
        self._thread.start()

    def ended(self, opened: Open, end: End, sends: SendSummary, store: StoreSummary | None = None) -> None:
        """An attempt is over and acknowledged (or abandoned). Never waits, never raises for what it is given."""
        if self._thread is None:
            return
        former = self._swap(opened, end)
        kept = keep(opened, end, self._settings)
        if kept is None:
            return
        if end.dead is not None:  # it holds the whole record: not to be kept for seconds in a queue
            end = msgspec.structs.replace(end, dead=None)
        if len(self._queue) == QUEUE_JOBS:
            self._dropped_jobs += 1
        self._queue.append(_Attempt(opened, end, sends, store, former, kept))
        if len(self._queue) >= BATCH_JOBS:
            self._wake.set()

    def unanswered(self, record: Unanswered) -> None:
        """A record was refused and nobody is told. Always kept. Never waits, never raises for what it is given."""
        if self._thread is None:
            return
        if len(self._queue) == QUEUE_JOBS:
            self._dropped_jobs += 1
        self._queue.append(record)

    def traceparent(self, head: Head, attempt: str) -> str:
        """The context of an attempt's process span, for headers of its replies."""
        trace_id, span_id = trace_ids(head, attempt)
        flags = SAMPLED if likely(head, trace_id, self._settings) else 0
        return format_traceparent(int(trace_id, 16), int(span_id, 16), flags)

    def counters(self) -> dict[str, float]:
        """Changes since the last call, for `Pressure.counters`; empty if nothing changed."""
        now = (self._exported, self._failed, self._dropped_jobs)
        names = ("spans_exported", "spans_failed", "span_jobs_dropped")
        changes = {name: float(new - old) for name, new, old in zip(names, now, self._reported, strict=True)}
        self._reported = now
        return {name: change for name, change in changes.items() if change}

    def close(self, timeout_s: float = 2.0) -> None:
        """Sends what is queued for at most `timeout_s` seconds, then gives up on the rest. Blocks: not for a loop."""
        if self._thread is None:
            return
        deadline = time.monotonic() + timeout_s
        self._closing.set()
        self._wake.set()
        self._thread.join(timeout_s * 0.9)
        self._exporter.shutdown()  # interrupts the exporter's waits between its retries
        self._thread.join(max(0.0, deadline - time.monotonic()))

    def _swap(self, opened: Open, end: End) -> Former | None:
        """The attempt before this one; an abandoned one is remembered for the next."""
        origin = opened.head.origin
        former = self._former.pop(origin, None) if self._former else None
        if end.kind == "abandoned":
            self._former[origin] = Former(opened.attempt, end.timing.ended or opened.at)
            if len(self._former) > MAX_FORMER:
                self._former.popitem(last=False)
        return former

    def _export(self) -> None:
        down = False
        while True:
            if not self._closing.is_set() and len(self._queue) < BATCH_JOBS:
                self._wake.wait(BATCH_DELAY_S)
                self._wake.clear()
            spans = self._batch()
            if not spans:
                if self._closing.is_set():
                    return
                continue
            try:
                sent = self._exporter.export(spans) is SpanExportResult.SUCCESS
            except Exception:  # whatever a collector answers, the thread lives on
                log.exception("the span exporter failed")
                sent = False
            if sent:
                self._exported += len(spans)
            else:
                self._failed += len(spans)
                if self._closing.is_set():
                    return
            if down == sent:  # log changes only: a collector may be away for days
                down = not sent
                log.log(logging.WARNING if down else logging.INFO, "span export %s", "failing" if down else "restored")

    def _batch(self) -> list[ReadableSpan]:
        spans: list[ReadableSpan] = []
        for _ in range(BATCH_JOBS):
            try:
                job = self._queue.popleft()
            except IndexError:
                break
            try:
                if isinstance(job, Unanswered):
                    spans.append(self._spans.unanswered(job))
                else:
                    spans += self._spans.build(*job[:4], former=job.former, kept=job.kept)
            except Exception:
                self._failed += 1
                log.exception(
                    "no spans for %s", "a refused record" if isinstance(job, Unanswered) else job.opened.attempt
                )
            # Hands the interpreter back to the loop between jobs, instead of after the 5 ms that it would wait.
            time.sleep(0)
        return spans
