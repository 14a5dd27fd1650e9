"""Places and identities as 64-bit numbers, so that millions of them can be compared in bounded memory. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from hashlib import blake2b

from schemas import names
from schemas.decode import NotJson, decode
from schemas.fields import ID_PATTERN, INT32_MAX
from schemas.records import status_key
from service.job import Place

_ID = re.compile(ID_PATTERN, re.ASCII)

OFFSET_BITS = 40  # 10^12 records a partition
PARTITION_BITS = 20


class Places:
    """Places as 64-bit numbers, by a list of the topics that occur; those of one partition share the upper bits."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._topics: list[str] = [""]  # so that no place is 0

    def pack(self, place: Place) -> int:
        """Raises ValueError for what cannot be a place."""
        if not (0 <= place.offset < 1 << OFFSET_BITS and 0 <= place.partition < 1 << PARTITION_BITS):
            raise ValueError(f"no place: {place}")
        number = self._numbers.get(place.topic)
        if number is None:
            number = self._numbers[place.topic] = len(self._topics)
            self._topics.append(place.topic)
        return (number << PARTITION_BITS | place.partition) << OFFSET_BITS | place.offset

    def unpack(self, packed: int) -> Place:
        upper, offset = packed >> OFFSET_BITS, packed & (1 << OFFSET_BITS) - 1
        return Place(self._topics[upper >> PARTITION_BITS], upper & (1 << PARTITION_BITS) - 1, offset)


def origin_of(headers: Iterable[tuple[str, bytes | None]]) -> Place | None:
    """The origin that the service stated in a copy's or dead letter's headers: the last one, ours."""
    found = None
    for name, value in headers:
        if name == names.H_ORIGIN and value:
            try:
                place = Place.parse(value.decode("ascii"))
            except ValueError:
                continue
            if place.topic and 0 <= place.partition < 1 << PARTITION_BITS and 0 <= place.offset < 1 << OFFSET_BITS:
                found = place
    return found


def fingerprint(text: bytes) -> int:
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big")


def identity_of(tenant: str, job_id: str, run: int) -> int:
    """64 bits of (tenant, id, run); two of a million jobs share one with a chance of 3 in 10^8."""
    return fingerprint(status_key(tenant, job_id, run)) or 1


def read_job(value: bytes | None) -> tuple[bytes, int, str | None]:
    """(job id, identity, reply topic) of a job record, as intake reads them; empty, 0 and None where there is none."""
    try:
        document = decode(value).document
    except NotJson:
        return b"", 0, None
    job_id, tenant, run, reply = (document.get(name) for name in ("id", "tenant", "run", "reply"))
    if not isinstance(job_id, str) or not _ID.fullmatch(job_id):
        return b"", 0, None
    if type(run) is not int or not 0 <= run <= INT32_MAX:
        run = 0
    topic = reply.get("topic") if isinstance(reply, dict) else None
    identity = identity_of(tenant if isinstance(tenant, str) else "", job_id, run)
    return job_id.encode(), identity, topic if isinstance(topic, str) else None
