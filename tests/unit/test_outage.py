"""When the object store counts as away, from its calls' ends alone and from a server that misbehaves."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from service.outage import SILENT_S, Outage
from service.settings import StoreSettings
from service.store import NameRefused, Store, StoreUnavailable


def test_it_is_away_from_the_first_failure_to_the_first_answer() -> None:
    outage = Outage()
    assert outage.cause(0.0) is None
    first, second = outage.began(0.0), outage.began(0.0)
    outage.failed(first, "NewConnectionError")
    assert outage.cause(0.1) == "NewConnectionError"
    outage.answered(second, 0.2)
    assert outage.cause(0.2) is None


def test_silence_is_an_outage_unless_others_are_answered() -> None:
    outage = Outage()
    silent, other = outage.began(0.0), outage.began(0.0)
    assert outage.cause(SILENT_S - 1) is None
    assert outage.cause(SILENT_S) == f"no answer for {SILENT_S:.0f} s"
    outage.answered(other, SILENT_S)
    assert outage.cause(SILENT_S + 1) is None  # one slow upload
    outage.left(silent, SILENT_S + 1)
    assert outage.cause(100.0) is None


def test_a_silence_does_not_end_because_nobody_waits_any_more() -> None:
    outage = Outage()
    outage.left(outage.began(0.0), SILENT_S)
    assert outage.cause(100.0) is not None
    outage.answered(outage.began(100.0), 100.0)
    assert outage.cause(101.0) is None


class Server:
    """An S3 server that gives the answers it is told to."""

    def __init__(self) -> None:
        self.status = 200
        self.code = ""
        self.writes: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                outer.writes.append(self.path)
                body = f"<Error><Code>{outer.code}</Code></Error>".encode() if outer.status != 200 else b""
                self.send_response(outer.status)
                self.send_header("Content-Type", "application/xml")
                self.send_header("ETag", '"0"')
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_GET(self) -> None:
                body = f"<Error><Code>{outer.code}</Code></Error>".encode()
                self.send_response(outer.status)
                self.send_header("Content-Type", "application/xml")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    one = Server()
    yield one
    one.close()


@pytest.fixture
async def store(server: Server, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Store]:
    monkeypatch.setattr("service.store.CLIENT_RETRIES", 0)
    one = Store(StoreSettings(endpoint=f"127.0.0.1:{server.http.server_port}", deadline_s=1.0))
    yield one
    one.close()


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (500, "InternalError"),
        (503, "SlowDown"),
        (507, "XMinioStorageFull"),
        (403, "QuotaExceeded"),
        (502, "BadGateway"),
    ],
)
async def test_a_store_that_cannot_serve_or_is_full_is_away_until_it_takes_something(
    server: Server, store: Store, status: int, code: str
) -> None:
    server.status, server.code = status, code
    with pytest.raises(StoreUnavailable, match=code):
        await store.put("v1/x", b"x")
    assert store.away == code
    await store.probe()
    assert store.away == code
    server.status = 200
    await store.probe()
    assert store.away is None and server.writes[-1] == "/outputs/v1/probe"


@pytest.mark.parametrize(("status", "code"), [(403, "AccessDenied"), (400, "InvalidArgument")])
async def test_a_refusal_of_the_call_is_no_outage(server: Server, store: Store, status: int, code: str) -> None:
    server.status, server.code = status, code
    with pytest.raises(StoreUnavailable):
        await store.put("v1/x", b"x")
    assert store.away is None


@pytest.mark.parametrize(
    ("bucket", "key", "code"),
    [("outputs", "a/../b", ""), ("192.168.0.1", "a", ""), ("outputs", "k" * 1025, ""), ("outputs", "a", "InvalidURI")],
)
async def test_a_name_that_no_object_can_have_is_refused_at_once(
    server: Server, store: Store, bucket: str, key: str, code: str
) -> None:
    server.status, server.code = 400, code or "KeyTooLongError"
    began = time.monotonic()
    with pytest.raises(NameRefused):
        await store.get(bucket, key, 1, None)
    assert time.monotonic() - began < 0.5 and store.away is None


async def test_a_store_that_refuses_connections_is_away(server: Server, store: Store) -> None:
    server.close()
    with pytest.raises(StoreUnavailable):
        await store.put("v1/x", b"x")
    assert store.away == "NewConnectionError"
