"""From the bytes of a record to a JSON object, with what a parser would hide found in the raw text first. Never raises
anything but `NotJson`, whatever the bytes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import orjson

from schemas.fields import INT64_MIN

UINT64_MAX = 2**64 - 1

# Only a run of 19 digits can be an integer beyond 64 bits, so this decides whether to look closer at all: all digits
# made 0 and a plain search, which costs 1 ns a byte (a regular expression: 10).
_DIGITS_TO_0 = bytes(0x30 if 0x30 <= byte <= 0x39 else 0x2E for byte in range(256))
_LONG = b"0" * 19
# Strings are skipped whole; long numbers are taken whole, so that the digits of a fraction do not pass for an integer.
_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[0-9-][0-9.eE+-]{18,}+', re.DOTALL)
_KEY = re.compile(rb'"([A-Za-z_]{1,64})"\s*:\s*$')


class NotJson(ValueError):
    """The record is not one JSON object in UTF-8. The message says why, without its text."""


@dataclass(frozen=True, slots=True)
class Decoded:
    document: dict[str, Any]
    # The name of the field with an integer beyond 64 bits, "" if it has none; in `document` it reads -1, which no reply
    # partition, run or size can be. None = no such.
    too_big: str | None


def decode(value: bytes | None) -> Decoded:
    """Raises NotJson for null and empty records, bytes that are not UTF-8 or not JSON (NaN and Infinity included),
    nesting over 1,024 levels, and anything but an object."""
    if value is None:
        raise NotJson("the record is null; publish a JSON object")
    if not value:
        raise NotJson("the record is empty; publish a JSON object")
    too_big = None
    if _LONG in value.translate(_DIGITS_TO_0):
        value, too_big = _settle_integers(value)
    try:
        document = orjson.loads(value)
    except orjson.JSONDecodeError as error:
        raise NotJson(f"the record is not JSON: {error.msg} at character {error.pos}") from None
    if not isinstance(document, dict):
        raise NotJson("the record is not a JSON object")
    return Decoded(document, too_big)


def _settle_integers(value: bytes) -> tuple[bytes, str | None]:
    """The text with -1 for each integer beyond 64 bits (a parser makes floats of them), and the field of the first."""
    found: list[str] = []

    def settle(match: re.Match[bytes]) -> bytes:
        token = match[0]
        if token[0] == 0x22 or b"." in token or b"e" in token or b"E" in token:
            return token
        digits = token[1:] if token[0] == 0x2D else token
        if not digits.isdigit():
            return token
        # Longer than 20 digits is beyond 64 bits for certain, and int() is slow (and bounded) for very long texts.
        if len(digits) <= 20 and INT64_MIN <= int(token) <= UINT64_MAX:
            return token
        key = _KEY.search(value, max(0, match.start() - 80), match.start())
        found.append(key[1].decode() if key else "")
        return b"-1"

    settled = _TOKEN.sub(settle, value)
    return (settled, found[0]) if found else (value, None)
