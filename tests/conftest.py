"""What holds for every test, and the fixtures of tests that run whole workers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

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


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one file share fixtures and stay in one process (`pytest -n`)."""
    for item in items:
        item.add_marker(pytest.mark.xdist_group("engine" if item.path.stem in REAL_ENGINE else item.path.stem))
    items.sort(key=_rank)


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
