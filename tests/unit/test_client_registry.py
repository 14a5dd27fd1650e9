"""What the client knows of the service's registries: live where it may read them, nothing where it may not."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.errors import TopicAuthorizationFailedError

from client import registry as room
from client.registry import Registry
from schemas.names import MODELS, TENANTS
from service.cli.registry_topic import RegistryTopic, sort
from service.models import ENTRIES, Models
from service.settings import Settings


class Broker:
    """Topics with one partition, and a consumer of them."""

    def __init__(self, *topics: str, hidden: tuple[str, ...] = ()) -> None:
        self.logs: dict[str, list[Any]] = {topic: [] for topic in topics}
        self.hidden = hidden
        self.stopped = False
        self.fails: BaseException | None = None
        self._at: dict[TopicPartition, int] = defaultdict(int)
        self._assigned: list[TopicPartition] = []

    def put(self, topic: str, key: str, value: bytes | None) -> None:
        self.logs[topic].append(SimpleNamespace(key=key.encode(), value=value, topic=topic, partition=0))

    # the connection

    def reader(self, **more: Any) -> Broker:
        return self

    async def partitions(self, topic: str) -> int:
        return 1

    # the consumer

    async def start(self) -> None: ...

    async def stop(self) -> None:
        self.stopped = True

    async def topics(self) -> set[str]:
        return set(self.logs)

    def assign(self, places: list[TopicPartition]) -> None:
        self._assigned = list(places)

    async def beginning_offsets(self, places: list[TopicPartition]) -> dict[TopicPartition, int]:
        return dict.fromkeys(places, 0)

    async def end_offsets(self, places: list[TopicPartition]) -> dict[TopicPartition, int]:
        return {place: len(self.logs[place.topic]) for place in places}

    async def position(self, place: TopicPartition) -> int:
        return self._at[place]

    async def getmany(self, timeout_ms: int) -> dict[TopicPartition, list[Any]]:
        await asyncio.sleep(0)
        if (problem := self.fails) is not None:
            self.fails = None
            raise problem
        forbidden = {place.topic for place in self._assigned} & set(self.hidden)
        if forbidden:
            raise TopicAuthorizationFailedError(forbidden)
        turn = {}
        for place in self._assigned:
            if records := self.logs[place.topic][self._at[place] :]:
                turn[place] = records
                self._at[place] += len(records)
        return turn


async def opened(broker: Broker) -> Registry:
    registry = Registry(broker)  # type: ignore[arg-type]
    async with asyncio.timeout(5):
        await registry.open()
    return registry


async def until(condition: Any) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0)


async def test_everything_is_known_when_it_is_open_and_changes_come_live() -> None:
    broker = Broker(TENANTS, MODELS)
    broker.put(TENANTS, "acme", b'{"id": "acme", "spread": 2}')
    broker.put(TENANTS, "acme", b'{"id": "acme", "spread": 4, "tier": "bulk"}')
    broker.put(MODELS, "fast", b'{"name": "fast", "pool": "gpu", "alias_of": "m"}')
    registry = await opened(broker)
    try:
        acme = registry.tenant("acme")
        assert acme is not None and (acme.spread, acme.tier) == (4, "bulk")
        assert (registry.pool_of("fast"), registry.pool_of("m"), registry.pool_of(7)) == ("gpu", None, None)
        broker.put(TENANTS, "acme", b"no json")
        broker.put(TENANTS, "globex", b'{"id": "globex"}')
        await until(lambda: registry.tenant("globex"))
        assert registry.tenant("acme") == acme, "a wrong entry leaves the former in force"
        broker.put(TENANTS, "acme", None)
        await until(lambda: registry.tenant("acme") is None)
    finally:
        await registry.close()
    assert broker.stopped


async def test_without_the_topics_nothing_is_known_and_nothing_stays_open() -> None:
    broker = Broker("others")
    registry = await opened(broker)
    assert registry.tenant("acme") is None and registry.pool_of("m") is None and broker.stopped


@pytest.mark.parametrize("hidden", [(TENANTS,), (TENANTS, MODELS)])
async def test_what_this_user_may_not_read_is_left_alone(hidden: tuple[str, ...]) -> None:
    broker = Broker(TENANTS, MODELS, hidden=hidden)
    broker.put(TENANTS, "acme", b'{"id": "acme", "spread": 2}')
    broker.put(MODELS, "m", b'{"name": "m", "pool": "gpu"}')
    registry = await opened(broker)
    try:
        assert registry.tenant("acme") is None
        assert registry.pool_of("m") == ("gpu" if MODELS not in hidden else None)
    finally:
        await registry.close()


@pytest.mark.parametrize("problem", [OSError("away"), asyncio.CancelledError()])
async def test_a_connection_that_breaks_is_used_again(problem: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "RETRY_S", 0.0)
    broker = Broker(TENANTS)
    registry = await opened(broker)
    try:
        broker.fails = problem
        await until(lambda: broker.fails is None)
        broker.put(TENANTS, "acme", b'{"id": "acme"}')
        await until(lambda: registry.tenant("acme"))
    finally:
        await registry.close()


async def test_names_are_read_by_one_rule_in_service_client_and_commands() -> None:
    broker = Broker(MODELS)
    entry = '{"name": "modèle-سریع", "pool": "gpu"}'.encode()
    broker.put(MODELS, "modèle-سریع", entry)
    registry = await opened(broker)
    await registry.close()
    assert registry.pool_of("modèle-سریع") == "gpu"
    models = Models()
    models.take([("modèle-سریع".encode(), entry)])
    assert models.get("modèle-سریع") is not None

    class Log:
        async def partitions(self, topic: str) -> list[TopicPartition]:
            return [TopicPartition(topic, 0)]

        async def read(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
            yield SimpleNamespace(key="modèle-سریع".encode(), value=entry, offset=0)

    topic = RegistryTopic(Settings(), MODELS)
    topic._log = Log()  # type: ignore[assignment]
    known, invalid = sort(ENTRIES, await topic.read())
    assert list(known) == ["modèle-سریع"] and not invalid
