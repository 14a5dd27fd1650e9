"""Lets records through whose header *names* are no UTF-8.

Kafka keeps header names as bytes and many producers write what they are given. The client library decodes them while it
unpacks a fetched batch: the error ends that batch, the position stays, FastStream restarts its loop at once, and one
such record blocks its partition for ever, at full speed. Here only such a batch is read a second time, by a decoder
that writes undecodable bytes as `\\xff`; all others go through the library's own.

It owns the one place where the library is changed (`install`), for every consumer of the process.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from aiokafka.consumer import fetcher
from aiokafka.errors import CorruptRecordException
from aiokafka.record.default_records import _DefaultRecordBatchPy, _DefaultRecordPy
from aiokafka.record.memory_records import MemoryRecords
from aiokafka.record.util import decode_varint

LENGTH = slice(8, 12)  # of a batch, after its base offset
HEAD = 12  # bytes before what the length counts
MAGIC = 16  # where a batch states its format; headers exist from 2 on


def install() -> None:
    """Every consumer of this process reads leniently from now on. Idempotent."""
    if not hasattr(fetcher, "MemoryRecords"):
        raise RuntimeError("this aiokafka unpacks batches elsewhere: consumers/lenient.py must follow")
    fetcher.MemoryRecords = LenientRecords


class LenientRecords:
    """The batches of one partition in a fetch response."""

    __slots__ = ("_at", "_data", "_records")

    def __init__(self, data: bytes) -> None:
        self._records = MemoryRecords(data)
        self._data = data
        self._at = 0

    def size_in_bytes(self) -> int:
        return int(self._records.size_in_bytes())

    def has_next(self) -> bool:
        return bool(self._records.has_next())

    def next_batch(self) -> Any:
        batch = self._records.next_batch()
        if batch is None:
            return None
        start = self._at
        head = bytes(self._data[start : start + MAGIC + 1])
        self._at = start + HEAD + int.from_bytes(head[LENGTH], "big")
        return batch if head[MAGIC] < 2 else LenientBatch(batch, self._data, start, self._at)


class LenientBatch:
    """One batch; what it does not define itself is the library's."""

    __slots__ = ("_batch", "_data", "_end", "_start")

    def __init__(self, batch: Any, data: bytes, start: int, end: int) -> None:
        self._batch = batch
        self._data = data
        self._start = start
        self._end = end

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batch, name)

    def __next__(self) -> Any:
        return next(self._batch)

    def __iter__(self) -> Iterator[Any]:
        read = 0
        try:
            for record in self._batch:
                read += 1
                yield record
            return
        except (UnicodeDecodeError, CorruptRecordException):
            pass  # read again below, which raises for what is really corrupt
        for index, record in enumerate(unpack(bytes(self._data[self._start : self._end]))):
            if index >= read:
                yield record


def unpack(data: bytes) -> Iterator[Any]:
    """The records of one batch of format 2. Raises CorruptRecordException."""
    batch = _DefaultRecordBatchPy(data)
    batch._maybe_uncompress()
    buffer, at = batch._buffer, batch._pos
    appended = batch.timestamp_type == batch.LOG_APPEND_TIME
    try:
        for _ in range(batch._num_records):
            length, at = decode_varint(buffer, at)
            end = at + length
            delta, at = decode_varint(buffer, at + 1)  # one byte of attributes, unused
            offset, at = decode_varint(buffer, at)
            key, at = _bytes(buffer, at)
            value, at = _bytes(buffer, at)
            count, at = decode_varint(buffer, at)
            headers: list[tuple[str, bytes | None]] = []
            for _ in range(count):
                name, at = _bytes(buffer, at)
                content, at = _bytes(buffer, at)
                headers.append(((name or b"").decode("utf-8", "backslashreplace"), content))
            if at != end:
                raise CorruptRecordException(f"a record of {length} bytes ends elsewhere")
            timestamp = batch.max_timestamp if appended else batch.first_timestamp + delta
            yield _DefaultRecordPy(batch.base_offset + offset, timestamp, batch.timestamp_type, key, value, headers)
    except (ValueError, IndexError) as error:
        raise CorruptRecordException(f"invalid record structure: {error!r}") from error


def _bytes(buffer: bytearray, at: int) -> tuple[bytes | None, int]:
    length, at = decode_varint(buffer, at)
    return (bytes(buffer[at : at + length]), at + length) if length >= 0 else (None, at)
