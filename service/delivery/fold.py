"""An attempt's deltas folded to what its terminal event holds: response, partial, digests. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from schemas.names import CHAT
from service.delivery.gather import Choice, Gather
from service.frames import Delta, Usage


def usage_of(usage: Usage) -> dict[str, Any]:
    """OpenAI's usage object; `cached_tokens` is always there (contract.md §2)."""
    found: dict[str, Any] = {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }
    if usage.reasoning:
        found["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning}
    return found


class Fold:
    """Takes deltas in and gives the final objects out."""

    __slots__ = ("_chat", "_gather")

    def __init__(self, endpoint: str) -> None:
        self._chat = endpoint == CHAT
        self._gather = Gather()

    def add(self, deltas: Sequence[Delta]) -> None:
        self._gather.add(deltas)

    def response(self, response_id: str, created: int, model: str, usage: dict[str, Any]) -> dict[str, Any]:
        """OpenAI's whole response object."""
        return {
            "id": response_id,
            "object": "chat.completion" if self._chat else "text_completion",
            "created": created,
            "model": model,
            "choices": [self._chat_choice(c) if self._chat else _text_choice(c) for c in self._choices()],
            "usage": usage,
        }

    def partial(self, limit: int) -> dict[str, Any]:
        """What there is of a stopped attempt; texts are cut so that all together stay under `limit` characters."""
        choices: list[dict[str, Any]] = []
        left = limit
        for choice in self._choices():
            text = choice.text[:left]
            left -= len(text)
            part: dict[str, Any] = {"index": choice.index, "text": text}
            if choice.reasoning:
                reasoning = "".join(choice.reasoning)[:left]
                left -= len(reasoning)
                part["reasoning"] = reasoning
            if choice.tools:
                calls = _tool_calls(choice)
                size = sum(len(call["function"]["arguments"]) for call in calls)
                if size <= left:
                    left -= size
                    part["tool_calls"] = calls
            choices.append(part)
        return {"choices": choices}

    def finish_reasons(self) -> list[str]:
        return [choice.finish_reason or "stop" for choice in self._choices()]

    def digests(self) -> list[str]:
        """SHA-256 of each choice's text, hex."""
        return [hashlib.sha256(choice.text.encode()).hexdigest() for choice in self._choices()]

    def _choices(self) -> list[Choice]:
        choices = self._gather.choices
        return [choices[index] for index in sorted(choices)]

    def _chat_choice(self, choice: Choice) -> dict[str, Any]:
        text = choice.text
        message: dict[str, Any] = {"role": "assistant", "content": text if text or not choice.tools else None}
        if choice.reasoning:
            message["reasoning"] = "".join(choice.reasoning)
        if choice.tools:
            message["tool_calls"] = _tool_calls(choice)
        return {
            "index": choice.index,
            "message": message,
            "logprobs": choice.logprobs,
            **_finish(choice),
        }


def _text_choice(choice: Choice) -> dict[str, Any]:
    return {"index": choice.index, "text": choice.text, "logprobs": choice.logprobs, **_finish(choice)}


def _finish(choice: Choice) -> dict[str, Any]:
    finish: dict[str, Any] = {"finish_reason": choice.finish_reason or "stop"}
    if choice.stop_reason is not None:
        finish["stop_reason"] = choice.stop_reason
    return finish


def _tool_calls(choice: Choice) -> list[dict[str, Any]]:
    """OpenAI's final form: no `index`, every field there."""
    calls = []
    for index in sorted(choice.tools or {}):
        call = (choice.tools or {})[index]
        function = call.get("function", {})
        calls.append(
            {
                "id": call.get("id") or "",
                "type": call.get("type") or "function",
                "function": {"name": function.get("name") or "", "arguments": function.get("arguments") or ""},
            }
        )
    return calls
