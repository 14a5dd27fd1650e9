"""Whether a record's token is good: signature, then its claims against the record. Pure: the broker's time is given.

PyJWT checks the signature; times are checked here, since the library would take this machine's clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jwt
import orjson
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from schemas.errors import ErrorCode
from schemas.verification import (
    ALGORITHM,
    AUDIENCE,
    DIGEST,
    EXPIRES,
    ISSUED,
    JOB,
    LEEWAY_S,
    MAX_LIFE_S,
    TENANT,
    digest_of,
)
from service.credentials.doubt import Doubt, Proof, Reason

Keys = Mapping[str, Ed25519PublicKey]

# Bytes of a header that is read at all: a token of the longest ids has under 1 KiB.
MAX_TOKEN_BYTES = 4096
_BEARER = b"bearer "

_JWS = jwt.PyJWS(algorithms=[ALGORITHM])


def verify(
    raw: bytes, value: bytes | None, broker_ms: int, audience: str, keys_of: Callable[[str], Keys | None]
) -> Proof:
    """`keys_of(tenant)`: its keys by kid; None: there is no such tenant. Raises Doubt."""
    if raw[: len(_BEARER)].lower() == _BEARER:
        raw = raw[len(_BEARER) :]
    raw = raw.strip()
    if len(raw) > MAX_TOKEN_BYTES:
        raise _bad("is longer than any token")
    claims, kid = _unverified(raw)
    tenant = claims.get(TENANT)
    if not isinstance(tenant, str) or not tenant:
        raise _bad(f"has no claim {TENANT}, the tenant")
    keys = keys_of(tenant)
    if keys is None:
        raise Doubt(
            Reason.TENANT,
            "the token's tenant is not in the registry; check its id, or have it added",
            ErrorCode.UNKNOWN_TENANT,
        )
    _check_signature(raw, keys, kid)
    _check_times(claims, broker_ms / 1000)
    if claims.get(AUDIENCE) != audience:
        raise Doubt(Reason.AUDIENCE, f"the token is not for this pool or topic: claim {AUDIENCE} must be {audience}")
    digest = claims.get(DIGEST)
    if not isinstance(digest, str) or digest != digest_of(value):
        raise Doubt(Reason.CONTENT, f"the token is of another record: claim {DIGEST} is not the digest of this value")
    job_id = claims.get(JOB)
    if job_id is not None and not isinstance(job_id, str):
        raise _bad(f"has a claim {JOB} that is no text")
    return Proof(tenant, job_id)


def _unverified(raw: bytes) -> tuple[dict[str, Any], str | None]:
    """The claims and the key's name, from an envelope that is not checked yet."""
    try:
        head, body, _ = raw.split(b".")
        header = orjson.loads(jwt.utils.base64url_decode(head))
        claims = orjson.loads(jwt.utils.base64url_decode(body))
    except ValueError:  # of the split, of base64, of JSON
        raise _bad("is not a signed JWT") from None
    if not isinstance(header, dict) or not isinstance(claims, dict):
        raise _bad("is not a signed JWT")
    kid = header.get("kid")
    if kid is not None and not isinstance(kid, str):
        raise _bad("has a kid that is no text")
    return claims, kid


def _check_signature(raw: bytes, keys: Keys, kid: str | None) -> None:
    """By the key that it names; without a name by any of the tenant's."""
    wanted = [key for name, key in keys.items() if kid is None or name == kid]
    if not wanted:
        raise Doubt(Reason.UNKNOWN_KEY, "the token's key is not among the tenant's verification keys")
    for key in wanted:
        try:
            _JWS.decode_complete(raw, key, algorithms=[ALGORITHM])
            return
        except jwt.InvalidSignatureError:
            continue
        except jwt.InvalidTokenError:
            raise _bad(f"is not a JWT with algorithm {ALGORITHM}") from None
    raise Doubt(Reason.SIGNATURE, "the token's signature is not of this tenant's key")


def _check_times(claims: Mapping[str, Any], now: float) -> None:
    issued, expires = _time(claims, ISSUED), _time(claims, EXPIRES)
    if expires - issued > MAX_LIFE_S:
        raise Doubt(Reason.LIFE, f"the token lives longer than {MAX_LIFE_S} s; sign shortly before publishing")
    if now > expires + LEEWAY_S:
        raise Doubt(Reason.EXPIRED, "the token had expired when the record was written; sign the job anew")
    if now < issued - LEEWAY_S:
        raise Doubt(Reason.NOT_YET, "the token is from the future of the broker's clock; set the signer's clock")


def _time(claims: Mapping[str, Any], name: str) -> float:
    found = claims.get(name)
    if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found):
        raise _bad(f"has no claim {name}, in seconds")
    return float(found)


def _bad(what: str) -> Doubt:
    return Doubt(Reason.BAD_TOKEN, f"the token {what}; see the contract, signed jobs")
