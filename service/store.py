"""The S3-compatible object store: bytes in and out, with digests. Owns its threads; knows nothing of jobs.

minio-py is synchronous, so every operation runs in a pool of its own: the default executor is small and also resolves
names. An operation that is given up on goes on in its thread until the client's own timeouts end it.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import logging
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from http.client import InvalidURL
from typing import Any, TypeVar

import urllib3
from minio import Minio
from minio.error import MinioException, S3Error
from urllib3.exceptions import HTTPError, MaxRetryError

from service.outage import Outage
from service.settings import StoreSettings

log = logging.getLogger(__name__)
T = TypeVar("T")

THREADS = 16  # 64 KiB uploads cost under 1 ms each; 8 are enough, the rest waits for slow ones
CONNECT_S, READ_S = 3.0, 30.0  # the client's defaults are 300 s each
CLIENT_RETRIES = 2  # inside one try, by the HTTP client; the deadline is ours
RETRY_FIRST_S, RETRY_MOST_S = 0.2, 5.0  # doubling, each times 0.5 to 1.5
PROBE_S = 10.0  # of a probe
READ_BYTES = 1 << 20
PART_BYTES = 16 << 20  # above it the client uploads in parts

# What a probe writes; the bucket's lifecycle rule deletes it.
PROBE_KEY, PROBE_BYTES = "probe", b"{}"

# Answers that another try cannot change.
_MISSING = frozenset({"NoSuchKey", "NoSuchBucket", "NoSuchVersion", "NoSuchObject"})
_FINAL = _MISSING | {"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "EntityTooLarge"}
# Answers to a name that no object can have.
_NAMELESS = frozenset(
    {"InvalidBucketName", "InvalidObjectName", "InvalidURI", "KeyTooLongError", "XMinioInvalidObjectName"}
)
# Answers below 500 that say nothing of the call: the store is too busy, or full.
_NOT_NOW = frozenset({"SlowDown", "RequestTimeout", "TooManyRequests", "QuotaExceeded", "InsufficientStorage"})


class StoreUnavailable(Exception):
    """The store did not do it before the deadline, or refuses to. The message says why, without addresses or keys."""


class NameRefused(StoreUnavailable):
    """No object can have this name: the client or the store does not take it, now or ever."""


class BlobMissing(Exception):
    """There is no such object."""


class DigestMismatch(Exception):
    """The object is not what its reference says."""


class Store:
    def __init__(self, settings: StoreSettings) -> None:
        self._settings = settings
        self._http = urllib3.PoolManager(
            num_pools=4,
            maxsize=THREADS,
            block=True,
            timeout=urllib3.Timeout(connect=CONNECT_S, read=READ_S),
            retries=urllib3.Retry(
                total=CLIENT_RETRIES,
                backoff_factor=0.2,
                status_forcelist=(500, 502, 503, 504),
                raise_on_status=False,  # the store's own code says more
            ),
        )
        self._client = Minio(
            settings.endpoint,
            access_key=settings.access_key,
            secret_key=settings.secret_key,
            secure=settings.secure,
            region=settings.region,  # or each presign and first call would ask for it
            http_client=self._http,
        )
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="store")
        self._outage = Outage()

    @property
    def away(self) -> str | None:
        """Why the store counts as away: refused connections, 5xx, silence, a full disk. None: it serves."""
        return self._outage.cause(time.monotonic())

    async def put(
        self, key: str, data: bytes, content_type: str = "application/json", ttl_days: int | None = None
    ) -> dict[str, Any]:
        """Stores `data` in the bucket for outputs; returns its blob reference (contract.md §2).

        Tries again with back-off until `settings.deadline_s`. Raises StoreUnavailable.
        """
        return await self._until_deadline(
            "put", lambda: self._put(key, data, content_type, ttl_days or self._settings.ttl_days)
        )

    async def get(self, bucket: str, key: str, size: int | None, sha256: str | None) -> bytes:
        """An object's bytes, checked. Raises BlobMissing, DigestMismatch, NameRefused, StoreUnavailable.

        At most `size` + 1 bytes are read, so that a wrong reference cannot fill the memory.
        """
        return await self._until_deadline("get", lambda: self._get(bucket, key, size, sha256))

    async def probe(self) -> None:
        """One small upload, so that `away` knows whether the store takes something again. Never raises."""
        key = f"{self._settings.prefix}/{PROBE_KEY}"
        with suppress(Exception):
            async with asyncio.timeout(PROBE_S):
                await self._watched(lambda: self._put(key, PROBE_BYTES, "application/json", 1))

    async def ready(self, timeout_s: float = 5.0) -> bool:
        """Whether the bucket for outputs is there and may be used."""
        try:
            async with asyncio.timeout(timeout_s):
                return bool(await self._run(lambda: self._client.bucket_exists(self._settings.bucket)))
        except (TimeoutError, MinioException, HTTPError, OSError, ValueError):
            return False

    def close(self) -> None:
        """Does not wait for operations under way."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._http.clear()

    async def _until_deadline(self, what: str, operation: Callable[[], T]) -> T:
        seconds = self._settings.deadline_s
        deadline = time.monotonic() + seconds
        delay = RETRY_FIRST_S
        cause = ""
        while True:
            try:
                async with asyncio.timeout(max(0.001, deadline - time.monotonic())):
                    return await self._watched(operation)
            except TimeoutError:
                told = (
                    f"failed to {what} for {seconds:g} s: {cause}" if cause else f"did not answer within {seconds:g} s"
                )
                raise StoreUnavailable(f"the store {told}") from None
            except (ValueError, InvalidURL) as error:  # the client's own word, before anything is sent
                raise NameRefused(f"the client refused to {what}: {type(error).__name__}") from error
            except S3Error as error:
                cause = _cause(error)
                if cause in _NAMELESS:
                    raise NameRefused(f"the store refused to {what}: {cause}") from error
                if cause in _FINAL:
                    raise StoreUnavailable(f"the store refused to {what}: {cause}") from error
            except (MinioException, HTTPError, OSError) as error:
                cause = _cause(error)
            pause = delay * random.uniform(0.5, 1.5)
            if time.monotonic() + pause >= deadline:
                raise StoreUnavailable(f"the store failed to {what} for {seconds:g} s: {cause}")
            log.warning("store %s failed, trying again in %.1f s: %s", what, pause, cause)
            await asyncio.sleep(pause)
            delay = min(delay * 2, RETRY_MOST_S)

    async def _watched(self, operation: Callable[[], T]) -> T:
        """One try; how it goes says whether the store is away."""
        outage = self._outage
        call = outage.began(time.monotonic())
        try:
            result = await self._run(operation)
        except asyncio.CancelledError:  # by the deadline above, or nobody waits any more
            outage.left(call, time.monotonic())
            raise
        except (MinioException, HTTPError, OSError) as error:
            if _is_outage(error):
                outage.failed(call, _cause(error))
            else:
                outage.answered(call, time.monotonic())
            raise
        except BaseException:
            outage.answered(call, time.monotonic())
            raise
        outage.answered(call, time.monotonic())
        return result

    async def _run(self, operation: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, operation)

    def _put(self, key: str, data: bytes, content_type: str, ttl_days: int) -> dict[str, Any]:
        bucket = self._settings.bucket
        written = self._client.put_object(
            bucket,
            key,
            io.BytesIO(data),
            len(data),
            content_type=content_type,
            part_size=PART_BYTES,
            num_parallel_uploads=1,
        )
        expires = datetime.now(UTC).replace(microsecond=0, tzinfo=None) + timedelta(days=ttl_days)
        reference = {
            "bucket": bucket,
            "key": key,
            "size": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
            "content_type": content_type,
            "etag": written.etag,
            "expires_at": expires.isoformat() + "Z",
        }
        if written.version_id:
            reference["version_id"] = written.version_id
        return reference

    def _get(self, bucket: str, key: str, size: int | None, sha256: str | None) -> bytes:
        limit = size if size is not None else self._settings.max_input_bytes
        response = None
        try:
            response = self._client.get_object(bucket, key)
            parts, read = [], 0
            while read <= limit and (part := response.read(min(READ_BYTES, limit + 1 - read))):
                parts.append(part)
                read += len(part)
        except S3Error as error:
            if error.code in _MISSING:
                raise BlobMissing(f"no object {key!r} in bucket {bucket!r}") from error
            raise
        finally:
            if response is not None:
                # An unread rest would be read by the next user of the connection.
                with suppress(Exception):
                    response.close()
                response.release_conn()
        data = b"".join(parts)
        if read > limit or (size is not None and read != size):
            found = f"more than {limit}" if read > limit else str(read)
            raise DigestMismatch(f"the object has {found} bytes, not {limit}")
        if sha256 is not None and hashlib.sha256(data).hexdigest() != sha256.lower():
            raise DigestMismatch("the object's SHA-256 is not the one of its reference")
        return data


def _cause(error: BaseException) -> str:
    """In a word, without addresses or keys."""
    if isinstance(error, S3Error):
        return error.code or "error"
    if isinstance(error, MaxRetryError) and error.reason is not None:
        return type(error.reason).__name__
    return type(error).__name__


def _is_outage(error: BaseException) -> bool:
    """Whether it says something of the store, not of the call."""
    if not isinstance(error, S3Error):
        return True
    return error.response.status >= 500 or error.response.status == 429 or error.code in _NOT_NOW
