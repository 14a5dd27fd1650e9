"""What tests of a whole worker share that need no model: a pool of its own, workers with the simulated engine."""

from __future__ import annotations

import asyncio
import re
import urllib.request
import uuid
from pathlib import Path
from typing import Any

import orjson

from schemas.names import CANCEL, status_topic
from service import topics
from service.cli.process import WorkerProcess
from service.settings import KafkaSettings, Settings
from tests.integration.conftest import TestStack
from tests.integration.worker_kit import MODEL, Wire, environment, job

START_S = 60.0
STEP_S = 0.02  # one token of every running job


class SimulatedPool:
    """Workers of one pool by name; `main` is the one that most tests share."""

    def __init__(self, stack: TestStack, state: Path) -> None:
        self._stack = stack
        self._state = state
        self.name = f"simulated-{uuid.uuid4().hex[:8]}"
        self.workers: dict[str, WorkerProcess] = {}

    @property
    def bootstrap(self) -> str:
        return self._stack.bootstrap

    async def topics(self) -> None:
        found = Settings(pool=self.name, partitions=6, kafka=KafkaSettings(bootstrap=self.bootstrap))
        done = await topics.apply(found)
        assert not done.findings, done.findings

    def wire(self) -> Wire:
        """Raw records in; reply events, dead letters and status records out."""
        return Wire(self.bootstrap, CANCEL, status_topic(self.name), pool=self.name)

    async def start(self, name: str, **more: str) -> WorkerProcess:
        variables = {
            "HEADRACE_POOL": self.name,
            "HEADRACE_ENGINE__KIND": "simulated",
            "HEADRACE_ENGINE__SIM_STEP_BASE_S": str(STEP_S),
            "HEADRACE_ENGINE__MAX_NUM_SEQS": "8",
            "HEADRACE_LEDGER__MAX_UNFINISHED": "16",  # so that few jobs fill a partition
            "HEADRACE_DRAIN_S": "0.2",
            **more,
        }
        worker = WorkerProcess(
            f"{self.name}-{name}", self._state / "logs", environment(self._stack, self._state, **variables)
        )
        await worker.__aenter__()
        self.workers[name] = worker
        await worker.ready(START_S)
        return worker

    async def main(self) -> WorkerProcess:
        main = self.workers.get("main")
        if main is None or main.process.returncode is not None:
            main = await self.start("main")
        return main

    async def stop(self, name: str, *, kill: bool = False) -> None:
        await self.workers.pop(name).stop(kill=kill)

    async def close(self) -> None:
        await asyncio.gather(*(worker.stop() for worker in self.workers.values()))


def endless(id: str, **body: Any) -> dict[str, Any]:
    """A job that runs for as long as a test may take."""
    return job(id, model=MODEL, **{"max_tokens": 2000, **body})


def statuses(wire: Wire, pool: SimulatedPool, job_id: str) -> list[dict[str, Any]]:
    found = [orjson.loads(record.value) for record in wire.of(status_topic(pool.name))]
    return [status for status in found if status["job_id"] == job_id]


def events_of(wire: Wire, job_id: str, kind: str) -> list[dict[str, Any]]:
    return [event for event in wire.events(job_id) if event["type"] == kind]


def metric(worker: WorkerProcess, name: str, **labels: str) -> float:
    """One sample of the worker's /metrics; 0 if it is not there."""
    with urllib.request.urlopen(worker.url + "/metrics", timeout=5) as answer:
        text = answer.read().decode()
    for line in text.splitlines():
        match = re.fullmatch(rf"{name}(?:\{{(.*)\}})? (\S+)", line)
        if match and all(f'{key}="{value}"' in (match[1] or "") for key, value in labels.items()):
            return float(match[2])
    return 0.0


def state_of(worker: WorkerProcess) -> str:
    """For the message of a test that waited in vain: what the worker counts, and the end of its log."""
    with urllib.request.urlopen(worker.url + "/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    said = [line for line in lines if line.startswith("headrace_") and "_bucket" not in line and " 0.0" not in line]
    return "\n".join([*said, *worker.log.read_text(errors="replace").splitlines()[-40:]])
