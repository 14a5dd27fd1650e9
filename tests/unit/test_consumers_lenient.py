"""A record with a header name that is no UTF-8 comes through; all others are read as before."""

from __future__ import annotations

from typing import Any

import pytest
from aiokafka.consumer import fetcher
from aiokafka.errors import CorruptRecordException
from aiokafka.record.default_records import _DefaultRecordBatchBuilderPy

from consumers import lenient

NONE, LZ4 = 0, 3


def batch(base: int, names: list[str], *, codec: int = NONE, broken: bytes | None = None) -> bytes:
    """A batch of one record a name; the name `XXXX` becomes `broken` on the wire."""
    builder = _DefaultRecordBatchBuilderPy(2, codec, 0, -1, -1, -1, 1 << 20)
    for index, name in enumerate(names):
        builder.append(index, 1_700_000_000_000 + index, b"k", b"v%d" % index, [(name, b"\xff"), ("null", None)])
    if broken is not None:
        at = builder._buffer.index(b"XXXX")
        builder._buffer[at : at + 4] = broken
    data = bytearray(builder.build())
    data[0:8] = base.to_bytes(8, "big")
    return bytes(data)


def read(data: bytes) -> list[Any]:
    records = lenient.LenientRecords(data)
    out = []
    while records.has_next():
        found = records.next_batch()
        assert found.validate_crc()
        assert not found.is_control_batch
        out += list(found)
        assert found.next_offset == out[-1].offset + 1
    return out


@pytest.mark.parametrize("codec", [NONE, LZ4])
def test_every_record_comes_through(codec: int) -> None:
    data = batch(5, ["a", "ключ"], codec=codec) + batch(7, ["a", "XXXX", "b"], codec=codec, broken=b"\xff\xfeok")
    data += batch(10, ["c"], codec=codec)
    records = read(data)
    assert [record.offset for record in records] == [5, 6, 7, 8, 9, 10]
    assert [record.headers[0] for record in records] == [
        ("a", b"\xff"),
        ("ключ", b"\xff"),
        ("a", b"\xff"),
        ("\\xff\\xfeok", b"\xff"),
        ("b", b"\xff"),
        ("c", b"\xff"),
    ]
    assert {record.headers[1] for record in records} == {("null", None)}
    assert [record.value for record in records] == [b"v0", b"v1", b"v0", b"v1", b"v2", b"v0"]
    assert [record.timestamp for record in records] == [1_700_000_000_000 + n for n in (0, 1, 0, 1, 2, 0)]
    assert {record.key for record in records} == {b"k"}


def test_the_name_can_be_written_again() -> None:
    (record,) = read(batch(0, ["XXXX"], broken=b"\x80\x81\xf5\xff"))
    assert record.headers[0][0].encode() == rb"\x80\x81\xf5\xff"


def test_a_corrupt_record_is_still_an_error() -> None:
    data = bytearray(batch(0, ["XXXX"], broken=b"\xff\xff\xff\xff"))
    data[61] ^= 0x02  # the record's length
    records = lenient.LenientRecords(bytes(data))
    with pytest.raises(CorruptRecordException):
        list(records.next_batch())


def test_it_is_what_the_consumer_uses() -> None:
    lenient.install()
    assert fetcher.MemoryRecords is lenient.LenientRecords
