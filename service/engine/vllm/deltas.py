"""vLLM's outputs → frames.Delta: text, token counts, logprobs, tool calls, reasoning, ends. One reader an attempt.

Owns the one parser path: streamed or not, the final response is the fold of these deltas. Does no I/O. The path of a
plain job costs one Delta per output and nothing else.

Tokens whose text vLLM or a parser holds back (stop strings, half characters, markers of tool calls) are counted with
the choice's next delta, at latest its last, so that the sum over all deltas is the usage.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from schemas.names import CHAT
from service.engine.protocol import EngineFault, EngineLost, Finished
from service.engine.vllm.refusals import unusable
from service.engine.vllm.rendered import Rendered
from service.frames import Delta, Usage

LOGPROB_FLOOR = -9999.0  # -inf is not JSON; OpenAI's own floor


class Reader:
    """Reads the outputs of one attempt. `cancelled` is set by the engine before it aborts the attempt."""

    def __init__(self, rendered: Rendered, prompt_tokens: int, n: int) -> None:
        self.cancelled = False
        self._rendered = rendered
        self._prompt_tokens = prompt_tokens
        self._completion = 0
        self._held = [0] * n  # tokens not yet counted in a delta
        self._plain = rendered.parser is None and rendered.logprobs is None
        self._parsers = [rendered.parser() for _ in range(n)] if rendered.parser is not None else []
        self._called = [False] * n  # a tool call was streamed
        self._ids: list[list[int]] = [[] for _ in range(n)] if rendered.reasoning else []
        self._lengths = [0] * n  # characters so far: text_offset of completions' logprobs
        self._cached: int | None = None
        self._scheduled = self._first = self._last = 0.0  # EngineCore's monotonic clock; 0 = never
        self._preemptions = 0

    def read(self, output: Any) -> list[Delta]:
        """Raises EngineLost for an abort that nobody asked for, EngineFault for a request that failed inside,
        InvalidRequest for one whose constraint cannot be followed.
        """
        deltas: list[Delta] = []
        held = self._held
        for choice in output.outputs:
            index = choice.index
            text = choice.text
            tokens = len(choice.token_ids)
            self._completion += tokens
            if choice.finish_reason is not None:
                deltas.append(self._end(choice, output))
            elif not self._plain:
                delta = self._read(choice, output)
                if delta is not None:
                    deltas.append(delta)
            elif text:
                if held[index]:
                    tokens += held[index]
                    held[index] = 0
                deltas.append(Delta(index, text, tokens))
            else:
                held[index] += tokens
        return deltas

    def finished(self) -> Finished:
        offset = time.time() - time.monotonic()
        reasoning = sum(
            parser.count_reasoning_tokens(ids) for parser, ids in zip(self._parsers, self._ids, strict=False)
        )
        return Finished(
            usage=Usage(self._prompt_tokens, self._completion, self._cached or 0, reasoning),
            scheduled=self._scheduled + offset if self._scheduled else None,
            first_token=self._first + offset if self._first else None,
            last_token=self._last + offset if self._last else None,
            preemptions=self._preemptions,
        )

    # ------------------------------------------------------------------ the rarer paths

    def _read(self, choice: Any, output: Any) -> Delta | None:
        """A delta of a job with logprobs, tools or reasoning; None while there is nothing to show."""
        index = choice.index
        tokens = len(choice.token_ids) + self._held[index]
        finished = choice.finish_reason is not None
        if not tokens and not choice.text and not finished:
            return None  # a prefill in parts
        logprobs = self._logprobs(choice)
        delta = Delta(index, choice.text, tokens, logprobs)
        if self._parsers:
            self._parse(delta, choice, output)
        if finished or delta.text or delta.reasoning or delta.tool_calls or logprobs is not None:
            self._held[index] = 0
            return delta
        self._held[index] = tokens
        return None

    def _parse(self, delta: Delta, choice: Any, output: Any) -> None:
        index, rendered = choice.index, self._rendered
        if self._ids:
            self._ids[index].extend(choice.token_ids)
        try:
            message = self._parsers[index].parse_delta(
                delta_text=choice.text,
                delta_token_ids=list(choice.token_ids),
                request=rendered.body,
                prompt_token_ids=output.prompt_token_ids,
                finished=choice.finish_reason is not None,
            )
        except Exception as error:
            raise EngineFault(f"the output parser failed: {type(error).__name__}") from error
        delta.text = ""
        if message is None:
            return
        delta.text = message.content or ""
        delta.reasoning = getattr(message, "reasoning", None) or getattr(message, "reasoning_content", None)
        calls = [_call(call) for call in message.tool_calls or () if not rendered.one_call or call.index == 0]
        if calls:
            delta.tool_calls = calls
            self._called[index] = True

    def _end(self, choice: Any, output: Any) -> Delta:
        """The last delta of a choice. A job that was cancelled ends without a reason."""
        reason, stop = choice.finish_reason, choice.stop_reason
        if reason == "abort" and not self.cancelled:
            raise EngineLost("the engine stopped while the request was running")
        if reason == "error":
            # It does not compile, leads where no token is allowed, or its masks take too long (masks.py): vLLM says no
            # more than this, and for a constrained request there is no other cause of it.
            if getattr(self._rendered.params, "structured_outputs", None) is not None:
                raise unusable(self._rendered.asked)
            raise EngineFault("the engine reported an error for this request")
        delta = self._read(choice, output)
        assert delta is not None  # always made at the end of a choice
        match reason:
            case "stop" | "length":
                called = reason == "stop" and self._called[choice.index] and not self._rendered.named_call
                delta.finish_reason = "tool_calls" if called else reason
                delta.stop_reason = stop
            case "abort":
                pass
            case _:
                delta.finish_reason, delta.stop_reason = "stop", stop if stop is not None else reason
        self._measure(output)
        return delta

    def _measure(self, output: Any) -> None:
        """Times of the choice that ended: of several the earliest start, the latest end, the fewest cached tokens."""
        cached = output.num_cached_tokens or 0
        self._cached = cached if self._cached is None else min(self._cached, cached)
        times = output.metrics
        if times is None:
            return
        if times.scheduled_ts:
            self._scheduled = min(self._scheduled or times.scheduled_ts, times.scheduled_ts)
        if times.first_token_ts:
            self._first = min(self._first or times.first_token_ts, times.first_token_ts)
        self._last = max(self._last, times.last_token_ts)
        self._preemptions += getattr(times, "num_preemptions", 0)

    def _logprobs(self, choice: Any) -> dict[str, Any] | None:
        top = self._rendered.logprobs
        if top is None:
            return None
        if self._rendered.endpoint == CHAT:
            return chat_logprobs(choice.token_ids, choice.logprobs or (), top, self._rendered.decode)
        start = self._lengths[choice.index]
        found = completion_logprobs(choice.token_ids, choice.logprobs or (), top, start, self._rendered.decode)
        self._lengths[choice.index] = start + sum(map(len, found["tokens"]))
        return found


def chat_logprobs(token_ids: Any, steps: Any, top: int, decode: Callable[[int], str]) -> dict[str, Any]:
    """OpenAI's chat form: {"content": [{token, logprob, bytes, top_logprobs}, …]}, one entry a token."""
    content = []
    for position, token_id in enumerate(token_ids):
        step = steps[position] if position < len(steps) else None
        own = step.get(token_id) if step else None
        entry = _entry(own, token_id, decode)
        entry["top_logprobs"] = (
            [_entry(other, other_id, decode) for other_id, other in list(step.items())[:top]] if step else []
        )
        content.append(entry)
    return {"content": content}


def completion_logprobs(
    token_ids: Any, steps: Any, top: int, start: int, decode: Callable[[int], str]
) -> dict[str, Any]:
    """OpenAI's completions form: four lists, one item a token; offsets count characters from the choice's beginning."""
    tokens: list[str] = []
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for position, token_id in enumerate(token_ids):
        step = steps[position] if position < len(steps) else None
        own = step.get(token_id) if step else None
        token = _text(own, token_id, decode)
        tokens.append(token)
        values.append(None if own is None else max(own.logprob, LOGPROB_FLOOR))
        # The sampled token comes first and is given beside the `top` best ones, as OpenAI does.
        tops.append(
            None
            if not step
            else {
                _text(other, other_id, decode): max(other.logprob, LOGPROB_FLOOR)
                for other_id, other in list(step.items())[: top + 1]
            }
        )
        offsets.append(start)
        start += len(token)
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


def _text(logprob: Any, token_id: int, decode: Callable[[int], str]) -> str:
    text = None if logprob is None else logprob.decoded_token
    return decode(token_id) if text is None else text


def _entry(logprob: Any, token_id: int, decode: Callable[[int], str]) -> dict[str, Any]:
    token = _text(logprob, token_id, decode)
    return {
        "token": token,
        "logprob": LOGPROB_FLOOR if logprob is None else max(logprob.logprob, LOGPROB_FLOOR),
        "bytes": list(token.encode("utf-8", "replace")),
    }


def _call(call: Any) -> dict[str, Any]:
    """A fragment of a tool call: id, type and name come with the first one only."""
    fragment: dict[str, Any] = {"index": call.index}
    if call.id:
        fragment["id"] = call.id
        fragment["type"] = "function"
    function: dict[str, Any] = {}
    if call.function is not None:
        if call.function.name:
            function["name"] = call.function.name
        if call.function.arguments is not None:
            function["arguments"] = call.function.arguments
    fragment["function"] = function
    return fragment
