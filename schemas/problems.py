"""A pydantic ValidationError as one line that a caller can act on: the field's path and what it must be.

Never echoes a value; a key is named only if it is short and printable ASCII.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches

from pydantic import ValidationError
from pydantic_core import ErrorDetails

# Faults named in one message; a caller mends a few at a time, and a message stays one line.
SHOWN = 3
# Faults looked at for it: a record may hold tens of thousands, and each costs a search for what was meant.
LOOKED_AT = 32

_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}", re.ASCII)


def named(key: object) -> str:
    """A caller's key as it may be shown."""
    return key if isinstance(key, str) and _PLAIN_KEY.fullmatch(key) else "(a key that cannot be shown)"


def unknown_field(path: str, key: object, known: Iterable[str]) -> str:
    """`reply.tpoic is not a known field; did you mean topic?`"""
    text = f"{path}{named(key)} is not a known field"
    near = get_close_matches(key, sorted(known), 1, 0.6) if isinstance(key, str) and len(key) <= 64 else []
    return f"{text}; did you mean {near[0]}?" if near else f"{text}; leave it out"


def problem(error: ValidationError, root: str = "", known: Iterable[str] = ()) -> str:
    """The first faults of `error`, joined by `; `; the cost is bounded, whatever a record holds.

    `root` leads every path, `known` are the names for suggestions.
    """
    details = error.errors(include_url=False, include_input=False, include_context=True)
    faults: dict[str, list[str]] = {}
    for detail in details[:LOOKED_AT]:
        path, phrase = _one(detail, root, known)
        phrases = faults.setdefault(path, [])
        if phrase not in phrases:
            phrases.append(phrase)
    # A union reports each of its members: "must be a string or must be a list".
    parts = [f"{path} {' or '.join(phrases[:SHOWN])}".lstrip() for path, phrases in faults.items()]
    further = max(0, len(parts) - SHOWN) + max(0, len(details) - LOOKED_AT)
    more = [f"and {further} more"] if further else []
    return "; ".join(parts[:SHOWN] + more)


def path_of(loc: tuple[int | str, ...], root: str = "") -> str:
    """`("messages", 0, "user", "content")` under `body` → `body.messages[0].content`."""
    text = root
    for place, part in enumerate(loc):
        if isinstance(part, int):
            text += f"[{part}]"
        elif not _is_tag(loc, place, part):
            text += ("." if text else "") + named(part)
    return text or "the record"


def _is_tag(loc: tuple[int | str, ...], place: int, part: str) -> bool:
    """Pydantic puts the tags of unions into a path; a reader of the message does not know them."""
    if part in ("parts", "plain", "str", "constrained-str", "constrained-int", "ToolChoice", "list", "[key]"):
        return True
    return "[" in part or (place >= 2 and isinstance(loc[place - 1], int) and loc[place - 2] in ("messages", "parts"))


_PHRASES = {
    "missing": "is missing",
    "string_type": "must be a string",
    "int_type": "must be an integer",
    "int_from_float": "must be an integer",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "list_type": "must be a list",
    "finite_number": "must be a finite number",
    "union_tag_not_found": "has no role or type",
}
_BOUNDS = {
    "greater_than_equal": ("ge", "must be at least {}"),
    "greater_than": ("gt", "must be greater than {}"),
    "less_than_equal": ("le", "must be at most {}"),
    "less_than": ("lt", "must be less than {}"),
    "string_too_short": ("min_length", "must have at least {} characters"),
    "string_too_long": ("max_length", "must have at most {} characters"),
    "too_short": ("min_length", "must have at least {} entries"),
    "too_long": ("max_length", "must have at most {} entries"),
    "literal_error": ("expected", "must be {}"),
}


def _one(detail: ErrorDetails, root: str, known: Iterable[str]) -> tuple[str, str]:
    """Path and phrase of one fault."""
    loc, kind, ctx = detail["loc"], detail["type"], detail.get("ctx", {})
    if kind == "extra_forbidden":
        parent = path_of(loc[:-1], root) if len(loc) > 1 or root else ""
        return "", unknown_field(f"{parent}." if parent else "", loc[-1], known)
    path = path_of(loc, root)
    if kind == "string_pattern_mismatch":
        return path, f"must match {ctx['pattern']}"
    if kind in _BOUNDS:
        name, phrase = _BOUNDS[kind]
        return path, phrase.format(ctx[name])
    if kind == "union_tag_invalid":
        return path, f"has an unknown role or type; known are {ctx['expected_tags']}"
    if kind in ("value_error", "assertion_error"):  # our own validators: written to be read by callers
        return path if loc or root else "", str(ctx.get("error", "is not valid"))
    return path, _PHRASES.get(kind, "is not valid")
