"""How lists of frames travel on the socket: msgpack with a length in front. No I/O of its own."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import msgspec

from service.frames import Frame, FromDelivery, ToDelivery

_LENGTH = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()

to_delivery: msgspec.msgpack.Decoder[list[ToDelivery]] = msgspec.msgpack.Decoder(list[ToDelivery])
from_delivery: msgspec.msgpack.Decoder[list[FromDelivery]] = msgspec.msgpack.Decoder(list[FromDelivery])


def encode(frames: Sequence[Frame]) -> bytes:
    """Raises UnicodeEncodeError if a text holds half a surrogate pair."""
    return _encoder.encode(frames)


def length(payload: bytes) -> bytes:
    """What stands before a payload on the socket."""
    return _LENGTH.pack(len(payload))


class Splitter:
    """Cuts a byte stream back into payloads."""

    __slots__ = ("_buffer",)

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The payloads that are whole now."""
        buffer = self._buffer
        buffer += data
        start, end = 0, len(buffer)
        try:
            while end - start >= _LENGTH.size:
                (size,) = _LENGTH.unpack_from(buffer, start)
                stop = start + _LENGTH.size + size
                if stop > end:
                    return
                payload = bytes(memoryview(buffer)[start + _LENGTH.size : stop])
                start = stop
                yield payload
        finally:
            if start:
                del buffer[:start]
