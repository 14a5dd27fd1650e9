"""Signs records with a tenant's private key, for services that believe nobody's word (identity mode `signed`)."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Self

import orjson

from client.errors import ClientError
from schemas.names import CANCEL
from schemas.verification import (
    ALGORITHM,
    AUDIENCE,
    DIGEST,
    EXPIRES,
    ISSUED,
    JOB,
    MAX_LIFE_S,
    TENANT,
    digest_of,
    thumbprint,
)

# Seconds between signing and the broker's acknowledgement at most; how long the job then queues does not matter.
LIFE_S = 300
# A cancel hits what was published before it: the shorter it may be published again, the less a copy of it can hit.
CANCEL_LIFE_S = 60


class Signer:
    """A tenant's private Ed25519 key. `kid`: its name in the registry; by default its thumbprint.

    life_s: how long after signing a job may still be written to the broker, at most 3,600 s.
    """

    def __init__(self, key: Any, kid: str | None = None, *, life_s: int = LIFE_S) -> None:
        if not 0 < life_s <= MAX_LIFE_S:
            raise ValueError(f"life_s must be 1 to {MAX_LIFE_S} seconds")
        self._key = key
        self.kid = kid or thumbprint(key.public_key().public_bytes_raw())
        self._life_s = life_s

    @classmethod
    def from_file(cls, path: str | Path, kid: str | None = None, *, life_s: int = LIFE_S) -> Self:
        """A key that `headrace tenants keygen` wrote, or any PKCS 8 PEM or JWK of one. Raises ClientError."""
        try:
            data = Path(path).read_bytes()
        except OSError as error:
            raise ClientError(f"{path}: cannot be read ({error.strerror})") from None
        key, named = _parse(data, str(path))
        return cls(key, kid or named, life_s=life_s)

    def job(self, *, tenant: str, job_id: str, pool: str, value: bytes) -> str:
        """The token of a job's record."""
        return self._token({TENANT: tenant, JOB: job_id, AUDIENCE: pool}, value, self._life_s)

    def cancel(self, *, tenant: str, job_id: str | None, value: bytes) -> str:
        """The token of a cancel; no job id: of all jobs of the tenant."""
        claims = {TENANT: tenant, AUDIENCE: CANCEL}
        return self._token(claims if job_id is None else {**claims, JOB: job_id}, value, CANCEL_LIFE_S)

    def _token(self, claims: dict[str, Any], value: bytes, life_s: int) -> str:
        import jwt

        now = int(time.time())
        claims |= {ISSUED: now, EXPIRES: now + life_s, DIGEST: digest_of(value)}
        return jwt.encode(claims, self._key, algorithm=ALGORITHM, headers={"kid": self.kid})


def _parse(data: bytes, path: str) -> tuple[Any, str | None]:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    kid = None
    try:
        if data.lstrip().startswith(b"{"):
            import jwt

            document = orjson.loads(data)
            key, kid = jwt.PyJWK(document, ALGORITHM).key, document.get("kid")
        else:
            key = load_pem_private_key(data, None)
    except (ValueError, TypeError, AttributeError, UnsupportedAlgorithm) as error:
        raise ClientError(f"{path}: not a private key in PEM (PKCS 8) or JWK ({type(error).__name__})") from None
    except Exception as error:  # of the JWT library, whose errors share no narrower base
        raise ClientError(f"{path}: not the JWK of a private key ({type(error).__name__})") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise ClientError(f"{path}: not a private Ed25519 key; make one: headrace tenants keygen")
    return key, kid
