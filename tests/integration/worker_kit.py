"""What the tests of a whole worker share: worker processes with the real model, raw records in, all that comes out."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson
from aiokafka import AIOKafkaProducer
from aiokafka.structs import RecordMetadata

from schemas.names import CHAT, DEAD_LETTERS, REPLIES, jobs_topic
from service.cli.process import WorkerProcess
from tests.integration.conftest import TestStack
from tests.integration.delivery_kit import Log, until

MODEL = "smollm2-135m-instruct"
START_S = 240.0  # an engine's start takes 20 to 60 s on two cores, more beside another one
TERMINAL = {"completed", "failed", "cancelled", "expired"}


def environment(stack: TestStack, state: Path, **more: str) -> dict[str, str]:
    return {
        "HEADRACE_KAFKA__BOOTSTRAP": stack.bootstrap,
        "HEADRACE_STORE__ENDPOINT": stack.store_endpoint,
        "HEADRACE_TELEMETRY__OTLP_ENDPOINT": stack.otlp_endpoint,
        "HEADRACE_ENGINE__MODEL": str(stack.model),
        "HEADRACE_ENGINE__SERVED_NAME": MODEL,
        "HEADRACE_ENGINE__MAX_NUM_SEQS": "32",
        "HEADRACE_PARTITIONS": "6",
        "HEADRACE_STATE_DIR": str(state),
        **more,
    }


class Fleet:
    """Worker processes of one test run; whatever still runs at the end is stopped."""

    def __init__(self, stack: TestStack, state: Path) -> None:
        self._stack = stack
        self._state = state
        self.workers: dict[str, WorkerProcess] = {}

    async def spawn(self, name: str, **more: str) -> WorkerProcess:
        worker = WorkerProcess(name, self._state / "logs", environment(self._stack, self._state, **more))
        await worker.__aenter__()
        self.workers[name] = worker
        return worker

    async def start(self, name: str, **more: str) -> WorkerProcess:
        worker = await self.spawn(name, **more)
        await worker.ready(START_S)
        return worker

    async def main(self) -> WorkerProcess:
        """The one worker that most tests share."""
        return self.workers.get("main") or await self.start("main")

    async def close(self) -> None:
        await asyncio.gather(*(worker.stop() for worker in self.workers.values()))


class Wire(Log):
    """Raw records in, every reply event and dead letter out."""

    def __init__(self, bootstrap: str, *more: str, pool: str = "default") -> None:
        super().__init__(bootstrap, REPLIES, DEAD_LETTERS, *more)
        self._pool = pool
        self._producer = AIOKafkaProducer(bootstrap_servers=bootstrap, acks="all", max_request_size=1_048_576)

    async def __aenter__(self) -> Wire:
        await super().__aenter__()
        await self._producer.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._producer.stop()
        await super().__aexit__(*error)

    async def publish(
        self,
        value: bytes | Mapping[str, Any] | None,
        *,
        tier: str = "standard",
        key: bytes = b"acme",
        headers: list[tuple[str, bytes | None]] | None = None,
    ) -> RecordMetadata:
        raw = value if value is None or isinstance(value, bytes) else orjson.dumps(value)
        return await self._producer.send_and_wait(jobs_topic(self._pool, tier), raw, key=key, headers=headers or [])

    async def ended(self, job_id: str, timeout_s: float = 120.0) -> dict[str, Any]:
        """The job's terminal event, the first on the log."""
        await until(lambda: self.terminals(job_id), f"the end of {job_id}", timeout_s)
        return self.terminals(job_id)[0]

    def dead_with(self, marker: str) -> list[Any]:
        """Dead letters whose value or headers hold `marker`."""
        found = []
        for record in self.of(DEAD_LETTERS):
            whole = (record.value or b"") + b"".join(v or b"" for _, v in record.headers)
            if marker.encode() in whole:
                found.append(record)
        return found


def new_id(what: str) -> str:
    return f"{what}-{uuid.uuid4().hex[:8]}"


def job(id: str, prompt: str = "Name three rivers in Europe.", *, tenant: str = "acme", **body: Any) -> dict[str, Any]:
    """A valid chat job; `body` adds to or replaces fields of the request."""
    request = {"model": MODEL, "messages": [{"role": "user", "content": prompt}], "max_tokens": 16, "temperature": 0}
    return {
        "schema_version": 1,
        "id": id,
        "tenant": tenant,
        "endpoint": CHAT,
        "body": {**request, **body},
        "reply": {"topic": REPLIES, "stream": True},
    }


def text_of(events: list[dict[str, Any]], index: int = 0) -> str:
    """The streamed text of one choice."""
    chunks = [event["chunk"] for event in events if event["type"] == "chunk"]
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice.get("delta", {}).get("content") or choice.get("text") or "" for choice in choices)


def check_numbering(events: list[dict[str, Any]]) -> None:
    """Within each attempt seq runs 0, 1, 2 … and each chunk begins where the one before it ended."""
    attempts: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        if event["type"] != "waiting":
            attempts.setdefault(event["attempt"], []).append(event)
    for attempt, own in attempts.items():
        assert [e["seq"] for e in own] == list(range(len(own))), f"attempt {attempt} has a gap"
        tokens = 0
        for event in own:
            if event["type"] == "chunk":
                assert event["offset"] == tokens, f"attempt {attempt}: a chunk begins at the wrong token"
                tokens += event["tokens"]
