"""OpenAI chunk objects from deltas: the role in a choice's first, the finish reason in its last. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from schemas.names import CHAT
from service.frames import Delta


class Chunks:
    """The chunk objects of one attempt."""

    __slots__ = ("_chat", "_created", "_id", "_model", "_opened")

    def __init__(self, endpoint: str, response_id: str, created: int, model: str) -> None:
        self._chat = endpoint == CHAT
        self._id = response_id
        self._created = created
        self._model = model
        self._opened: set[int] = set()  # choices whose role has gone out

    def chunk(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """One chunk object holding all these deltas, one entry a choice."""
        return {
            "id": self._id,
            "object": "chat.completion.chunk" if self._chat else "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": [self._chat_choice(d) if self._chat else _text_choice(d) for d in deltas],
        }

    def sent(self, deltas: Sequence[Delta]) -> None:
        """These have gone out: their choices' roles need not go again."""
        for delta in deltas:
            self._opened.add(delta.index)

    def _chat_choice(self, delta: Delta) -> dict[str, Any]:
        part: dict[str, Any] = {}
        if delta.index not in self._opened:
            part["role"] = "assistant"
            part["content"] = delta.text
        elif delta.text:
            part["content"] = delta.text
        if delta.reasoning:
            part["reasoning"] = delta.reasoning
        if delta.tool_calls:
            part["tool_calls"] = delta.tool_calls
        choice: dict[str, Any] = {
            "index": delta.index,
            "delta": part,
            "logprobs": delta.logprobs,
            "finish_reason": delta.finish_reason,
        }
        if delta.stop_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        return choice


def _text_choice(delta: Delta) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": delta.index,
        "text": delta.text,
        "logprobs": delta.logprobs,
        "finish_reason": delta.finish_reason,
    }
    if delta.stop_reason is not None:
        choice["stop_reason"] = delta.stop_reason
    return choice
