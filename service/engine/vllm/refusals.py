"""What vLLM says when it does not take a request → our errors (research: error table). Imports no vLLM.

Messages go to the caller: they keep what is wrong and lose paths, quoted inputs and advice on server flags.
"""

from __future__ import annotations

import re

from pydantic import ValidationError

from schemas.errors import ContextLengthExceeded, InvalidRequest, Refusal

MAX_MESSAGE = 300  # characters
QUOTED_MAX = 40  # characters of a quoted piece of input that stay: names of fields and kinds, not contents

_PATH = re.compile(r"(?:/[\w.@+-]+){2,}/?")
_QUOTED = re.compile(r"'([^']*)'|\"([^\"]*)\"|`([^`]*)`")
_CONTEXT = re.compile(r"maximum (?:context|model) length|longer than the maximum|max_model_len", re.IGNORECASE)
_CONTEXT_PARAMETERS = frozenset({"input_tokens", "input_text"})
_ADVICE = re.compile(r"\s*To (?:increase|allow|raise)[^.]*\bVLLM_\w+[^.]*\.?")
_FLAGS = re.compile(r"\s*\(?--[a-z][\w-]+(?:=\S+)?\)?")


def refusal(error: Exception) -> Refusal:
    """For an error that is the caller's: a validation error of vLLM or pydantic, or a ValueError of rendering."""
    if isinstance(error, ValidationError):
        return InvalidRequest(_pydantic(error))
    parameter = getattr(error, "parameter", None)
    message = clean(str(error.args[0]) if error.args else type(error).__name__)
    if parameter in _CONTEXT_PARAMETERS or (parameter is None and _CONTEXT.search(message)):
        return ContextLengthExceeded(message)
    if parameter and str(parameter) not in message:
        message = f"{parameter}: {message}"
    return InvalidRequest(message)


def clean(message: str) -> str:
    """One line without paths, long quotations and server flags, at most MAX_MESSAGE characters."""
    line = " ".join(message.split())
    line = _PATH.sub("…", line)
    line = _FLAGS.sub("", _ADVICE.sub("", line))
    line = _QUOTED.sub(_shorten, line)
    return line if len(line) <= MAX_MESSAGE else line[: MAX_MESSAGE - 1] + "…"


def _shorten(match: re.Match[str]) -> str:
    whole = match.group(0)
    return whole if len(whole) - 2 <= QUOTED_MAX else f"{whole[0]}…{whole[-1]}"


def _pydantic(error: ValidationError) -> str:
    """The first three faults, by field; never the value."""
    faults = error.errors(include_url=False, include_input=False, include_context=False)
    said: dict[str, str] = {}
    for fault in faults:
        # The branch names of a union ("function-after[…]", class names) are vLLM's, not the caller's.
        place = ".".join(str(part) for part in fault["loc"] if not re.search(r"[\[(]|^[A-Z]\w*Param$", str(part)))
        said.setdefault(place or "body", fault["msg"])
    return clean("; ".join(f"{place}: {message}" for place, message in list(said.items())[:3]))
