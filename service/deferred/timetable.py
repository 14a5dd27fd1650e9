"""When the records of one `deferred` partition are due: (due, offset) and nothing else of them (R12). Pure, no clock.

One number a record, 48 bytes: due time, offset, and a fingerprint of the job, so that a cancel finds it. The numbers
order by time; the fingerprint is a hint, since whoever is hastened by mistake is only read once more.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator

OFFSET_BITS, JOB_BITS, TENANT_BITS = 40, 32, 24
_OFFSET, _JOB, _TENANT = (1 << OFFSET_BITS) - 1, (1 << JOB_BITS) - 1, (1 << TENANT_BITS) - 1


def job_print(tenant: str, job_id: str) -> int:
    """Other bits in each process, so that nobody can choose jobs that are taken for another's."""
    return hash((tenant, job_id)) & _JOB


def tenant_print(tenant: str) -> int:
    return hash(tenant) & _TENANT


class Timetable:
    def __init__(self) -> None:
        self._entries: list[int] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[int]:
        """The offsets, in no order."""
        return (entry >> JOB_BITS + TENANT_BITS & _OFFSET for entry in self._entries)

    def add(self, offset: int, due: float, tenant: str, job_id: str) -> None:
        """`due`: wall clock, seconds."""
        when = max(0, round(due * 1000)) << OFFSET_BITS | offset
        heapq.heappush(
            self._entries, (when << JOB_BITS | job_print(tenant, job_id)) << TENANT_BITS | tenant_print(tenant)
        )

    @property
    def next_due(self) -> float | None:
        return (self._entries[0] >> OFFSET_BITS + JOB_BITS + TENANT_BITS) / 1000 if self._entries else None

    def take(self, now: float, most: int) -> list[int]:
        """Offsets that are due, the earliest first; they are forgotten here."""
        found: list[int] = []
        limit = (round(now * 1000) + 1) << OFFSET_BITS + JOB_BITS + TENANT_BITS
        while len(found) < most and self._entries and self._entries[0] < limit:
            found.append(heapq.heappop(self._entries) >> JOB_BITS + TENANT_BITS & _OFFSET)
        return found

    def hasten(self, jobs: Collection[int], tenants: Collection[int]) -> int:
        """Records of these jobs (`job_print`) and tenants (`tenant_print`) are due at once; how many they are."""
        early = (1 << OFFSET_BITS + JOB_BITS + TENANT_BITS) - 1
        count = 0
        entries = self._entries
        for place, entry in enumerate(entries):
            if entry > early and (entry >> TENANT_BITS & _JOB in jobs or entry & _TENANT in tenants):
                entries[place] = entry & early
                count += 1
        if count:
            heapq.heapify(entries)
        return count
