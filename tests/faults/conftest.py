"""A stack and workers of the fault tests' own: everything here may be killed. The Collector is away for ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from infra.progress import Quiet
from load.arena import Arena
from load.faults.witness import Witness
from service.cli.process import WorkerProcess

POOL = "fault-tests"
PARTITIONS = 6
WORKERS = ("w1", "w2")


@pytest.fixture(scope="session")
async def arena(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Arena]:
    """Two workers with the simulated engine; a test that takes one away brings one back."""
    folder: Path = tmp_path_factory.mktemp("faults")
    environment = {
        "HEADRACE_ENGINE__KIND": "simulated",
        "HEADRACE_ENGINE__MAX_NUM_SEQS": "16",
        "HEADRACE_LEDGER__MAX_UNFINISHED": "32",
        "HEADRACE_DRAIN_S": "3",
    }
    async with Arena(
        WorkerProcess, POOL, partitions=PARTITIONS, show=Quiet(), environment=environment, folder=folder
    ) as one:
        await asyncio.gather(*(one.start(name) for name in WORKERS))
        yield one


@pytest.fixture
async def witness(arena: Arena) -> AsyncIterator[Witness]:
    async with Witness(arena.bootstrap, POOL, PARTITIONS) as one:
        yield one
