"""The delivery room whole: what it reports to the worker, and what becomes of it when a part of it dies."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from service.delivery import delivery as room
from service.delivery import replies, wire
from service.delivery.delivery import Delivery
from service.frames import Pressure
from service.settings import KafkaSettings, Settings


async def until(condition: Any) -> None:
    end = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.002)


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    monkeypatch.setattr(room, "PRESSURE_S", 0.01)
    monkeypatch.setattr(room, "PROBE_EVERY_S", 0.01)
    return []


def delivery_of(heard: list[Any], state: Path) -> Delivery:
    settings = Settings(state_dir=state, kafka=KafkaSettings(bootstrap="127.0.0.1:9"))
    return Delivery(settings, lambda payload: heard.extend(wire.from_delivery.decode(payload)))


async def test_a_part_that_dies_is_told_and_takes_the_room_with_it(
    heard: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(**_: Any) -> None:
        raise ValueError("no such compression")

    monkeypatch.setattr(replies, "AIOKafkaProducer", broken)
    one, ends = delivery_of(heard, tmp_path), asyncio.Event()
    one.start(ends.set)
    async with asyncio.timeout(5):
        await ends.wait()
    assert "no such compression" in caplog.text
    await one.close()


async def test_a_store_that_is_away_is_reported_and_probed_until_it_is_back(heard: list[Any], tmp_path: Path) -> None:
    class Store:
        away: str | None = "InsufficientStorage"
        probes = 0

        async def probe(self) -> None:
            self.probes += 1
            if self.probes == 3:
                self.away = None

        def close(self) -> None: ...

    def reported() -> list[str | None]:
        return [frame.store for frame in heard if isinstance(frame, Pressure)]

    one, store = delivery_of(heard, tmp_path), Store()
    one._store = store  # type: ignore[assignment]
    one._blobs.under_way = 1
    one.start(lambda: None)
    await until(lambda: reported()[-3:] == ["InsufficientStorage"] * 3)
    assert store.probes == 0  # an upload tries it
    one._blobs.under_way = 0
    await until(lambda: reported() and reported()[-1] is None)
    assert store.probes == 3
    await one.close()
