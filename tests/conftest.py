"""What holds for every test, and the fixtures of tests that run whole workers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.integration.conftest import TestStack
from tests.integration.worker_kit import Fleet
from tests.watchdog import watched

# No test depends on the speed of the machine.
settings.register_profile("headrace", deadline=None)
settings.load_profile("headrace")


# Files that start the real engine: one process runs them all, so that the machine carries one engine at a time.
REAL_ENGINE = ("test_worker_contract", "test_worker_life", "test_engine_vllm")
# What takes longest begins first; before all workers, the engine's own tests, which look for processes left over.
SLOWEST = ("test_engine_vllm", "test_worker_contract", "test_worker_life", "test_faults")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_rank)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests of one file share fixtures and stay in one process (`pytest -n`)."""
    from xdist.scheduler import LoadScopeScheduling

    class Files(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            stem = Path(nodeid.partition("::")[0]).stem
            return "engine" if stem in REAL_ENGINE else stem

    return Files(config, log)


def _rank(item: pytest.Item) -> tuple[bool, int]:
    name = item.path.stem
    return "unit" in item.path.parts, SLOWEST.index(name) if name in SLOWEST else len(SLOWEST)


@pytest.fixture(scope="session", autouse=True)
def _watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing outlives the run, however it ends."""
    with watched(tmp_path_factory.getbasetemp()):
        yield


@pytest.fixture(scope="session")
async def fleet(stack: TestStack, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    """Worker processes for the whole run: an engine's start is the slowest thing there is."""
    fleet = Fleet(stack, tmp_path_factory.mktemp("workers"))
    yield fleet
    await fleet.close()
