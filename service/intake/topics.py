"""Which reply topics exist, and with how many partitions: asked of the broker once, then remembered for a while."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, Protocol

from aiokafka.client import AIOKafkaClient
from aiokafka.errors import KafkaError
from aiokafka.protocol.metadata import MetadataRequest

from service.settings import KafkaSettings

log = logging.getLogger(__name__)

# Seconds an answer is believed. Existing topics seldom vanish (R16 covers those that do); missing ones get created.
KNOWN_S = 60.0
MISSING_S = 5.0
# A topic made a moment ago is not known to every broker yet: seconds until "unknown" is believed (R16).
SETTLE_S = 1.0
RETRY_S = 0.25
# Distinct names remembered; hostile jobs could name any number of topics.
MAX_NAMES = 10_000

NO_ERROR = 0
UNKNOWN_TOPIC = 3
# Invalid name, or the service may not see it: as good as missing, and for good.
NEVER = frozenset({17, 29})


class ReplyTopics(Protocol):
    def known(self, topic: str) -> int | None:
        """The partition count if it was asked lately, 0 for a topic that does not exist, None if nobody asked."""

    async def look_up(self, topic: str) -> int | None:
        """The partition count, None for a topic that does not exist. Waits as long as no broker answers."""


class KafkaReplyTopics:
    """`ReplyTopics` by metadata requests that never create a topic."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._settings = settings
        self._client: AIOKafkaClient | None = None
        self._counts: dict[str, tuple[int, float]] = {}  # topic → (partitions, believed until, monotonic)
        self._asking: dict[str, asyncio.Task[int]] = {}

    async def start(self) -> None:
        """Raises KafkaConnectionError if no broker answers."""
        self._client = AIOKafkaClient(
            **self._settings.connection(), request_timeout_ms=self._settings.request_timeout_ms
        )
        await self._client.bootstrap()

    async def stop(self) -> None:
        for task in list(self._asking.values()):
            task.cancel()
        await asyncio.gather(*self._asking.values(), return_exceptions=True)
        if self._client is not None:
            await self._client.close()
            self._client = None

    def known(self, topic: str) -> int | None:
        entry = self._counts.get(topic)
        if entry is None or entry[1] < time.monotonic():
            return None
        return entry[0]

    async def look_up(self, topic: str) -> int | None:
        count = self.known(topic)
        if count is None:
            task = self._asking.get(topic)
            if task is None:
                task = self._asking[topic] = asyncio.create_task(self._ask_until_answered(topic))
                task.add_done_callback(lambda _: self._asking.pop(topic, None))
            # Shielded: one job's cancellation must not take the answer from the others that wait for it.
            count = await asyncio.shield(task)
        return count or None

    async def _ask_until_answered(self, topic: str) -> int:
        settled = time.monotonic() + SETTLE_S
        while True:
            count = await self._ask(topic)
            if count is not None and (count > 0 or time.monotonic() >= settled):
                break
            if count is None:  # no answer says nothing about the topic
                settled = time.monotonic() + SETTLE_S
            await asyncio.sleep(RETRY_S)
        count = max(count, 0)
        if len(self._counts) >= MAX_NAMES:
            self._forget()
        self._counts[topic] = (count, time.monotonic() + (KNOWN_S if count else MISSING_S))
        return count

    def _forget(self) -> None:
        """Old answers, and if that is not enough all of them."""
        now = time.monotonic()
        self._counts = {topic: entry for topic, entry in self._counts.items() if entry[1] >= now}
        if len(self._counts) >= MAX_NAMES:
            self._counts = {}

    async def _ask(self, topic: str) -> int | None:
        """One request: the partition count, 0 = unknown to this broker, None = no answer that counts."""
        client = self._client
        if client is None:
            raise RuntimeError("KafkaReplyTopics is not started")
        try:
            node = client.get_random_node()
            if node is None:
                return None
            answer = await client.send(node, MetadataRequest([topic], allow_auto_topic_creation=False))
        except (KafkaError, OSError, TimeoutError) as problem:
            log.warning("reply topic metadata: no answer (%s)", type(problem).__name__)
            return None
        entry: dict[str, Any]
        for entry in answer.to_object()["topics"]:
            code = entry["error_code"]
            if code == NO_ERROR:
                return len(entry["partitions"])
            if code == UNKNOWN_TOPIC or code in NEVER:
                return 0
        return None
