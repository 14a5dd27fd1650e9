"""A worker that cannot start says why in one line, with the documented exit code, and leaves nothing behind."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from service.cards import alive
from service.cli.process import WorkerProcess, WorkerStopped
from tests.integration.conftest import TestStack
from tests.integration.worker_kit import environment


async def refused(stack: TestStack, state: Path, **more: str) -> tuple[int, str]:
    """Exit code and last line of a worker that must not become ready."""
    async with WorkerProcess("wrong", state / "logs", environment(stack, state, **more)) as worker:
        with pytest.raises(WorkerStopped):
            await worker.ready(120)
        return await worker.process.wait(), worker.log.read_text().strip().splitlines()[-1]


async def test_a_wrong_model_folder(stack: TestStack, tmp_path: Path) -> None:
    code, line = await refused(stack, tmp_path, HEADRACE_ENGINE__MODEL=str(tmp_path / "no-such-model"))
    assert code == 1 and line.startswith("headrace: ") and "no-such-model" in line


async def test_a_wrong_partition_count(stack: TestStack, tmp_path: Path) -> None:
    code, line = await refused(stack, tmp_path, HEADRACE_PARTITIONS="7", HEADRACE_ENGINE__KIND="simulated")
    assert code == 1 and "headrace topics apply" in line


async def test_a_broker_that_is_away(stack: TestStack, tmp_path: Path) -> None:
    code, line = await refused(
        stack, tmp_path, HEADRACE_KAFKA__BOOTSTRAP="127.0.0.1:9", HEADRACE_ENGINE__KIND="simulated"
    )
    assert code == 3 and "127.0.0.1:9" in line


async def test_an_invalid_registry(stack: TestStack, tmp_path: Path) -> None:
    registry = tmp_path / "tenants.yaml"
    registry.write_text("tenants: [{id: acme, weigth: 2}]")
    code, line = await refused(stack, tmp_path, HEADRACE_TENANTS_FILE=str(registry), HEADRACE_ENGINE__KIND="simulated")
    assert code == 1 and "weigth" in line


async def test_a_pool_without_topics_is_told_at_once_and_nothing_stays(stack: TestStack, tmp_path: Path) -> None:
    began = time.monotonic()
    code, line = await refused(stack, tmp_path, HEADRACE_POOL="nope", HEADRACE_ENGINE__KIND="simulated")
    assert code == 1 and "inference.nope.jobs.standard" in line and line.endswith("headrace topics apply --pool nope")
    assert time.monotonic() - began < 20, "the delivery process would have waited 30 s for its topics"
    assert alive(tmp_path) == []
