"""A small instance of a JSON schema, for the simulated engine. Owns the common keywords and skips what is beyond them.

Not a validator: patterns, formats, `not` and conditions are not looked at.
"""

from __future__ import annotations

from typing import Any

DEEPEST = 32  # objects, arrays and references inside one another; a schema may refer to itself
MOST = 1000  # values in all
LARGEST = 256  # characters or entries made to please a minimum


def instance(schema: Any) -> Any:
    """`{"type": "object", "required": ["a"], "properties": {"a": {"type": "integer", "minimum": 3}}}` → `{"a": 3}`.

    Raises TypeError, AttributeError or KeyError for what is no schema.
    """
    values = 0

    def of(schema: Any, depth: int) -> Any:
        nonlocal values
        values += 1
        if not isinstance(schema, dict) or depth > DEEPEST or values > MOST:
            return None
        for keyword in ("const", "default"):
            if keyword in schema:
                return schema[keyword]
        if schema.get("enum"):
            return schema["enum"][0]
        if "$ref" in schema:
            return of(_target(schema["$ref"], root), depth + 1)
        for keyword in ("anyOf", "oneOf", "allOf"):
            if schema.get(keyword):
                return of(schema[keyword][0], depth + 1)
        kind = schema.get("type", "object" if "properties" in schema else "null")
        match kind[0] if isinstance(kind, list) else kind:
            case "object":
                known = schema.get("properties", {})
                return {name: of(known.get(name, {}), depth + 1) for name in schema.get("required", ())}
            case "array":
                return [of(schema.get("items", {}), depth + 1) for _ in range(min(schema.get("minItems", 0), LARGEST))]
            case "string":
                return "x" * min(schema.get("minLength", 0), LARGEST)
            case "integer" | "number":
                return schema.get("minimum", schema.get("exclusiveMinimum", -1) + 1)
            case "boolean":
                return False
        return None

    root = schema
    return of(schema, 0)


def _target(reference: str, root: Any) -> Any:
    node = root
    for part in reference.removeprefix("#").strip("/").split("/"):
        if part:
            node = node[part.replace("~1", "/").replace("~0", "~")]
    return node
