"""The client's side of the claim check: fetches stored outputs and puts large inputs, both digest-checked, in
threads of its own.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import urllib3
from minio import Minio
from minio.error import MinioException

from client.errors import DigestMismatch, StoreError
from client.result import BlobRef

T = TypeVar("T")

# Threads for transfers. Never the loop's default executor: it also resolves names, and transfers last seconds.
THREADS = 4
# Seconds for connecting and between two reads of one transfer; the library's own default is five minutes.
CONNECT_S, READ_S = 3.0, 30.0
READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class StoreAccess:
    """How to reach the S3-compatible store. `endpoint` is host:port without a scheme."""

    endpoint: str
    access_key: str
    secret_key: str
    secure: bool = False
    region: str = "us-east-1"
    bucket: str = "outputs"  # where large inputs are put
    prefix: str = "v1"
    ttl_days: int = 7  # stated as `expires_at` of inputs; the bucket's lifecycle rule deletes
    deadline_s: float = 60.0  # one transfer, retries included


class Store:
    """One per client. Nothing is connected before the first transfer. Raises StoreError for an address that is none."""

    def __init__(self, access: StoreAccess) -> None:
        self._access = access
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="headrace-store")
        pool = urllib3.PoolManager(
            maxsize=THREADS,
            timeout=urllib3.Timeout(connect=CONNECT_S, read=READ_S),
            retries=urllib3.Retry(total=3, backoff_factor=0.3, status_forcelist=[500, 502, 503, 504]),
        )
        try:
            self._minio = Minio(
                access.endpoint,
                access_key=access.access_key,
                secret_key=access.secret_key,
                secure=access.secure,
                region=access.region,
                http_client=pool,
            )
        except ValueError as error:
            raise StoreError(f"{access.endpoint!r} is no address of a store ({error}): write host:port") from None

    async def fetch(self, ref: BlobRef) -> bytes:
        """The object whole. Raises StoreError when it cannot be had, DigestMismatch when it is not what was written."""
        return await self._run(self._get, ref)

    async def put_input(self, tenant: str, job_id: str, run: int, body: bytes) -> BlobRef:
        """Stores a request body under the tenant's prefix; the reference goes into the job as `input`."""
        today = datetime.now(UTC)
        key = f"{self._access.prefix}/{tenant}/{today:%Y/%m/%d}/{job_id}/{run}/input.json"
        return await self._run(self._put, key, body, today)

    def close(self) -> None:
        """Transfers that still run end by themselves within their time limits."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, work: Callable[..., T], *args: Any) -> T:
        transfer = asyncio.get_running_loop().run_in_executor(self._threads, work, *args)
        try:
            async with asyncio.timeout(self._access.deadline_s):
                return await transfer
        except TimeoutError:
            raise StoreError(
                f"the store at {self._access.endpoint} did not finish within {self._access.deadline_s:.0f} s"
            ) from None
        except MinioException as error:
            raise StoreError(f"the store at {self._access.endpoint} refused: {error}") from error
        except (TypeError, ValueError) as error:  # a bucket or key that no store could have
            raise StoreError(f"not a place in the store: {error}") from error
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise StoreError(
                f"the store at {self._access.endpoint} is not reachable: {type(error).__name__}"
            ) from error

    def _get(self, ref: BlobRef) -> bytes:
        answer = self._minio.get_object(ref.bucket, ref.key, version_id=ref.version_id)
        try:
            parts, size = [], 0
            while part := answer.read(READ_BYTES):
                size += len(part)
                if size > ref.size:  # never take in more than was promised
                    break
                parts.append(part)
        finally:
            answer.close()
            answer.release_conn()
        body = b"".join(parts)
        digest = hashlib.sha256(body).hexdigest()
        if size != ref.size or digest != ref.sha256:
            raise DigestMismatch(
                f"{ref.bucket}/{ref.key} is not what the worker wrote: "
                f"{size} bytes, sha256 {digest[:12]}…, expected {ref.size} bytes, {ref.sha256[:12]}…"
            )
        return body

    def _put(self, key: str, body: bytes, now: datetime) -> BlobRef:
        made = self._minio.put_object(
            self._access.bucket,
            key,
            io.BytesIO(body),
            len(body),
            content_type="application/json",
            num_parallel_uploads=1,
        )
        return BlobRef(
            bucket=self._access.bucket,
            key=key,
            size=len(body),
            sha256=hashlib.sha256(body).hexdigest(),
            content_type="application/json",
            etag=made.etag,
            version_id=made.version_id,
            expires_at=(now + timedelta(days=self._access.ttl_days))
            .isoformat(timespec="seconds")
            .replace("+00:00", "Z"),
        )
