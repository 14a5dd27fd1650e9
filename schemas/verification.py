"""Ed25519 public keys as the registry holds them, and the names in signed records' tokens (tenancy.md §2). Pure.

A token is a JWT (RFC 7519) with alg EdDSA in the record's `authorization` header:

    sub     the tenant
    jti     the job's id; of a cancel of all jobs of the tenant: not there
    aud     the pool; of a cancel: the name of the cancel topic
    iat exp seconds; compared with the broker's time of the record, never with a reader's clock
    sha256  of the record's value, hex: the token is good for this body and no other
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import orjson

ALGORITHM = "EdDSA"
TENANT, JOB, AUDIENCE, ISSUED, EXPIRES, DIGEST = "sub", "jti", "aud", "iat", "exp", "sha256"

# Seconds a token may live: within the window in which copies of a job are recognised (R7), so that a record that is
# published once more is either recognised or refused.
MAX_LIFE_S = 3600
# Seconds that a signer's clock may differ from a broker's.
LEEWAY_S = 30

KEY_BYTES = 32
# SubjectPublicKeyInfo of an Ed25519 key (RFC 8410) up to its 32 bytes.
_SPKI = bytes.fromhex("302a300506032b6570032100")
_BEGIN, _END = "-----BEGIN PUBLIC KEY-----", "-----END PUBLIC KEY-----"


@dataclass(frozen=True, slots=True)
class PublicKey:
    """`raw`: the 32 bytes. `kid`: as the registry names it, else the thumbprint."""

    kid: str
    raw: bytes

    @classmethod
    def parse(cls, text: str) -> PublicKey:
        """PEM, or JWK as JSON text. Raises ValueError saying what is wrong, without the text."""
        text = text.strip()
        if text.startswith("{"):
            return _from_jwk(text)
        if text.startswith(_BEGIN) and text.endswith(_END):
            return _from_pem(text)
        raise ValueError("is neither a PEM public key nor a JWK; `headrace tenants keygen` prints one")

    @classmethod
    def of(cls, raw: bytes, kid: str | None = None) -> PublicKey:
        """By its 32 bytes; without a name it gets its thumbprint."""
        return cls(kid or thumbprint(raw), raw)

    def jwk(self) -> str:
        """One line of JSON, for the registry."""
        return orjson.dumps({**_members(self.raw), "kid": self.kid}).decode()


def thumbprint(raw: bytes) -> str:
    """RFC 7638: what names a key that has no other name."""
    return _text(sha256(orjson.dumps(_members(raw), None, orjson.OPT_SORT_KEYS)).digest())


def digest_of(value: bytes | None) -> str:
    """What the claim `sha256` must be for this record value."""
    return sha256(value or b"").hexdigest()


def _members(raw: bytes) -> dict[str, str]:
    return {"crv": "Ed25519", "kty": "OKP", "x": _text(raw)}


def _from_jwk(text: str) -> PublicKey:
    try:
        found: Any = orjson.loads(text)
    except orjson.JSONDecodeError:
        raise ValueError("is not JSON") from None
    if not isinstance(found, dict) or found.get("kty") != "OKP" or found.get("crv") != "Ed25519":
        raise ValueError("is not the JWK of an Ed25519 key (kty OKP, crv Ed25519)")
    if "d" in found:
        raise ValueError("holds the private key: take it out, and make a new one, since this one has been shown")
    kid = found.get("kid")
    if kid is not None and (not isinstance(kid, str) or not 0 < len(kid) <= 128):
        raise ValueError("has a kid that is no text of 1 to 128 characters")
    x = found.get("x")
    raw = _bytes(x) if isinstance(x, str) else b""
    if len(raw) != KEY_BYTES:
        raise ValueError("has an x that is not base64url of 32 bytes")
    return PublicKey.of(raw, kid)


def _from_pem(text: str) -> PublicKey:
    body = "".join(text.removeprefix(_BEGIN).removesuffix(_END).split())
    try:
        der = base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("is not a PEM public key") from None
    if len(der) != len(_SPKI) + KEY_BYTES or not der.startswith(_SPKI):
        raise ValueError("is not an Ed25519 key")
    raw = der[len(_SPKI) :]
    return PublicKey.of(raw)


def _text(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def _bytes(text: str) -> bytes:
    try:
        return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except (binascii.Error, ValueError):
        return b""
