"""Deltas gathered per choice: what was added one by one comes out as one delta a choice. Pure.

The coalescer gathers for a chunk, the fold for the final response, the worker for a replay: one rule for all three,
so that what was streamed and what is returned at the end cannot differ (contract.md §2).
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from service.frames import Delta

# What an entry of logprobs takes as JSON, roughly: token, bytes and number. Only flush and split sizes depend on it.
LOGPROB_BYTES = 96
TOOL_CALL_BYTES = 64  # a tool-call fragment without its arguments

_HIGH_SURROGATES = ("\ud800", "\udbff")
_JOINERS = ("\u200d", "\ufe0e", "\ufe0f")  # zero-width joiner, variation selectors


class Choice:
    """One choice's part of what was gathered."""

    __slots__ = ("finish_reason", "index", "logprobs", "reasoning", "stop_reason", "texts", "tokens", "tools")

    def __init__(self, index: int) -> None:
        self.index = index
        self.texts: list[str] = []
        self.tokens = 0
        self.reasoning: list[str] | None = None
        self.logprobs: dict[str, Any] | None = None
        self.tools: dict[int, dict[str, Any]] | None = None
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def add_logprobs(self, logprobs: dict[str, Any]) -> None:
        """Both of OpenAI's forms are objects of parallel lists."""
        mine = self.logprobs
        if mine is None:
            self.logprobs = {k: list(v) if isinstance(v, list) else v for k, v in logprobs.items()}
            return
        for key, value in logprobs.items():
            if isinstance(value, list):
                held = mine.get(key)
                if held is None:
                    mine[key] = list(value)
                else:
                    held += value
            elif mine.get(key) is None:
                mine[key] = value

    def add_tools(self, calls: list[dict[str, Any]]) -> None:
        """Fragments: id, type and name come once, arguments in pieces."""
        if self.tools is None:
            self.tools = {}
        for place, call in enumerate(calls):
            index = call.get("index", place)
            held = self.tools.get(index)
            if held is None:
                held = self.tools[index] = {"index": index}
            for key, value in call.items():
                if key == "function":
                    function = held.setdefault("function", {})
                    for part, text in value.items():
                        if part == "arguments" and text is not None:
                            function["arguments"] = (function.get("arguments") or "") + text
                        elif text is not None and not function.get(part):
                            function[part] = text
                elif value is not None and held.get(key) is None:
                    held[key] = value

    def delta(self) -> Delta:
        return Delta(
            self.index,
            "".join(self.texts),
            self.tokens,
            self.logprobs,
            list(self.tools.values()) if self.tools else None,
            "".join(self.reasoning) if self.reasoning else None,
            self.finish_reason,
            self.stop_reason,
        )


class Gather:
    """Deltas of one stream, by choice, in the order in which the choices first appeared."""

    __slots__ = ("choices", "tokens")

    def __init__(self, deltas: Iterable[Delta] = ()) -> None:
        self.choices: dict[int, Choice] = {}
        self.tokens = 0
        self.add(deltas)

    def add(self, deltas: Iterable[Delta]) -> None:
        choices = self.choices
        for delta in deltas:
            choice = choices.get(delta.index)
            if choice is None:
                choice = choices[delta.index] = Choice(delta.index)
            choice.tokens += delta.tokens
            self.tokens += delta.tokens
            if delta.text:
                choice.texts.append(delta.text)
            if delta.logprobs is not None:
                choice.add_logprobs(delta.logprobs)
            if delta.tool_calls is not None:
                choice.add_tools(delta.tool_calls)
            if delta.reasoning:
                if choice.reasoning is None:
                    choice.reasoning = []
                choice.reasoning.append(delta.reasoning)
            if delta.finish_reason is not None:
                choice.finish_reason = delta.finish_reason
                choice.stop_reason = delta.stop_reason

    def deltas(self) -> list[Delta]:
        return [choice.delta() for choice in self.choices.values()]


def weight(delta: Delta) -> int:
    """Bytes of a delta on the wire, nearly: text exactly, the rest estimated."""
    text = delta.text
    size = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
    if delta.reasoning is not None:
        size += len(delta.reasoning.encode("utf-8", "surrogatepass"))
    if delta.logprobs is not None:
        size += _logprobs_weight(delta.logprobs)
    if delta.tool_calls is not None:
        for call in delta.tool_calls:
            size += TOOL_CALL_BYTES + len((call.get("function") or {}).get("arguments") or "")
    return size


def _logprobs_weight(logprobs: dict[str, Any]) -> int:
    entries = 0
    for value in logprobs.values():
        if isinstance(value, list):
            entries += len(value)
            if value and isinstance(value[0], dict):
                entries += len(value) * len(value[0].get("top_logprobs") or value[0])
    return entries * LOGPROB_BYTES


def split(delta: Delta, parts: int) -> list[Delta]:
    """One delta as up to `parts` smaller ones, which gather to the same again.

    Texts are never cut between a character and what combines with it. The finish reason goes with the last one.
    """
    texts = _pieces(delta.text, parts)
    reasonings = _pieces(delta.reasoning or "", parts)
    logprobs = _logprob_pieces(delta.logprobs, parts)
    tools = _tool_pieces(delta.tool_calls, parts)
    pieces = []
    for i in range(parts):
        tokens = delta.tokens * (i + 1) // parts - delta.tokens * i // parts
        if not (texts[i] or reasonings[i] or logprobs[i] or tools[i] or tokens or i == parts - 1):
            continue
        pieces.append(Delta(delta.index, texts[i], tokens, logprobs[i], tools[i], reasonings[i] or None))
    pieces[-1].finish_reason, pieces[-1].stop_reason = delta.finish_reason, delta.stop_reason
    return pieces


def _pieces(text: str, parts: int) -> list[str]:
    cuts = [0]
    for i in range(1, parts):
        cut = max(cuts[-1], len(text) * i // parts)
        while cut < len(text) and _clings(text, cut):
            cut += 1
        cuts.append(cut)
    cuts.append(len(text))
    return [text[a:b] for a, b in pairwise(cuts)]


def _clings(text: str, at: int) -> bool:
    """Whether the character at `at` belongs to the one before it."""
    if at == 0:
        return False
    here, before = text[at], text[at - 1]
    return (
        unicodedata.combining(here) != 0
        or here in _JOINERS
        or before == "\u200d"
        or "\U0001f3fb" <= here <= "\U0001f3ff"  # skin tones
        or _HIGH_SURROGATES[0] <= before <= _HIGH_SURROGATES[1]
    )


def _logprob_pieces(logprobs: dict[str, Any] | None, parts: int) -> list[dict[str, Any] | None]:
    if logprobs is None:
        return [None] * parts
    pieces: list[dict[str, Any] | None] = []
    for i in range(parts):
        piece = {
            key: value[len(value) * i // parts : len(value) * (i + 1) // parts] if isinstance(value, list) else value
            for key, value in logprobs.items()
        }
        pieces.append(piece if any(piece.values()) else None)
    return pieces


def _tool_pieces(calls: list[dict[str, Any]] | None, parts: int) -> list[list[dict[str, Any]] | None]:
    if not calls:
        return [None] * parts
    pieces: list[list[dict[str, Any]] | None] = [[] for _ in range(parts)]
    for place, call in enumerate(calls):
        function = call.get("function") or {}
        for i, arguments in enumerate(_pieces(function.get("arguments") or "", parts)):
            piece = pieces[i]
            assert piece is not None
            if i == 0:
                piece.append({**call, "function": {**function, "arguments": arguments}})
            elif arguments:
                piece.append({"index": call.get("index", place), "function": {"arguments": arguments}})
    return [piece or None for piece in pieces]


def whole(text: str, carried: str, last: bool) -> tuple[str, str]:
    """Text without half surrogate pairs, and what to carry over to the next piece of it.

    A pair whose halves arrive in two pieces is joined; a half that stays alone becomes U+FFFD.
    """
    text = carried + text
    carry = ""
    if text and not last and _HIGH_SURROGATES[0] <= text[-1] <= _HIGH_SURROGATES[1]:
        text, carry = text[:-1], text[-1]
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace"), carry
