"""Raw records: what is no JSON object is told apart, and integers beyond 64 bits are seen before they become floats."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from schemas.decode import NotJson, decode

NOT_JSON = {
    "null record": None,
    "empty": b"",
    "text": b"this is not json",
    "NaN": b'{"a": NaN}',
    "Infinity": b'{"a": -Infinity}',
    "a number too large for a float": b'{"a": 1e999}',
    "cut": b'{"id": "x", ',
    "list": b"[1, 2]",
    "number": b"5",
    "string": b'"x"',
    "invalid UTF-8": b'{"id": "\xff\xfe\xff"}',
    "UTF-16": '{"id": "x"}'.encode("utf-16"),
    "lone surrogate": b'{"id": "\\ud800"}',
    "900 kB of noise": bytes(range(256)) * 3_600,
    "depth bomb of lists": b"[" * 500_000,
    "depth bomb of objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "digits without end": b"9" * 900_000,
    "half a string": b'"' + b"\\" * 500_001,
    "two documents": b'{"a":1}{"b":2}',
}


@pytest.mark.parametrize("value", NOT_JSON.values(), ids=NOT_JSON.keys())
def test_what_is_no_json_object_is_refused_in_one_line(value: bytes | None) -> None:
    with pytest.raises(NotJson) as refused:
        decode(value)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 200


@pytest.mark.parametrize(
    "text, field",
    [
        ('{"seed": 1180591620717411303424}', "seed"),
        ('{"seed" : -9223372036854775809}', "seed"),
        ('{"seed":18446744073709551616,"b":1}', "seed"),
        ('{"body": {"a": "x", "seed": ' + "9" * 5_000 + "}}", "seed"),
        ("[18446744073709551616]", None),
        ('{"a": [1, 18446744073709551616]}', ""),
    ],
)
def test_integers_beyond_64_bits_are_found_with_their_field(text: str, field: str | None) -> None:
    if field is None:
        with pytest.raises(NotJson):
            decode(text.encode())
    else:
        assert decode(text.encode()).too_big == field


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 18446744073709551615}',
        '{"a": -9223372036854775808}',
        '{"a": 0.12345678901234567890123456789}',
        '{"a": 1234567890123456789012.5}',
        '{"a": 12345678901234567890123e2}',
        '{"a": "123456789012345678901234567890"}',
        '{"a": "\\"123456789012345678901234567890"}',
        '{"123456789012345678901234567890": 1}',
        '{"a": "\\\\", "b": "12345678901234567890123"}',
    ],
)
def test_long_digits_that_are_no_such_integers_are_left_alone(text: str) -> None:
    decoded = decode(text.encode())
    assert decoded.too_big is None
    assert decoded.document == orjson.loads(text)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def beyond(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    if isinstance(value, int):
        return not -(2**63) <= value < 2**64
    if isinstance(value, dict):
        return any(beyond(child) for child in value.values())
    return isinstance(value, list) and any(beyond(child) for child in value)


@given(st.dictionaries(st.text(), json_values, max_size=5), st.booleans())
@example({"a": 2**64, 'b"': "1" * 30}, True)
def test_any_document_reads_as_it_was_written_unless_an_integer_is_too_big(
    document: dict[str, Any], tight: bool
) -> None:
    text = json.dumps(document, ensure_ascii=tight, separators=(",", ":") if tight else None).encode(
        "utf-8", "surrogatepass"
    )
    try:
        decoded = decode(text)
    except NotJson:
        orjson_refuses(text)
        return
    assert (decoded.too_big is not None) == beyond(document)
    if decoded.too_big is None:
        assert decoded.document == document


def orjson_refuses(text: bytes) -> None:
    with pytest.raises(orjson.JSONDecodeError):
        orjson.loads(text)


@given(st.binary(max_size=300))
def test_random_bytes_never_raise_anything_else(value: bytes) -> None:
    with contextlib.suppress(NotJson):
        decode(value)
