"""The service's own mark on records that it publishes again: HMAC over first place, first time and the value's digest.

    copy     on `deferred`, `overflow` and dead letters: this record was believed when it first came
    replay   on jobs topics: an operator replays a believed dead letter; good for an hour, as a token is at most

    headrace-seal: <kind>;<milliseconds>;<place>;<MAC, hex>

Pure. A mark is good for one value and nothing else, so it may be copied along.
"""

from __future__ import annotations

import hmac
import re
from dataclasses import dataclass
from typing import Literal

from schemas.names import H_SEAL
from schemas.verification import LEEWAY_S, MAX_LIFE_S, digest_of

Kind = Literal["copy", "replay"]
Headers = tuple[tuple[str, bytes | None], ...]

_SEAL = re.compile(rb"(copy|replay);(\d{1,15});([\x21-\x3a\x3c-\x7e]{1,300});([0-9a-f]{64})")


@dataclass(frozen=True, slots=True)
class Seal:
    """`place`: where the record first lay (copy), or the dead letter (replay). `at_ms`: its first time, or when it was
    replayed."""

    kind: Kind
    at_ms: int
    place: str

    def fresh(self, broker_ms: int) -> bool:
        """Whether a replay was written to its topic within the time that it is good for."""
        return -LEEWAY_S * 1000 <= broker_ms - self.at_ms <= MAX_LIFE_S * 1000


class Sealer:
    """`secret` makes marks; marks of `former` are accepted too, while the secret changes."""

    def __init__(self, secret: str, former: str = "") -> None:
        """Raises ValueError without a secret: anybody could make the marks."""
        if not secret:
            raise ValueError("HEADRACE_SERVICE_SECRET is empty; set a secret, the same for all workers and operators")
        self._secret = secret.encode()
        self._former = former.encode()

    def mark(self, seal: Seal, value: bytes | None) -> bytes:
        """The header's value."""
        said = _said(seal)
        return said + b";" + _mac(self._secret, said, value)

    def check(self, raw: bytes, value: bytes | None) -> Seal | None:
        """What a header's value vouches for; None: it is none of ours, or of another record."""
        found = _SEAL.fullmatch(raw)
        if found is None:
            return None
        kind: Kind = "copy" if found[1] == b"copy" else "replay"
        seal = Seal(kind, int(found[2]), found[3].decode("ascii"))
        said = raw[: found.start(4) - 1]
        for secret in (self._secret, self._former):
            if secret and hmac.compare_digest(_mac(secret, said, value), found[4]):
                return seal
        return None


def seal_in(headers: Headers) -> bytes | None:
    """The header's value, as it came."""
    for name, value in headers:
        if name == H_SEAL:
            return value or b""
    return None


def without_seal(headers: Headers) -> Headers:
    return tuple(pair for pair in headers if pair[0] != H_SEAL)


def _said(seal: Seal) -> bytes:
    return f"{seal.kind};{seal.at_ms};{seal.place}".encode("ascii", "replace")


def _mac(secret: bytes, said: bytes, value: bytes | None) -> bytes:
    text = b"headrace-seal-1\n" + said + b"\n" + digest_of(value).encode()
    return hmac.digest(secret, text, "sha256").hex().encode()
