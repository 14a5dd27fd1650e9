"""Bounds on what constrains an output: JSON schemas, choices, regular expressions, grammars.

Without them one request stalls the engine for everybody: 20,000 choices compile for 18.8 s, and deep nesting grows
the automaton steeply.
"""

from __future__ import annotations

from typing import Any

import orjson

from schemas.errors import ErrorCode, InvalidRequest, Refusal

# Objects and arrays inside one another, counted as the engine counts them (its own bound is the same).
MAX_NESTING = 64
# Entries of `structured_outputs.choice` and of one `enum`: 1,000 compile in 50 ms.
MAX_CHOICES = 1000
# Bytes of one regular expression.
MAX_REGEX = 4096


def nesting(value: Any, limit: int) -> int:
    """How deep objects and arrays lie inside one another, counted up to `limit` + 1. Iterative: no recursion limit."""
    depth, level = 0, [value] if isinstance(value, (dict, list)) else []
    while level and depth <= limit:
        depth += 1
        inner: list[Any] = []
        for node in level:
            children = node.values() if isinstance(node, dict) else node
            inner.extend(child for child in children if isinstance(child, (dict, list)))
        level = inner
    return depth


def check_regex(text: str, path: str) -> None:
    """Raises InvalidRequest for an expression over `MAX_REGEX` bytes."""
    if len(text) > MAX_REGEX or len(text.encode()) > MAX_REGEX:
        raise InvalidRequest(f"{path} must have at most {MAX_REGEX} bytes; use a shorter expression")


def check_size(value: Any, path: str, limit: int) -> None:
    """Raises Refusal (quota_exceeded) for a schema or grammar over `limit` bytes."""
    size = len(value.encode()) if isinstance(value, str) else len(orjson.dumps(value))
    if size > limit:
        raise Refusal(
            ErrorCode.QUOTA_EXCEEDED, f"{path} has {size} bytes, the limit of this tenant is {limit}; make it smaller"
        )


def check_schema(schema: dict[str, Any], path: str, limit: int) -> None:
    """Nesting, size, enums, patterns and references of one JSON schema. Raises InvalidRequest or Refusal."""
    if nesting(schema, MAX_NESTING) > MAX_NESTING:  # before `check_size`, whose encoder has a bound of its own
        raise InvalidRequest(f"{path} is nested more than {MAX_NESTING} levels; flatten it, or use $ref and $defs")
    check_size(schema, path, limit)
    todo: list[Any] = [schema]
    while todo:
        node = todo.pop()
        if isinstance(node, list):
            todo.extend(child for child in node if isinstance(child, (dict, list)))
            continue
        for key, child in node.items():
            if isinstance(child, str):
                if key == "pattern":
                    check_regex(child, f"a pattern in {path}")
                elif key == "$ref" and not child.startswith("#"):
                    raise InvalidRequest(f"{path} has a $ref that leaves the document; put it under $defs")
            elif isinstance(child, (dict, list)):
                if key == "enum" and len(child) > MAX_CHOICES:
                    raise InvalidRequest(f"an enum in {path} must have at most {MAX_CHOICES} entries")
                todo.append(child)
