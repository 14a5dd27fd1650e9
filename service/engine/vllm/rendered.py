"""What rendering leaves for running: the `request` of a Prepared. Plain data; imports no vLLM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Rendered:
    """One job, ready for `AsyncLLM.generate`; used once, because the engine writes into it."""

    endpoint: str
    input: dict[str, Any]  # vLLM's EngineInput
    params: Any  # SamplingParams, DELTA
    body: Any  # the parsed request: parsers read it
    decode: Callable[[int], str]  # token id → text, for logprobs of tokens that vLLM did not decode
    asked: dict[str, Any] = field(default_factory=dict)  # the body as it was sent: what an error must not repeat
    logprobs: int | None = None  # alternatives per token; None = none asked
    parser: Callable[[], Any] | None = None  # a new parser, one a choice; None = the text is the content
    reasoning: bool = False  # a reasoning parser is on: its tokens are counted
    named_call: bool = False  # tool_choice names a function: it ends with `stop`, as OpenAI's does
    one_call: bool = False  # parallel_tool_calls is false
    extra: dict[str, Any] = field(default_factory=dict)  # further arguments of generate()
