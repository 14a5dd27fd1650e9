"""What vLLM says when it does not take a request → our errors (research: error table). Imports no vLLM.

Messages go to the caller: they keep what is wrong and lose paths, texts of the caller's own and advice on server flags.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from schemas.errors import ContextLengthExceeded, InvalidRequest, Refusal

MAX_MESSAGE = 300  # characters
QUOTED_MAX = 40  # characters of a quoted piece that stay: names of fields and kinds, not contents
ECHO = 24  # characters in a row that are the caller's own; fewer may be the same words by chance
TEXTS = 65_536  # characters of the caller's texts that a message is compared with, the prompt's last
PROMPTS = ("messages", "prompt")

_PATH = re.compile(r"(?:/[\w.@+-]+){2,}/?")
_QUOTED = re.compile(r"(?<!\w)(?:'[^']*'|\"[^\"]*\"|`[^`]*`)(?!\w)")
_CONTEXT = re.compile(r"maximum (?:context|model) length|longer than the maximum|max_model_len", re.IGNORECASE)
_CONTEXT_PARAMETERS = frozenset({"input_tokens", "input_text"})
_ADVICE = re.compile(r"\s*To (?:increase|allow|raise)[^.]*\bVLLM_\w+[^.]*\.?")
_REASON = re.compile(r"\berror: ([a-z][a-z ,-]{3,79})(?![\w ,-])")
_FLAGS = re.compile(r"\s*\(?--[a-z][\w-]+(?:=\S+)?\)?")


def refusal(error: Exception, body: Mapping[str, Any]) -> Refusal:
    """For an error that is the caller's: a validation error of vLLM or pydantic, or a ValueError of rendering.

    `body` is what the caller sent.
    """
    if isinstance(error, ValidationError):
        return InvalidRequest(_pydantic(error, body))
    parameter = getattr(error, "parameter", None)
    message = clean(str(error.args[0]) if error.args else type(error).__name__, body)
    if parameter in _CONTEXT_PARAMETERS or (parameter is None and _CONTEXT.search(message)):
        return ContextLengthExceeded(message)
    if parameter and str(parameter) not in message:
        message = f"{parameter}: {message}"
    return InvalidRequest(message)


def unusable(body: Mapping[str, Any], error: Exception | None = None) -> InvalidRequest:
    """For a constraint on the output that cannot be followed. The engine's messages repeat it in pieces, so only what
    a parser of expressions says in words of its own is kept.
    """
    field = "structured_outputs"
    if not body.get(field):
        field = "response_format" if (body.get("response_format") or {}).get("type", "text") != "text" else "tools"
    reasons = _REASON.findall(str(error.args[0])) if error is not None and error.args else []
    why = f" ({reasons[-1]})" if reasons and not any(reasons[-1] in text for text in _texts(body)) else ""
    return InvalidRequest(f"{field}: the engine cannot follow this constraint{why}; correct or simplify it")


def clean(message: str, body: Mapping[str, Any]) -> str:
    """One line without paths, server flags and what the caller wrote, at most MAX_MESSAGE characters."""
    line = " ".join(message[: 4 * MAX_MESSAGE].split())
    line = _PATH.sub("…", line)
    line = _FLAGS.sub("", _ADVICE.sub("", line))
    texts = _texts(body)

    def shorten(match: re.Match[str]) -> str:
        whole = match.group(0)
        theirs = len(whole) - 2 > QUOTED_MAX or whole[1:-1] in texts
        return f"{whole[0]}…{whole[-1]}" if theirs else whole

    line = _without_echo(_QUOTED.sub(shorten, line), "\0".join(texts))
    return line if len(line) <= MAX_MESSAGE else line[: MAX_MESSAGE - 1] + "…"


def _without_echo(line: str, theirs: str) -> str:
    kept, at = "", 0
    while at < len(line):
        end = at + ECHO
        if end > len(line) or line[at:end] not in theirs:
            kept += line[at]
            at += 1
            continue
        while end < len(line) and line[at : end + 1] in theirs:
            end += 1
        kept += "…"
        at = end
    return kept


def _texts(body: Mapping[str, Any]) -> list[str]:
    """What the caller wrote, each text on one line."""
    found: list[str] = []
    room = TEXTS
    todo = [value for _, value in sorted(body.items(), key=lambda field: field[0] not in PROMPTS)]  # taken from behind
    while todo and room > 0:
        node = todo.pop()
        if isinstance(node, str):
            found.append(" ".join(node[:room].split()))
            room -= len(found[-1]) + 1
        elif isinstance(node, dict):
            todo.extend(node.values())
        elif isinstance(node, list):
            todo.extend(node)
    return found


def _pydantic(error: ValidationError, body: Mapping[str, Any]) -> str:
    """The first three faults, by field; never the value."""
    faults = error.errors(include_url=False, include_input=False, include_context=False)
    said: dict[str, str] = {}
    for fault in faults:
        # The branch names of a union ("function-after[…]", class names) are vLLM's, not the caller's.
        place = ".".join(str(part) for part in fault["loc"] if not re.search(r"[\[(]|^[A-Z]\w*Param$", str(part)))
        said.setdefault(place or "body", fault["msg"])
    return clean("; ".join(f"{place}: {message}" for place, message in list(said.items())[:3]), body)
