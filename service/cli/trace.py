"""One trace in the terminal: fetched from Zipkin's query interface, drawn as a waterfall. Owns the picture only."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.style import Style
from rich.table import Table
from rich.text import Text

Span = dict[
    str, Any
]  # Zipkin JSON v2: traceId, id, parentId?, name, kind?, timestamp and duration in microseconds, tags

POLL_S = 0.25  # the collector batches; a span is there about 2 s after its job
NAMES_MAX_CHARS = 44
BAR_MIN_CHARS = 20
KIND_STYLE = {"PRODUCER": "magenta", "CONSUMER": "cyan", "CLIENT": "yellow", "SERVER": "yellow"}
# Shown beside a span if it has them: what an operator looks for first.
TAGS = (
    ("headrace.outcome", ""),
    ("error.type", "error "),
    ("gen_ai.usage.input_tokens", "in "),
    ("gen_ai.usage.output_tokens", "out "),
    ("headrace.reply.chunks", "chunks "),
    ("headrace.store.bytes", "bytes "),
)


# The viewer is on this machine or in its cluster: a proxy in the environment is for elsewhere.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class TraceUnavailable(Exception):
    """The trace did not become complete in time. The message says what was missing, or why nobody answered."""


def fetch(zipkin: str, trace_id: str, deadline_s: float, names: Collection[str] = ()) -> list[Span]:
    """The spans of a trace once all `names` are among them (a name matches by its first word: `send` or `send x`).

    Polls until then; raises TraceUnavailable after `deadline_s` seconds. Blocks.
    """
    url = f"{zipkin.rstrip('/')}/api/v2/trace/{trace_id}"
    give_up = time.monotonic() + deadline_s
    spans: list[Span] = []
    problem = "nobody answered"
    while True:
        try:
            with _OPENER.open(url, timeout=max(0.1, min(5.0, deadline_s))) as answer:
                spans = json.load(answer)
            missing = sorted(name for name in names if not any(_is_called(span, name) for span in spans))
            if spans and not missing:
                return spans
            problem = f"spans not there yet: {', '.join(missing)}" if spans else "the trace is empty"
        except urllib.error.HTTPError as refusal:
            problem = "the trace is not there yet" if refusal.code == 404 else f"HTTP {refusal.code}"
        except (OSError, ValueError) as failure:
            problem = str(failure)
        if time.monotonic() + POLL_S >= give_up:
            raise TraceUnavailable(f"{url}: {problem} after {deadline_s:g} s")
        time.sleep(POLL_S)


def draw(spans: Sequence[Span]) -> Waterfall:
    """A renderable for a Rich console."""
    return Waterfall(spans)


def ordered(spans: Sequence[Span]) -> Iterator[tuple[int, Span]]:
    """(depth, span), parents before children and by start among siblings.

    A span whose parent is not in the trace counts as a root; one that hangs in a cycle does too: nothing is left out.
    """
    by_id = {str(span.get("id", "")): span for span in spans}
    children: dict[str, list[Span]] = {}
    for span in by_id.values():
        parent = str(span.get("parentId") or "")
        children.setdefault(parent if parent in by_id else "", []).append(span)
    for siblings in children.values():
        siblings.sort(key=lambda span: (_start(span), -_duration(span)))
    drawn: set[str] = set()

    def walk(span: Span, depth: int) -> Iterator[tuple[int, Span]]:
        if span["id"] in drawn:
            return
        drawn.add(span["id"])
        yield depth, span
        for child in children.get(span["id"], ()):
            yield from walk(child, depth + 1)

    for root in children.get("", ()):
        yield from walk(root, 0)
    for span in by_id.values():
        yield from walk(span, 0)


class Waterfall:
    """A line a span: name by depth, a bar at its time, its duration, and what is worth knowing of it."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._lines = list(ordered([span for span in spans if span.get("id")]))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not self._lines:
            yield Text("the trace has no spans", style="dim")
            return
        begin = min(_start(span) for _, span in self._lines)
        end = max(_start(span) + _duration(span) for _, span in self._lines)
        labels = [f"{'  ' * depth}{span.get('name', '?')}" for depth, span in self._lines]
        notes = [_note(span) for _, span in self._lines]
        times = [duration(span) for _, span in self._lines]
        # The bar gives way first, then the notes, then the names; a duration is never cut.
        room = max(1, options.max_width - max(map(len, times)) - 3)  # a blank between two columns
        name_chars = max(1, min(NAMES_MAX_CHARS, max(map(len, labels)), room - BAR_MIN_CHARS))
        note_chars = max(0, min(max(map(len, notes)), room - name_chars - BAR_MIN_CHARS))
        width = max(1, room - name_chars - note_chars)
        grid = Table.grid(padding=(0, 1))
        grid.add_column(width=name_chars, no_wrap=True, overflow="ellipsis")
        grid.add_column(width=width, no_wrap=True)
        grid.add_column(min_width=max(map(len, times)), justify="right", no_wrap=True)
        if note_chars:
            grid.add_column(max_width=note_chars, no_wrap=True, style="dim", overflow="ellipsis")
        for (_, span), label, time_told, note in zip(self._lines, labels, times, notes, strict=True):
            failed = "error" in span.get("tags", {}) or "error.type" in span.get("tags", {})
            style = Style.parse("red" if failed else KIND_STYLE.get(str(span.get("kind")), "green"))
            row = (Text(label, style=style), Text(bar(span, begin, end, width), style=style), time_told, note)
            grid.add_row(*row[: len(grid.columns)])
        yield grid


def bar(span: Span, begin: int, end: int, width: int) -> str:
    """The span's time as a row of blocks on a line of `width` characters from `begin` to `end` (microseconds).

    At least one block, so that a span of microseconds is seen beside one of seconds.
    """
    whole = max(1, end - begin)
    first = min(width - 1, (_start(span) - begin) * width // whole)
    last = min(width, max(first + 1, round((_start(span) + _duration(span) - begin) * width / whole)))
    return " " * first + "█" * (last - first)


def duration(span: Span) -> str:
    """In the unit that leaves one to three digits before the point: `840 µs`, `12.3 ms`, `4.56 s`."""
    microseconds = _duration(span)
    if microseconds < 1_000:
        return f"{microseconds} µs"
    if microseconds < 1_000_000:
        return f"{microseconds / 1_000:.1f} ms"
    return f"{microseconds / 1_000_000:.2f} s"


def _note(span: Span) -> str:
    tags = span.get("tags", {})
    return " ".join(f"{label}{tags[name]}" for name, label in TAGS if name in tags)


def _is_called(span: Span, name: str) -> bool:
    found = str(span.get("name", "")).lower()
    return found == name.lower() or found.startswith(f"{name.lower()} ")


def _start(span: Span) -> int:
    return int(span.get("timestamp") or 0)


def _duration(span: Span) -> int:
    return int(span.get("duration") or 0)
