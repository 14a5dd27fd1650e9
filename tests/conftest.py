"""What holds for every test, and the fixtures of tests that run whole workers."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from hypothesis import settings

from tests.integration.conftest import TestStack
from tests.integration.worker_kit import Fleet

# No test depends on the speed of the machine.
settings.register_profile("headrace", deadline=None)
settings.load_profile("headrace")


@pytest.fixture(scope="session")
async def fleet(stack: TestStack, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    """Worker processes for the whole run: an engine's start is the slowest thing there is."""
    fleet = Fleet(stack, tmp_path_factory.mktemp("workers"))
    yield fleet
    await fleet.close()
