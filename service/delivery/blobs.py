"""Large outputs: which are stored, under which key, and the upload. Decides nothing about how a job ends."""

from __future__ import annotations

import time
from typing import Any, Protocol

from service.frames import Head
from service.settings import StoreSettings
from service.telemetry.spans import StoreSummary

# The broker's own limit is 1 MiB a record: an inline response leaves room for the rest of its event.
INLINE_MOST_BYTES = 768 * 1024


class Store(Protocol):
    async def put(
        self, key: str, data: bytes, content_type: str = "application/json", ttl_days: int | None = None
    ) -> dict[str, Any]: ...


def is_stored(head: Head, size: int) -> bool:
    """Whether an output of `size` bytes goes to the store."""
    return head.store == "always" or (head.store != "never" and size > inline_limit(head))


def is_too_large(head: Head, size: int) -> bool:
    """Whether it fits neither inline nor may be stored."""
    return head.store == "never" and size > inline_limit(head)


def inline_limit(head: Head) -> int:
    return min(head.inline_max_bytes, INLINE_MOST_BYTES)


class Blobs:
    def __init__(self, settings: StoreSettings, store: Store) -> None:
        self._settings = settings
        self._store = store
        self.puts = 0
        self.bytes = 0
        self.failures = 0
        self.under_way = 0  # uploads, those that wait for another try among them

    def key(self, head: Head, attempt: str, at: float) -> str:
        """The attempt in the key replaces the conditional write that the client lacks: the terminal event names one."""
        day = time.strftime("%Y/%m/%d", time.gmtime(at))
        dots = not head.job_id.strip(".")  # an id of dots alone is no path segment
        job_id = f"dots-{len(head.job_id)}" if dots else head.job_id
        return f"{self._settings.prefix}/{head.tenant}/{day}/{job_id}/{attempt}/output.json"

    async def put(self, head: Head, attempt: str, data: bytes) -> tuple[dict[str, Any], StoreSummary]:
        """Raises service.store.StoreUnavailable after the store's deadline."""
        started = time.time()
        key = self.key(head, attempt, started)
        self.under_way += 1
        try:
            reference = await self._store.put(key, data, ttl_days=head.ttl_days)
        except BaseException:
            self.failures += 1
            raise
        finally:
            self.under_way -= 1
        self.puts += 1
        self.bytes += len(data)
        return reference, StoreSummary(started, time.time(), reference["bucket"], key, len(data))
