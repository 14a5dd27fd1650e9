"""A trace in the terminal."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from rich.console import Console

from service.cli.trace import Span, TraceUnavailable, bar, draw, duration, fetch, ordered


def span(name: str, id: str, parent: str | None, start: int, length: int, **more: Any) -> Span:
    return {
        "traceId": "a" * 32,
        "name": name,
        "id": id,
        "parentId": parent,
        "timestamp": start,
        "duration": length,
    } | more


SPANS = [
    span("decode", "5", "4", 300_000, 700_000),
    span("process jobs", "2", "1", 0, 1_000_000, kind="CONSUMER", tags={"headrace.outcome": "completed"}),
    span("chat m1", "4", "2", 200_000, 800_000, tags={"gen_ai.usage.output_tokens": "11"}),
    span("queue", "3", "2", 0, 200_000),
]


def drawn(spans: list[Span], width: int = 100) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, no_color=True).print(draw(spans))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_spans_are_a_tree_in_order_of_time() -> None:
    assert [(depth, found["name"]) for depth, found in ordered(SPANS)] == [
        (0, "process jobs"),
        (1, "queue"),
        (1, "chat m1"),
        (2, "decode"),
    ]


def test_a_cycle_or_a_missing_parent_loses_no_span() -> None:
    odd = [span("a", "1", "2", 0, 1), span("b", "2", "1", 0, 1), span("c", "3", "9", 0, 1)]
    assert sorted(found["name"] for _, found in ordered(odd)) == ["a", "b", "c"]


def test_the_waterfall_shows_name_time_and_what_matters() -> None:
    lines = drawn(SPANS)
    assert len(lines) == 4
    assert lines[0].startswith("process jobs") and "1.00 s completed" in lines[0]
    assert lines[2].startswith("  chat m1") and "800.0 ms out 11" in lines[2]
    assert lines[1].index("█") < lines[2].index("█") < lines[3].index("█")
    assert max(map(len, drawn(SPANS, 60))) <= 60


@pytest.mark.parametrize("width", [40, 60, 80, 100, 160])
def test_no_duration_is_cut_however_narrow_the_terminal(width: int) -> None:
    tags = {"headrace.outcome": "completed", "gen_ai.usage.input_tokens": "1234", "gen_ai.usage.output_tokens": "567"}
    spans = [
        span(f"process inference.default.jobs.{tier}", str(n), None, n * 33_800, 33_800, tags=tags)
        for n, tier in enumerate(("standard", "interactive"), 1)
    ]
    lines = drawn(spans, width)
    assert len(lines) == 2 and all("33.8 ms" in line for line in lines) and max(map(len, lines)) <= width


def test_a_trace_without_spans_says_so() -> None:
    assert drawn([]) == ["the trace has no spans"]
    assert drawn([{"id": "1", "name": "x"}])[0].startswith("x")


def test_the_shortest_span_has_a_bar_within_the_line() -> None:
    assert bar(span("x", "1", None, 1_000_000, 1), 0, 1_000_000, 20) == " " * 19 + "█"
    assert bar(span("x", "1", None, 0, 1_000_000), 0, 1_000_000, 20) == "█" * 20


@pytest.mark.parametrize(("length", "text"), [(0, "0 µs"), (840, "840 µs"), (12_345, "12.3 ms"), (4_560_000, "4.56 s")])
def test_durations_have_a_fitting_unit(length: int, text: str) -> None:
    assert duration(span("x", "1", None, 0, length)) == text


class Viewer:
    """Answers with one of `answers` a request, the last one for ever."""

    answers: list[tuple[int, list[Span]]]
    url = ""
    asked = 0


@pytest.fixture
def viewer() -> Iterator[Viewer]:
    state = Viewer()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, spans = state.answers[min(state.asked, len(state.answers) - 1)]
            state.asked += 1
            body = json.dumps(spans).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    yield state
    server.shutdown()
    server.server_close()
    thread.join(5)


def test_it_waits_until_the_named_spans_are_there(viewer: Viewer) -> None:
    viewer.answers = [(404, []), (200, SPANS[:2]), (200, SPANS)]
    assert fetch(viewer.url, "a" * 32, 10, ("process", "queue", "CHAT")) == SPANS
    assert viewer.asked == 3


def test_what_is_missing_at_the_deadline_is_named(viewer: Viewer) -> None:
    viewer.answers = [(200, SPANS)]
    with pytest.raises(TraceUnavailable, match="store"):
        fetch(viewer.url, "a" * 32, 0.3, ("process", "store"))


def test_a_viewer_that_is_away_is_said_to_be() -> None:
    with pytest.raises(TraceUnavailable, match="refused"):
        fetch("http://127.0.0.1:1", "a" * 32, 0.3)
