"""The real parts that integration tests run against: one stack for the whole run, on free ports, stopped at the end."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from infra.progress import Quiet
from infra.stack import Stack

if TYPE_CHECKING:
    from tests.integration.simulated_kit import SimulatedPool


@dataclass(frozen=True)
class TestStack:
    """Addresses of the running parts; `model` is a folder in Hugging Face layout."""

    __test__ = False

    bootstrap: str
    store_endpoint: str
    otlp_endpoint: str
    zipkin: str
    model: Path
    # The HEADRACE_… variables for a worker or a command in a process of its own; empty for a given stack.
    environment: Mapping[str, str] = field(default_factory=dict)


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestStack]:
    """A stack in a temporary folder; with HEADRACE_TEST_BOOTSTRAP (…_STORE, _OTLP, _ZIPKIN, _MODEL) a given one."""
    if bootstrap := os.environ.get("HEADRACE_TEST_BOOTSTRAP"):
        yield TestStack(
            bootstrap=bootstrap,
            store_endpoint=os.environ.get("HEADRACE_TEST_STORE", ""),
            otlp_endpoint=os.environ.get("HEADRACE_TEST_OTLP", ""),
            zipkin=os.environ.get("HEADRACE_TEST_ZIPKIN", ""),
            model=Path(os.environ.get("HEADRACE_TEST_MODEL", "")),
        )
        return
    own = Stack(tmp_path_factory.mktemp("stack"), partitions=6, show=Quiet())
    try:
        at = own.up()
        assert at.model is not None, own.notes
        yield TestStack(
            bootstrap=at.bootstrap,
            store_endpoint=at.store_endpoint,
            otlp_endpoint=at.otlp_endpoint,
            zipkin=at.zipkin,
            model=at.model,
            environment=own.environment(),
        )
    finally:
        own.down()


@pytest.fixture(scope="session")
async def simulated(stack: TestStack, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SimulatedPool]:
    """A pool of its own for workers with the simulated engine, which start in seconds; stopped at the end."""
    from tests.integration.simulated_kit import SimulatedPool

    pool = SimulatedPool(stack, tmp_path_factory.mktemp("simulated"))
    await pool.topics()
    yield pool
    await pool.close()
