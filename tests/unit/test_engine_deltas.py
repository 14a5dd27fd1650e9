"""Outputs of vLLM → deltas: counts, ends, logprobs, tool calls, reasoning. On outputs of vLLM's shape, without vLLM."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import InvalidRequest
from schemas.names import CHAT, COMPLETIONS
from service.engine.protocol import EngineFault, EngineLost
from service.engine.vllm.deltas import LOGPROB_FLOOR, Reader
from service.engine.vllm.rendered import Rendered
from service.frames import Delta


def choice(
    text: str,
    tokens: int | list[int],
    index: int = 0,
    finish: str | None = None,
    stop: Any = None,
    logprobs: Any = None,
) -> Any:
    ids = list(range(tokens)) if isinstance(tokens, int) else tokens
    return SimpleNamespace(
        index=index, text=text, token_ids=ids, finish_reason=finish, stop_reason=stop, logprobs=logprobs
    )


def output(*choices: Any, cached: int | None = 0, metrics: Any = None) -> Any:
    return SimpleNamespace(
        outputs=list(choices), num_cached_tokens=cached, metrics=metrics, prompt_token_ids=[1, 2], finished=False
    )


def rendered(endpoint: str = CHAT, params: Any = None, **changes: Any) -> Rendered:
    return Rendered(endpoint, {}, params, None, lambda token: f"<{token}>", **changes)


def test_held_back_tokens_are_counted_with_the_next_text_of_their_choice() -> None:
    reader = Reader(rendered(), 3, 2)
    assert reader.read(output(choice("", 1), choice("a", 1, index=1))) == [Delta(1, "a", 1)]
    assert reader.read(output(choice("", 2))) == []
    assert reader.read(output(choice("سلام", 1))) == [Delta(0, "سلام", 4)]


def test_tokens_that_never_become_text_are_counted_with_the_last_delta() -> None:
    reader = Reader(rendered(), 3, 1)
    reader.read(output(choice("one", 1)))
    assert reader.read(output(choice("", 2))) == []
    (last,) = reader.read(output(choice("", 1, finish="stop", stop="!")))
    assert (last.tokens, last.text, last.finish_reason, last.stop_reason) == (3, "", "stop", "!")
    assert reader.finished().usage.completion == 4


@given(
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["", "x", "سلام", "🌊"]), st.integers(0, 5)), max_size=60),
    st.lists(st.sampled_from(["stop", "length", "abort", "repetition"]), min_size=3, max_size=3),
)
def test_the_sum_over_all_deltas_is_the_usage_and_the_text_is_whole(
    steps: list[tuple[int, str, int]], ends: list[str]
) -> None:
    reader = Reader(rendered(), 3, 3)
    reader.cancelled = True
    deltas = [d for index, text, tokens in steps for d in reader.read(output(choice(text, tokens, index)))]
    for index, finish in enumerate(ends):
        deltas += reader.read(output(choice("", 1, index, finish)))
    assert sum(d.tokens for d in deltas) == reader.finished().usage.completion == sum(s[2] for s in steps) + 3
    for index in range(3):
        assert "".join(d.text for d in deltas if d.index == index) == "".join(s[1] for s in steps if s[0] == index)


@pytest.mark.parametrize(
    "finish, stop, expected",
    [
        ("stop", None, ("stop", None)),
        ("stop", 2, ("stop", 2)),
        ("length", None, ("length", None)),
        ("repetition", None, ("stop", "repetition")),
    ],
)
def test_only_openais_reasons_to_finish_go_out(finish: str, stop: Any, expected: Any) -> None:
    (delta,) = Reader(rendered(), 3, 1).read(output(choice("x", 1, finish=finish, stop=stop)))
    assert (delta.finish_reason, delta.stop_reason) == expected


def test_an_abort_that_nobody_asked_for_means_that_the_engine_is_lost() -> None:
    with pytest.raises(EngineLost):
        Reader(rendered(), 3, 1).read(output(choice("x", 1, finish="abort")))


def test_an_abort_that_was_asked_for_ends_without_a_reason_and_keeps_its_text() -> None:
    reader = Reader(rendered(), 3, 1)
    reader.cancelled = True
    assert reader.read(output(choice("tail", 2, finish="abort"))) == [Delta(0, "tail", 2)]


def test_an_error_of_the_request_is_a_fault() -> None:
    with pytest.raises(EngineFault):
        Reader(rendered(), 3, 1).read(output(choice("", 0, finish="error")))


@pytest.mark.parametrize("tokens", [0, 1])
def test_a_constraint_that_cannot_be_followed_is_the_callers_fault_and_not_the_engines(tokens: int) -> None:
    body = {"structured_outputs": {"grammar": "root ::= root"}}
    constrained = rendered(params=SimpleNamespace(structured_outputs=object()), asked=body)
    with pytest.raises(InvalidRequest, match="structured_outputs: the engine cannot follow"):
        Reader(constrained, 3, 1).read(output(choice("", tokens, finish="error")))


def test_times_are_wall_clock_and_span_all_choices() -> None:
    def times(scheduled: float, first: float, last: float) -> Any:
        return SimpleNamespace(
            scheduled_ts=now - scheduled, first_token_ts=now - first, last_token_ts=now - last, num_preemptions=1
        )

    now = time.monotonic()
    reader = Reader(rendered(), 3, 2)
    reader.read(output(choice("a", 1, 0, "stop"), cached=128, metrics=times(5, 4, 3)))
    reader.read(output(choice("a", 1, 1, "stop"), cached=256, metrics=times(6, 2, 1)))
    end, wall = reader.finished(), time.time()
    assert end.scheduled == pytest.approx(wall - 6, abs=0.2)
    assert end.first_token == pytest.approx(wall - 4, abs=0.2)
    assert end.last_token == pytest.approx(wall - 1, abs=0.2)
    assert (end.usage.cached, end.preemptions) == (128, 2)


def test_a_job_cancelled_in_the_queue_has_no_times() -> None:
    reader = Reader(rendered(), 3, 1)
    reader.cancelled = True
    never = SimpleNamespace(scheduled_ts=0.0, first_token_ts=0.0, last_token_ts=0.0, num_preemptions=0)
    (delta,) = reader.read(output(choice("", 0, finish="abort"), metrics=never))
    assert delta.tokens == 0
    assert (reader.finished().scheduled, reader.finished().first_token, reader.finished().last_token) == (None,) * 3


# -------------------------------------------------------------------- logprobs


def logprob(value: float, text: str | None) -> Any:
    return SimpleNamespace(logprob=value, decoded_token=text)


STEPS = [{7: logprob(-0.5, "ab"), 8: logprob(float("-inf"), None)}, {9: logprob(-1.0, "ü"), 8: logprob(-2.0, "z")}]


def test_chat_logprobs_are_one_entry_a_token_and_json_can_hold_them() -> None:
    (delta,) = Reader(rendered(logprobs=2), 3, 1).read(output(choice("abü", [7, 9], logprobs=STEPS)))
    first, second = delta.logprobs["content"]
    assert (first["token"], first["logprob"], first["bytes"]) == ("ab", -0.5, [97, 98])
    assert [(t["token"], t["logprob"]) for t in first["top_logprobs"]] == [("ab", -0.5), ("<8>", LOGPROB_FLOOR)]
    assert second["bytes"] == list("ü".encode())


def test_logprobs_without_alternatives_have_an_empty_list() -> None:
    (delta,) = Reader(rendered(logprobs=0), 3, 1).read(output(choice("ab", [7], logprobs=STEPS[:1])))
    assert delta.logprobs["content"][0]["top_logprobs"] == []


def test_completion_logprobs_carry_their_offsets_on() -> None:
    reader = Reader(rendered(COMPLETIONS, logprobs=1), 3, 1)
    (first,) = reader.read(output(choice("ab", [7], logprobs=STEPS[:1])))
    (second,) = reader.read(output(choice("ü", [9], logprobs=STEPS[1:])))
    assert (first.logprobs["text_offset"], second.logprobs["text_offset"]) == ([0], [2])
    assert second.logprobs["tokens"] == ["ü"] and second.logprobs["token_logprobs"] == [-1.0]
    assert second.logprobs["top_logprobs"] == [{"ü": -1.0, "z": -2.0}]


def test_logprobs_go_out_even_when_their_text_is_held_back() -> None:
    (delta,) = Reader(rendered(logprobs=0), 3, 1).read(output(choice("", [7], logprobs=STEPS[:1])))
    assert (delta.text, delta.tokens, len(delta.logprobs["content"])) == ("", 1, 1)


# -------------------------------------------------------------------- parsers


class Scripted:
    """A parser that gives the messages of a list, one a call."""

    def __init__(self, *messages: Any) -> None:
        self.messages = list(messages)
        self.finished: list[bool] = []

    def parse_delta(self, *, finished: bool, **given: Any) -> Any:
        self.finished.append(finished)
        message = self.messages.pop(0)
        if isinstance(message, Exception):
            raise message
        return message

    def count_reasoning_tokens(self, ids: list[int]) -> int:
        return len([token for token in ids if token < 5])


def message(content: str | None = None, reasoning: str | None = None, calls: list[Any] | None = None) -> Any:
    return SimpleNamespace(content=content, reasoning=reasoning, tool_calls=calls or [])


def call(index: int, identity: str | None, name: str | None, arguments: str | None) -> Any:
    return SimpleNamespace(index=index, id=identity, function=SimpleNamespace(name=name, arguments=arguments))


def test_tool_calls_come_as_fragments_and_end_with_their_own_reason() -> None:
    parser = Scripted(None, message(calls=[call(0, "id-1", "f", "{")]), message(calls=[call(0, None, None, "}")]))
    reader = Reader(rendered(parser=lambda: parser), 3, 1)
    assert reader.read(output(choice("<tool", 1))) == []
    (first,) = reader.read(output(choice("_call>", 2)))
    assert (first.tokens, first.text) == (3, "")
    assert first.tool_calls == [
        {"index": 0, "id": "id-1", "type": "function", "function": {"name": "f", "arguments": "{"}}
    ]
    (last,) = reader.read(output(choice("}", 1, finish="stop")))
    assert last.tool_calls == [{"index": 0, "function": {"arguments": "}"}}]
    assert last.finish_reason == "tool_calls"
    assert parser.finished == [False, False, True]


@pytest.mark.parametrize("finish, named, expected", [("length", False, "length"), ("stop", True, "stop")])
def test_a_cut_or_named_call_keeps_its_reason(finish: str, named: bool, expected: str) -> None:
    parser = Scripted(message(calls=[call(0, "id-1", "f", "{}")]))
    reader = Reader(rendered(parser=lambda: parser, named_call=named), 3, 1)
    (delta,) = reader.read(output(choice("{}", 1, finish=finish)))
    assert delta.finish_reason == expected


def test_without_parallel_calls_only_the_first_goes_out() -> None:
    parser = Scripted(message(calls=[call(0, "a", "f", "{}"), call(1, "b", "f", "{}")]))
    (delta,) = Reader(rendered(parser=lambda: parser, one_call=True), 3, 1).read(output(choice("x", 1)))
    assert delta.tool_calls is not None and len(delta.tool_calls) == 1


def test_reasoning_is_kept_apart_from_the_content_and_counted() -> None:
    parser = Scripted(message(reasoning="hm"), message(content="yes"))
    reader = Reader(rendered(parser=lambda: parser, reasoning=True), 3, 1)
    (first,) = reader.read(output(choice("hm", [1, 2])))
    (second,) = reader.read(output(choice("yes", [9], finish="stop")))
    assert (first.reasoning, first.text, second.reasoning, second.text) == ("hm", "", None, "yes")
    assert reader.finished().usage.reasoning == 2


def test_a_parser_that_breaks_is_a_fault_of_this_job() -> None:
    reader = Reader(rendered(parser=lambda: Scripted(KeyError("secret"))), 3, 1)
    with pytest.raises(EngineFault) as fault:
        reader.read(output(choice("x", 1)))
    assert "secret" not in str(fault.value)


def test_each_choice_has_a_parser_of_its_own() -> None:
    made: list[Scripted] = []

    def parser() -> Scripted:
        made.append(Scripted(message(content=str(len(made)))))
        return made[-1]

    reader = Reader(rendered(parser=parser), 3, 2)
    deltas = reader.read(output(choice("x", 1, 0), choice("x", 1, 1)))
    assert [d.text for d in deltas] == ["0", "1"]
