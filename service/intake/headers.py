"""What the headers of a job record ask for. Headers are anybody's: null, binary and foreign ones must be harmless."""

from __future__ import annotations

from dataclasses import dataclass

from schemas.names import (
    H_HOP,
    H_ORIGIN,
    H_REPLY_PARTITION,
    H_REPLY_TO,
    H_SPRING_REPLY_PARTITION,
    H_SPRING_REPLY_TO,
    H_STARTS,
)
from service.job import Place, Record

# A reply partition that was asked for and cannot be read: no partition has this number.
UNREADABLE = -1
# More unclean starts than any limit allows; a larger number in a header is not ours.
MAX_STARTS = 1_000


@dataclass(slots=True)
class Headers:
    reply_topic: str | None = None
    reply_partition: int | None = None
    origin: Place | None = None
    starts: int = 0
    hopped: bool = False  # another pool sent it here


def read_headers(record: Record, *, service_topic: bool, replies: bool = True) -> Headers:
    """The first value of each header counts. Origin, starts and hop are believed on the service's own topics only, a
    reply address only with `replies`."""
    found = Headers()
    for name, raw in record.headers:
        if not raw:
            continue
        if name in (H_REPLY_TO, H_SPRING_REPLY_TO):
            if replies and found.reply_topic is None:
                found.reply_topic = raw.decode("utf-8", "replace")
        elif name in (H_REPLY_PARTITION, H_SPRING_REPLY_PARTITION):
            if replies and found.reply_partition is None:
                found.reply_partition = partition_of(raw)
        elif service_topic and name == H_ORIGIN and found.origin is None:
            found.origin = _place(raw)
        elif service_topic and name == H_STARTS and raw.isdigit() and len(raw) <= 9:
            found.starts = min(int(raw), MAX_STARTS)
        elif service_topic and name == H_HOP:
            found.hopped = True
    return found


def partition_of(raw: bytes) -> int:
    """Decimal text, or Spring's four bytes, big-endian. Four ASCII digits are text: no topic has so many partitions."""
    if raw.isdigit() and len(raw) <= 10:
        return int(raw)
    if len(raw) == 4:
        number = int.from_bytes(raw, "big", signed=True)
        return number if number >= 0 else UNREADABLE
    return UNREADABLE


def _place(raw: bytes) -> Place | None:
    try:
        place = Place.parse(raw.decode("ascii"))
    except ValueError:
        return None
    return place if place.topic and place.partition >= 0 and place.offset >= 0 else None
