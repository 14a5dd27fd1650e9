"""The verification keys of tenants, ready for use: parsed once for each state of a registry entry."""

from __future__ import annotations

import logging
from typing import Protocol

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from schemas.tenants import Tenant
from schemas.verification import PublicKey

log = logging.getLogger(__name__)

# Tenants whose keys are kept ready; beyond it all are parsed again.
MOST = 10_000


class Registry(Protocol):
    def get(self, tenant: str) -> Tenant | None: ...


class Keyring:
    """Called from the verifying thread only."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._parsed: dict[str, tuple[tuple[str, ...], dict[str, Ed25519PublicKey]]] = {}

    def of(self, tenant: str) -> dict[str, Ed25519PublicKey] | None:
        """By kid; None: there is no such tenant."""
        found = self._registry.get(tenant)
        if found is None:
            return None
        texts = tuple(found.verification_keys)
        known = self._parsed.get(tenant)
        if known is not None and known[0] == texts:
            return known[1]
        keys: dict[str, Ed25519PublicKey] = {}
        for text in texts:
            try:
                public = PublicKey.parse(text)
                keys[public.kid] = Ed25519PublicKey.from_public_bytes(public.raw)
            except ValueError as error:  # the registry refuses such keys; one that is here is left out
                log.error("a verification key of tenant %s cannot be used: %s", tenant, error)
        if len(self._parsed) >= MOST:
            self._parsed.clear()
        self._parsed[tenant] = (texts, keys)
        return keys
