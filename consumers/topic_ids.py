"""Watches which topics there are, by the ids that the broker gives them: a name alone does not tell that a topic was
deleted and made again, and then the offsets that were read mean other records.

The client library's own metadata has no ids, so the request (version 12, Kafka 3.0) is spelt out here. Decides nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from io import BytesIO
from typing import Any

from aiokafka.client import AIOKafkaClient
from aiokafka.errors import IncompatibleBrokerVersion, KafkaError
from aiokafka.protocol.abstract import AbstractType
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import Boolean, CompactArray, CompactString, Int16, Int32, Schema, TaggedFields

log = logging.getLogger(__name__)

LOOK_S = 10.0  # how long a topic that was made again stays unread at most; a question costs some 10 µs a partition
ANSWER_S = 5.0
NO_ERROR = 0
NO_ID = bytes(16)


class _Uuid(AbstractType[bytes]):
    @classmethod
    def encode(cls, value: bytes) -> bytes:
        return value

    @classmethod
    def decode(cls, data: BytesIO) -> bytes:
        return data.read(16)


_TEXT = CompactString("utf-8")
_NUMBERS = CompactArray(Int32)


class _Topics12(Response):
    API_KEY = 3
    API_VERSION = 12
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        (
            "brokers",
            CompactArray(("id", Int32), ("host", _TEXT), ("port", Int32), ("rack", _TEXT), ("t", TaggedFields)),
        ),
        ("cluster_id", _TEXT),
        ("controller_id", Int32),
        (
            "topics",
            CompactArray(
                ("error_code", Int16),
                ("name", _TEXT),
                ("topic_id", _Uuid),
                ("is_internal", Boolean),
                (
                    "partitions",
                    CompactArray(
                        ("error_code", Int16),
                        ("partition", Int32),
                        ("leader", Int32),
                        ("leader_epoch", Int32),
                        ("replicas", _NUMBERS),
                        ("isr", _NUMBERS),
                        ("offline", _NUMBERS),
                        ("t", TaggedFields),
                    ),
                ),
                ("operations", Int32),
                ("t", TaggedFields),
            ),
        ),
        ("t", TaggedFields),
    )


class _Ask12(RequestStruct):
    FLEXIBLE_VERSION = True
    API_KEY = 3
    API_VERSION = 12
    RESPONSE_TYPE = _Topics12
    SCHEMA = Schema(
        ("topics", CompactArray(("topic_id", _Uuid), ("name", _TEXT), ("t", TaggedFields))),
        ("allow_auto_topic_creation", Boolean),
        ("include_topic_authorized_operations", Boolean),
        ("t", TaggedFields),
    )


class _Ask(Request[_Ask12]):
    API_KEY = 3

    def __init__(self, topics: Iterable[str]) -> None:
        self._topics: list[tuple[bytes, str, dict[int, bytes]]] = [(NO_ID, topic, {}) for topic in topics]

    def build(self, request_struct_class: type[_Ask12]) -> _Ask12:
        return request_struct_class(self._topics, False, False, {})


async def ids_of(client: AIOKafkaClient, topics: Iterable[str]) -> dict[str, bytes]:
    """The ids of those that exist. Raises KafkaError, OSError, TimeoutError."""
    node = client.get_random_node()
    if node is None:
        raise KafkaError("no broker is known")
    async with asyncio.timeout(ANSWER_S):
        answer = await client.send(node, _Ask(topics))
    entries: list[dict[str, Any]] = answer.to_object()["topics"]
    return {entry["name"]: entry["topic_id"] for entry in entries if entry["error_code"] == NO_ERROR}


class TopicWatch:
    """`told(ids)` hears every `LOOK_S` of those of `topics()` that exist."""

    def __init__(
        self,
        client: Callable[[], AIOKafkaClient],
        topics: Callable[[], Iterable[str]],
        told: Callable[[Mapping[str, bytes]], Awaitable[None]],
    ) -> None:
        self._client = client
        self._topics = topics
        self._told = told
        self._watching: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._watching = asyncio.create_task(self._watch(), name="topic ids")

    async def stop(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait({self._watching}, timeout=1.0)

    async def ask(self, topics: Iterable[str]) -> dict[str, bytes]:
        """Nothing where the broker is too old to tell. Raises KafkaError, OSError, TimeoutError."""
        try:
            return await ids_of(self._client(), topics)
        except (IncompatibleBrokerVersion, NotImplementedError):
            return {}

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self._told(await ids_of(self._client(), self._topics()))
            except (IncompatibleBrokerVersion, NotImplementedError):
                log.warning("the broker tells no topic ids: a jobs topic that is made again is not noticed")
                return
            except (KafkaError, OSError, TimeoutError) as error:
                log.warning("topics not looked for, tried again: %r", error)
            except Exception:
                log.exception("looking for topics failed")
