"""A job as the telemetry tests use it, and a collector that decodes what it is sent."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan

from service.frames import End, Error, Head, Open, Timing, Usage
from service.settings import Settings, TelemetrySettings
from service.telemetry.spans import SendSummary, StoreSummary

T0 = 1_800_000_000.0
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
ATTEMPT = "01JDXQ7C0M3V5K8W9Z2B4N6P7R"


def settings(**telemetry: Any) -> Settings:
    return Settings(worker="w1", pool="p1", telemetry=TelemetrySettings(**telemetry))


def head(**changes: Any) -> Head:
    values: dict[str, Any] = {
        "topic": "inference.p1.jobs.interactive",
        "partition": 3,
        "offset": 41,
        "epoch": 1,
        "origin": "inference.p1.jobs.interactive/3/41",
        "job_id": "job-1",
        "run": 0,
        "tenant": "acme",
        "tier": "interactive",
        "endpoint": "/v1/chat/completions",
        "model": "m1",
        "reply_topic": "inference.replies",
        "reply_partition": None,
        "stream": True,
        "progress": False,
        "inline_max_bytes": 262_144,
        "store": "auto",
        "ttl_days": None,
        "metadata": None,
        "digest": "d" * 64,
        "trace": {"traceparent": TRACEPARENT},
        "broker_time": T0 - 0.5,
    }
    return Head(**(values | changes))


def opened(attempt: str = ATTEMPT, number: int = 1, announce: bool = True, **changes: Any) -> Open:
    return Open(
        stream=1, head=head(**changes), attempt=attempt, number=number, announce=announce, prompt_tokens=20, at=T0
    )


def timing(**changes: Any) -> Timing:
    values: dict[str, Any] = {
        "received": T0,
        "admitted": T0 + 0.1,
        "submitted": T0 + 0.15,
        "scheduled": T0 + 0.2,
        "first_token": T0 + 0.3,
        "last_token": T0 + 1.3,
        "ended": T0 + 1.31,
    }
    return Timing(**(values | changes))


def ended(kind: str = "completed", error: Error | None = None, **times: Any) -> End:
    return End(
        stream=1, kind=kind, usage=Usage(prompt=20, completion=11, cached=16), timing=timing(**times), error=error
    )


def refused(code: str = "model_not_found") -> End:
    """What intake refused: it never waited and never ran."""
    return End(
        stream=1, kind="failed", usage=Usage(), timing=Timing(T0, ended=T0 + 0.001), error=Error(code, "no such")
    )


def sends(**changes: Any) -> SendSummary:
    values: dict[str, Any] = {
        "first": T0 + 0.16,
        "last": T0 + 1.45,
        "acked": T0 + 1.47,
        "chunks": 5,
        "bytes": 2_000,
        "topic": "inference.replies",
        "partition": 2,
        "finish_reasons": ("stop",),
    }
    return SendSummary(**(values | changes))


STORED = StoreSummary(T0 + 1.32, T0 + 1.44, "outputs", "v1/acme/job-1/output.json", 300_000)


def by_name(spans: list[ReadableSpan]) -> dict[str, ReadableSpan]:
    """Spans by the first word of their names, which is unique within an attempt."""
    return {span.name.split(" ")[0]: span for span in spans}


class Receiver:
    """An OTLP/HTTP collector of one process: decodes, keeps, answers with `status`; hangs while `gate` is cleared."""

    def __init__(self) -> None:
        self.requests: list[ExportTraceServiceRequest] = []
        self.encodings: list[str | None] = []
        self.status = 200
        self.gate = threading.Event()
        self.gate.set()
        self.arrived = threading.Condition()
        self.endpoint = ""

    def spans(self) -> list[Any]:
        with self.arrived:
            return [s for r in self.requests for g in r.resource_spans for c in g.scope_spans for s in c.spans]

    def wait_for_spans(self, count: int, deadline_s: float = 10.0) -> list[Any]:
        with self.arrived:
            assert self.arrived.wait_for(lambda: len(self.spans()) >= count, deadline_s), len(self.spans())
        return self.spans()


@contextmanager
def receiver() -> Iterator[Receiver]:
    state = Receiver()
    state.arrived = threading.Condition(threading.RLock())

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            state.gate.wait(30)
            encoding = self.headers.get("content-encoding")
            request = ExportTraceServiceRequest()
            request.ParseFromString(gzip.decompress(body) if encoding == "gzip" else body)
            with state.arrived:
                state.encodings.append(encoding)
                if state.status == 200 and self.path == "/v1/traces":
                    state.requests.append(request)
                state.arrived.notify_all()
            self.send_response(state.status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    state.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield state
    finally:
        state.gate.set()
        server.shutdown()
        server.server_close()
        thread.join(5)
