"""Finds the topics that tenants have to themselves (identity mode `topic`), at the start and while the worker runs.

At the start every jobs topic of the pool counts, also of a tenant that the registry does not know (any more): its jobs
get their refusal. After that the registry's tenants are asked for, every `PERIOD_S`, all workers at the same moments of
the clock, so that the group stands still once and not once a worker.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from aiokafka.client import AIOKafkaClient
from aiokafka.errors import KafkaError
from aiokafka.protocol.metadata import MetadataRequest

from schemas import names
from service.settings import Settings

log = logging.getLogger(__name__)

# A new tenant's jobs wait so long for their first reading at most, beside the rebalance. A question costs a worker
# 20 µs a tenant without topics.
PERIOD_S = 10.0
NO_ERROR = 0


class TenantTopics:
    """`tenants()`: the ids of the registry now. `found(topics)`: jobs topics that must be read from now on."""

    def __init__(
        self, settings: Settings, tenants: Callable[[], Iterable[str]], found: Callable[[list[str]], Awaitable[None]]
    ) -> None:
        self._settings = settings
        self._tenants = tenants
        self._found = found
        self._client: AIOKafkaClient | None = None
        self._following: asyncio.Task[None] | None = None
        self._complained: set[str] = set()
        self.jobs: set[str] = set()
        self.cancels: dict[str, int] = {}  # topic → partitions

    async def start(self) -> None:
        """Knows all topics that are there now. Raises KafkaError."""
        self._client = AIOKafkaClient(
            **self._settings.kafka.connection(), request_timeout_ms=self._settings.kafka.request_timeout_ms
        )
        await self._client.bootstrap()
        self._sort(await self._ask(None))

    def follow(self) -> None:
        """From when on `found` is called."""
        self._following = asyncio.create_task(self._follow(), name="tenant topics")

    async def stop(self) -> None:
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
        if self._client is not None:
            await self._client.close()
            self._client = None

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S - time.time() % PERIOD_S)
            try:
                await self.run_once()
            except (KafkaError, OSError, TimeoutError) as error:
                log.warning("tenants' topics not looked for, tried again: %r", error)
            except Exception:
                log.exception("looking for tenants' topics failed")

    async def run_once(self) -> None:
        """Asks for what the registry's tenants may have and is not known yet."""
        wanted: list[str] = []
        for tenant in self._tenants():
            wanted += [names.jobs_topic(self._settings.pool, tier, tenant) for tier in names.TIERS]
            wanted.append(names.cancel_topic(tenant))
        wanted = [name for name in wanted if name not in self.jobs and name not in self.cancels]
        if not wanted:
            return
        if more := self._sort(await self._ask(wanted)):
            log.info("tenants' topics found topics=%s", ",".join(more))
            await self._found(more)

    def _sort(self, counts: Mapping[str, int]) -> list[str]:
        """Takes note of topics; returns the new ones that hold jobs of this pool."""
        more: list[str] = []
        for name, count in counts.items():
            parsed = names.parse_jobs_topic(name)
            if parsed is not None and parsed.pool == self._settings.pool and parsed.tenant is not None:
                if count == self._settings.partitions:
                    if name not in self.jobs:
                        self.jobs.add(name)
                        more.append(name)
                elif name not in self._complained:
                    self._complained.add(name)
                    log.error("not read (R1), run `headrace topics check` topic=%s partitions=%d", name, count)
            elif name.startswith(f"{names.CANCEL}."):
                self.cancels[name] = count
        return sorted(more)

    async def _ask(self, topics: list[str] | None) -> dict[str, int]:
        """Partitions of those that exist; None: of all. One request, which never creates a topic."""
        if self._client is None:
            raise RuntimeError("not started")
        node = self._client.get_random_node()
        if node is None:
            raise KafkaError("no broker is known")
        answer = await self._client.send(node, MetadataRequest(topics, allow_auto_topic_creation=False))
        entries: list[dict[str, Any]] = answer.to_object()["topics"]
        return {
            entry["topic"]: len(entry["partitions"])
            for entry in entries
            if entry["error_code"] == NO_ERROR and entry["partitions"]
        }
