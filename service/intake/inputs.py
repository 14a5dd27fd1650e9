"""Claim-checked inputs: whether a job may read the blob it names, and the request body in it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

from schemas.blob import InputRef
from schemas.decode import NotJson, decode
from schemas.errors import ErrorCode, InvalidJob, InvalidRequest, Refusal
from schemas.tenants import Tenant
from service.settings import StoreSettings
from service.store import BlobMissing, DigestMismatch, NameRefused, StoreUnavailable


class InputStore(Protocol):
    async def get(self, bucket: str, key: str, size: int, sha256: str) -> bytes:
        """The object, checked, within the store's deadline.

        Raises BlobMissing, DigestMismatch, NameRefused, StoreUnavailable.
        """


class Inputs:
    """Reads inputs for jobs. Never writes, and never reads outside of what the tenant may."""

    def __init__(self, settings: StoreSettings, store: InputStore) -> None:
        self._settings = settings
        self._store = store

    def check(self, ref: InputRef, tenant: Tenant) -> None:
        """Raises Refusal: `not_authorized` for a foreign bucket or key, `quota_exceeded` for too large a blob."""
        prefix = self._prefix(ref.bucket, tenant)
        if prefix is None:
            raise Refusal(
                ErrorCode.NOT_AUTHORIZED,
                "input.bucket is not one that this tenant's inputs may come from; put the input into an allowed one",
            )
        if not ref.key.startswith(prefix):  # it has no dots that could climb out again (schemas/blob.py)
            raise Refusal(ErrorCode.NOT_AUTHORIZED, f"input.key must begin with {prefix!r}")
        if ref.size > self._settings.max_input_bytes:
            raise Refusal(
                ErrorCode.QUOTA_EXCEEDED,
                f"input.size is {ref.size}, the limit is {self._settings.max_input_bytes} bytes; send a smaller input",
            )

    def _prefix(self, bucket: str, tenant: Tenant) -> str | None:
        """What keys in this bucket begin with for the tenant; None = none of it is the tenant's."""
        if bucket in tenant.blob_buckets:
            return tenant.blob_prefix
        shared: Sequence[str] = (self._settings.bucket, *self._settings.input_buckets)
        if bucket in shared:
            return tenant.blob_prefix or f"{self._settings.prefix}/{tenant.id}/"
        return None

    async def fetch(self, ref: InputRef) -> dict[str, Any]:
        """The body that `ref` holds. Raises Refusal: `input_unavailable`, `store_unavailable`, `invalid_request`, and
        `invalid_job` for what names no object."""
        try:
            data = await self._store.get(ref.bucket, ref.key, ref.size, ref.sha256)
        except BlobMissing:
            raise Refusal(
                ErrorCode.INPUT_UNAVAILABLE, "input is not in the store; upload it and publish the job with run + 1"
            ) from None
        except DigestMismatch:
            raise Refusal(
                ErrorCode.INPUT_UNAVAILABLE,
                "input differs from its reference in size or SHA-256; upload it again and publish the job with run + 1",
            ) from None
        except NameRefused:
            raise InvalidJob(
                "the store takes no object of the name in input.bucket and input.key; choose another"
            ) from None
        except StoreUnavailable:
            raise Refusal(
                ErrorCode.STORE_UNAVAILABLE,
                "input could not be read, the store does not answer; publish the job with run + 1 later",
            ) from None
        return await asyncio.to_thread(self._body, data)

    @staticmethod
    def _body(data: bytes) -> dict[str, Any]:
        try:
            decoded = decode(data)
        except NotJson as problem:
            raise InvalidRequest(f"input is not a request body: {problem}") from None
        if decoded.too_big is not None:
            raise InvalidRequest(f"input: {too_big(decoded.too_big)}")
        return decoded.document


def too_big(field: str) -> str:
    """What is wrong with an integer that no field can hold."""
    where = f"{field} is" if field else "the record has"
    return f"{where} an integer beyond 64 bits; send a smaller one, or a string where text is meant"
