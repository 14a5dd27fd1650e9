"""Who a record is from, and whether that is believed (tenancy.md §2): by token, by topic, or by the service's mark."""

from __future__ import annotations

from service.credentials.credentials import Credentials, build
from service.credentials.doubt import Doubt, Proof, Reason
from service.credentials.seal import Seal, Sealer

__all__ = ["Credentials", "Doubt", "Proof", "Reason", "Seal", "Sealer", "build"]
