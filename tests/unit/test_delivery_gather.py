"""Coalescer, fold, chunks and events: nothing is lost, split wrongly, or told differently at the end."""

from __future__ import annotations

import hashlib
import unicodedata
from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from schemas.events import read_event
from schemas.fields import parse_time
from schemas.names import CHAT, COMPLETIONS
from service.delivery.chunks import Chunks
from service.delivery.coalescer import Coalescer
from service.delivery.events import Events, stamp, timings_of, waiting
from service.delivery.fold import Fold, usage_of
from service.delivery.gather import Gather, split, weight, whole
from service.frames import Delta, Head, Open, Timing, Usage

INTERVAL, TOKENS, BYTES = 0.05, 64, 4096
PERSIAN, FAMILY, ACCENT = "سلام دنیا", "👩‍👩‍👧‍👦", "e\u0301"


def head(endpoint: str = CHAT, **changes: Any) -> Head:
    fields: dict[str, Any] = {
        "topic": "inference.default.jobs.standard",
        "partition": 0,
        "offset": 0,
        "epoch": 1,
        "origin": "inference.default.jobs.standard/0/0",
        "job_id": "job",
        "run": 0,
        "tenant": "acme",
        "tier": "standard",
        "endpoint": endpoint,
        "model": "m",
        "reply_topic": "r",
        "reply_partition": None,
        "stream": True,
        "progress": False,
        "inline_max_bytes": 262144,
        "store": "auto",
        "ttl_days": None,
        "metadata": None,
        "digest": "",
        "trace": {},
        "broker_time": 0.0,
    }
    return Head(**{**fields, **changes})


def opened(endpoint: str = CHAT) -> Open:
    return Open(
        stream=1,
        head=head(endpoint),
        attempt="01JAZ00000000000000000000A",
        number=1,
        announce=True,
        prompt_tokens=3,
        at=1_700_000_000.0,
    )


def logprobs(count: int) -> dict[str, Any]:
    entry = {"token": "a", "logprob": -0.1, "bytes": [97], "top_logprobs": []}
    return {"content": [entry for _ in range(count)]}


letters = st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from("e\u0301\u200d👩🏽سلا\u200c"))
texts = st.text(letters, max_size=12)


@st.composite
def streams(draw: st.DrawFn) -> list[list[Delta]]:
    """What an engine may give: lists of deltas of up to three choices, each ending with a finish reason."""
    choices = draw(st.integers(1, 3))
    lists: list[list[Delta]] = []
    for _ in range(draw(st.integers(0, 12))):
        deltas = []
        for index in range(choices):
            if draw(st.booleans()):
                tokens = draw(st.integers(0, 40))
                delta = Delta(index, draw(texts), tokens)
                if draw(st.booleans()):
                    delta.logprobs = logprobs(tokens)
                if draw(st.integers(0, 4)) == 0:
                    delta.reasoning = draw(texts)
                if draw(st.integers(0, 4)) == 0:
                    call = draw(st.integers(0, 1))
                    delta.tool_calls = [{"index": call, "function": {"arguments": draw(texts)}}]
                deltas.append(delta)
        if deltas:
            lists.append(deltas)
    lists.append([Delta(index, "", 1, finish_reason="stop") for index in range(choices)])
    return lists


def folded(deltas: list[Delta]) -> dict[int, tuple[Any, ...]]:
    gather = Gather(deltas)
    return {
        index: (
            choice.text,
            choice.tokens,
            "".join(choice.reasoning or []),
            {k: v["function"].get("arguments", "") for k, v in (choice.tools or {}).items()},
            len((choice.logprobs or {}).get("content", [])),
            choice.finish_reason,
        )
        for index, choice in gather.choices.items()
    }


@given(streams(), st.lists(st.floats(0, 0.08), min_size=30, max_size=30))
def test_what_is_coalesced_is_what_came_in(lists: list[list[Delta]], gaps: list[float]) -> None:
    coalescer = Coalescer(INTERVAL, TOKENS, BYTES)
    out: list[Delta] = []
    now, due, shown = 100.0, None, False
    for deltas, gap in zip(lists, gaps, strict=False):
        now += gap
        if due is not None and due <= now:
            out += coalescer.take(now)
            due = None
        visible = any(d.text or d.reasoning or d.tool_calls or d.finish_reason for d in deltas)
        when = coalescer.add(deltas, now)
        assert when <= now + INTERVAL  # nothing waits longer
        if visible and not shown:
            assert when <= now  # the first token at once
            shown = True
        if coalescer.tokens >= TOKENS or coalescer.size >= BYTES:
            assert when <= now
        due = when
        if when <= now:
            out += coalescer.take(now)
            due = None
            assert not coalescer and coalescer.size == 0
    out += coalescer.take(now)
    assert folded(out) == folded([d for deltas in lists for d in deltas])


def test_a_flush_interval_is_measured_from_the_last_chunk() -> None:
    coalescer = Coalescer(INTERVAL, TOKENS, BYTES)
    assert coalescer.add([Delta(0, "a", 1)], 10.0) <= 10.0
    coalescer.take(10.0)
    assert coalescer.add([Delta(0, "b", 1)], 10.01) == 10.05
    assert coalescer.add([Delta(0, "c", 1)], 10.02) == 10.05
    coalescer.take(10.05)
    assert coalescer.add([Delta(0, "d", 1)], 11.0) <= 11.0  # slow streams do not wait


def test_held_back_tokens_do_not_spend_the_first_flush() -> None:
    coalescer = Coalescer(INTERVAL, TOKENS, BYTES)
    assert coalescer.add([Delta(0, "", 1)], 10.0) == 10.05
    assert coalescer.add([Delta(0, "", 1)], 10.04) == 10.05
    assert coalescer.add([Delta(0, "now", 1)], 10.045) <= 10.045
    assert coalescer.take(10.045) == [Delta(0, "now", 3)]


def test_size_counts_bytes_not_characters() -> None:
    assert weight(Delta(0, "سلام", 1)) == 8
    coalescer = Coalescer(INTERVAL, 10_000, BYTES)
    coalescer.add([Delta(0, "x", 1)], 1.0)
    coalescer.take(1.0)
    assert coalescer.add([Delta(0, "漢" * 1400, 1)], 1.001) == 1.001


@given(streams(), st.integers(2, 7))
def test_pieces_gather_to_the_whole(lists: list[list[Delta]], parts: int) -> None:
    for delta in Gather([d for deltas in lists for d in deltas]).deltas():
        pieces = split(delta, parts)
        assert len(pieces) <= parts
        assert folded(pieces) == folded([delta])
        assert all(p.finish_reason is None for p in pieces[:-1])
        for piece in pieces[1:]:
            assert not piece.text or (unicodedata.combining(piece.text[0]) == 0 and piece.text[0] != "\u200d")


def test_a_character_is_never_cut_in_two() -> None:
    text = FAMILY * 40 + ACCENT * 40 + PERSIAN
    for parts in range(2, 30):
        pieces = [p.text for p in split(Delta(0, text, 10), parts)]
        assert "".join(pieces) == text
        for piece in pieces:
            assert not piece.startswith(("\u200d", "\u0301")) and not piece.endswith("\u200d")


@given(st.text(alphabet="a\ud83d\ude00é", max_size=10), st.integers(0, 10))
def test_surrogate_halves_join_across_pieces_and_lone_ones_are_replaced(text: str, cut: int) -> None:
    first, carry = whole(text[:cut], "", False)
    second, rest = whole(text[cut:], carry, True)
    assert rest == ""
    assert first + second == whole(text, "", True)[0]
    (first + second).encode()


@given(streams())
def test_the_response_is_the_fold_of_the_chunks(lists: list[list[Delta]]) -> None:
    """Streamed or not, and however it was coalesced: text, tool calls and reasoning are the same."""
    for endpoint in (CHAT, COMPLETIONS):
        fold, events = Fold(endpoint), Events(opened(endpoint), "", 262144)
        values = []
        for deltas in lists:
            fold.add(deltas)
            values += events.chunk(Gather(deltas).deltas(), 1.0)
        usage = usage_of(Usage(3, sum(d.tokens for deltas in lists for d in deltas)))
        response = fold.response("chatcmpl-1", 1, "m", usage)
        model = ChatCompletion if endpoint == CHAT else Completion
        parsed = model.model_validate(orjson.loads(orjson.dumps(response)))
        offset = 0
        for seq, (value, headers) in enumerate(values):
            event = orjson.loads(value)
            assert event["seq"] == seq and dict(headers)["s"] == str(seq).encode()
            assert event["offset"] == offset
            offset += event["tokens"]
            if endpoint == CHAT:
                ChatCompletionChunk.model_validate(event["chunk"])
        assert offset == usage["completion_tokens"]
        for choice in parsed.choices:
            parts = [c for v, _ in values for c in orjson.loads(v)["chunk"]["choices"] if c["index"] == choice.index]
            assert [c["finish_reason"] for c in parts][:-1] == [None] * (len(parts) - 1)
            assert parts[-1]["finish_reason"] == choice.finish_reason == "stop"
            if endpoint == CHAT:
                assert [("role" in c["delta"]) for c in parts] == [True] + [False] * (len(parts) - 1)
                text = "".join(c["delta"].get("content") or "" for c in parts)
                assert text == (choice.message.content or "")
                assert "".join(c["delta"].get("reasoning", "") for c in parts) == (
                    getattr(choice.message, "reasoning", None) or ""
                )
            else:
                text = "".join(c["text"] for c in parts)
                assert text == choice.text
            assert fold.digests()[choice.index] == hashlib.sha256(text.encode()).hexdigest()


def test_tool_call_fragments_fold_to_whole_calls() -> None:
    fold = Fold(CHAT)
    start = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "weather", "arguments": ""}}
    fold.add([Delta(0, "", 1, tool_calls=[start])])
    for part in ('{"city"', ': "Shi', 'raz"}'):
        fold.add([Delta(0, "", 1, tool_calls=[{"index": 0, "function": {"arguments": part}}])])
    second = {"index": 1, "id": "call_2", "type": "function", "function": {"name": "time", "arguments": "{}"}}
    fold.add([Delta(0, "", 1, tool_calls=[second]), Delta(0, "", 1, finish_reason="tool_calls")])
    choice = fold.response("chatcmpl-1", 1, "m", usage_of(Usage()))["choices"][0]
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "tool_calls"
    assert [c["function"] for c in choice["message"]["tool_calls"]] == [
        {"name": "weather", "arguments": '{"city": "Shiraz"}'},
        {"name": "time", "arguments": "{}"},
    ]
    assert fold.partial(1000)["choices"][0]["tool_calls"][0]["id"] == "call_1"


def test_completion_logprobs_run_on() -> None:
    fold = Fold(COMPLETIONS)
    for token, offset in ((" a", 0), (" b", 2)):
        part = {"tokens": [token], "token_logprobs": [-0.5], "top_logprobs": [{token: -0.5}], "text_offset": [offset]}
        fold.add([Delta(0, token, 1, logprobs=part)])
    found = fold.response("cmpl-1", 1, "m", usage_of(Usage()))["choices"][0]["logprobs"]
    assert found["tokens"] == [" a", " b"] and found["text_offset"] == [0, 2]


def test_an_event_over_the_limit_is_split_and_numbered_on() -> None:
    events = Events(opened(), "", 4096)
    call = {"index": 0, "id": "c", "function": {"name": "f", "arguments": "x" * 9000}}
    deltas = [
        Delta(0, PERSIAN * 600, 1000, logprobs=logprobs(100)),
        Delta(1, '"\n' * 5000, 77, tool_calls=[call]),
        Delta(2, "", 1, finish_reason="stop"),
    ]
    found = [orjson.loads(value) for value, _ in events.chunk(deltas, 1.0)]
    assert all(len(orjson.dumps(e)) <= 4096 for e in found)
    assert [e["seq"] for e in found] == list(range(len(found)))
    assert sum(e["tokens"] for e in found) == 1078
    assert [e["offset"] for e in found] == [sum(e["tokens"] for e in found[:i]) for i in range(len(found))]
    choices = [c for e in found for c in e["chunk"]["choices"]]
    assert "".join(c["delta"].get("content", "") for c in choices if c["index"] == 0) == PERSIAN * 600
    assert "".join(c["delta"].get("content", "") for c in choices if c["index"] == 1) == '"\n' * 5000
    assert sum(len((c["logprobs"] or {}).get("content", [])) for c in choices) == 100
    roles = [c["index"] for c in choices if "role" in c["delta"]]
    assert roles == [0, 1, 2]
    calls = [c for choice in choices for c in choice["delta"].get("tool_calls", [])]
    assert "".join(c["function"]["arguments"] for c in calls) == "x" * 9000
    assert calls[0]["id"] == "c" and not any("id" in c for c in calls[1:])


def test_a_partial_is_bounded() -> None:
    fold = Fold(CHAT)
    fold.add([Delta(0, "a" * 1000, 1), Delta(1, "b" * 1000, 1, reasoning="c" * 10)])
    partial = fold.partial(1500)
    assert [len(c["text"]) for c in partial["choices"]] == [1000, 500]
    assert fold.partial(5000)["choices"][1]["reasoning"] == "c" * 10


def test_events_are_what_the_models_say() -> None:
    read_event(waiting(head(metadata={"a": "b"}), "quota", 1.0, 2.5)[0])
    events = Events(opened(), "00-" + "1" * 32 + "-" + "2" * 16 + "-01", 4096)
    started = events.started("w", "1" * 32, 3, 1_700_000_000.25)
    assert dict(started[1])["traceparent"].startswith(b"00-1")
    assert orjson.loads(started[0])["at"] == "2023-11-14T22:13:20.250Z"
    read_event(started[0])
    read_event(events.chunk([Delta(0, "x", 1)], 1.0)[0][0])
    read_event(events.abandoned("why", 1.0)[0])


def test_chunks_repeat_a_role_until_it_has_gone_out() -> None:
    chunks = Chunks(CHAT, "id", 1, "m")
    delta = Delta(0, "x", 1)
    assert "role" in chunks.chunk([delta])["choices"][0]["delta"]
    assert "role" in chunks.chunk([delta])["choices"][0]["delta"]
    chunks.sent([delta])
    assert "role" not in chunks.chunk([delta])["choices"][0]["delta"]


def test_timings_are_never_negative_and_null_where_it_never_got_to() -> None:
    timing = Timing(10.0, 10.5, 10.4, None, 11.0, 12.0, 12.5)
    found = timings_of(timing, 11)
    assert found == {
        "queue_ms": 500.0,
        "admission_ms": 0.0,
        "prefill_ms": None,
        "first_token_ms": 1000.0,
        "per_token_ms": 100.0,
        "total_ms": 2500.0,
    }


@given(st.floats(0, 4_000_000_000))
def test_times_have_milliseconds(seconds: float) -> None:
    assert abs(parse_time(stamp(seconds)).timestamp() - seconds) < 0.0011
