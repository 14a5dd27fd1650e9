"""What tests of the identity modes share: a broker that asks who one is, a pool for each mode, users, raw records."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import orjson
import yaml
from aiokafka import AIOKafkaProducer
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from client import Client, Signer
from infra.progress import Quiet
from infra.secured import WORKER
from infra.stack import Stack
from schemas import names
from schemas.events import TERMINAL
from schemas.verification import PublicKey
from service import acls, topics
from service.cli.process import WorkerProcess
from service.cli.trace import Span, fetch
from service.own_topics import own_topics
from service.settings import Settings
from service.tenants import load
from tests.integration.delivery_kit import Log, until
from tests.integration.simulated_kit import metric
from tests.integration.worker_kit import MODEL, job

MODES = ("trusted", "topic", "signed")
PARTITIONS = 3
START_S = 60.0
TRACE_S = 30.0
KEYS = {tenant: Ed25519PrivateKey.generate() for tenant in ("acme", "globex")}
SIGNERS = {tenant: Signer(key) for tenant, key in KEYS.items()}


class Site:
    """One secured stack; `pool(mode)` is the name of the pool that runs in that mode."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stack = Stack(folder / "stack", partitions=PARTITIONS, with_model=False, secure=True, show=Quiet())
        self.registry = folder / "tenants.yaml"
        self.workers: dict[str, WorkerProcess] = {}

    async def open(self) -> None:
        await asyncio.to_thread(self.stack.up)
        self.enlist("acme", "globex")
        for mode in MODES:
            await self.equip(mode)

    async def close(self) -> None:
        await asyncio.gather(*(worker.stop() for worker in self.workers.values()))
        await asyncio.to_thread(self.stack.down)

    # operators

    def enlist(self, *tenants: str) -> None:
        """The registry from now on; a partial file is never seen."""
        entries = []
        for tenant in tenants:
            entry: dict[str, Any] = {"id": tenant}
            if tenant in KEYS:
                entry["verification_keys"] = [PublicKey.of(KEYS[tenant].public_key().public_bytes_raw()).jwk()]
            entries.append(entry)
        partial = self.registry.with_suffix(".partial")
        partial.write_text(yaml.safe_dump({"tenants": entries}))
        partial.replace(self.registry)

    async def equip(self, mode: str) -> None:
        """Topics and rights of this mode's pool, for the registry's tenants."""
        found = self.settings(mode)
        tenants = load(self.registry).values()
        done = await topics.apply(found, own_topics(found, tenants))
        assert not [one for one in done.findings if not one.warning], done.findings
        wanted = acls.worker(found, f"User:{WORKER}", tenants)
        for tenant in tenants:
            wanted += acls.tenant(found, tenant, f"User:{tenant.id}")
        await acls.apply(found.kafka, wanted)

    def settings(self, mode: str, user: str = "admin") -> Settings:
        secured = self.secured
        return Settings(
            pool=mode,
            partitions=PARTITIONS,
            identity=mode,  # type: ignore[arg-type]
            service_secret=secured.service_secret,
            tenants_file=self.registry,
            kafka=secured.settings(self.stack.addresses.bootstrap, user),
        )

    @property
    def secured(self) -> Any:
        found = self.stack.secured
        assert found is not None
        return found

    def environment(self, mode: str, user: str = WORKER) -> dict[str, str]:
        return {
            **self.stack.environment(),
            **self.secured.environment(user),
            "HEADRACE_POOL": mode,
            "HEADRACE_PARTITIONS": str(PARTITIONS),
            "HEADRACE_IDENTITY": mode,
            "HEADRACE_TENANTS_FILE": str(self.registry),
            "HEADRACE_ENGINE__KIND": "simulated",
            "HEADRACE_ENGINE__SERVED_NAME": MODEL,
            "HEADRACE_ENGINE__SIM_STEP_BASE_S": "0.02",
            "HEADRACE_DRAIN_S": "0.2",
        }

    async def worker(self, mode: str) -> WorkerProcess:
        """The one of this mode's pool, with the rights of a worker and no more."""
        worker = self.workers.get(mode)
        if worker is None or worker.process.returncode is not None:
            worker = WorkerProcess(f"identity-{mode}", self.folder / "logs", self.environment(mode))
            await worker.__aenter__()
            self.workers[mode] = worker
            await worker.ready(START_S)
        return worker

    async def stop(self, mode: str) -> None:
        if mode in self.workers:
            await self.workers.pop(mode).stop()

    # tenants

    def client(self, mode: str, tenant: str, **more: Any) -> Client:
        options: dict[str, Any] = {"own_topics": mode == "topic"}
        if mode == "signed":
            options["signer"] = SIGNERS[tenant]
        return Client(
            self.stack.addresses.bootstrap,
            tenant=tenant,
            model=MODEL,
            pool=mode,
            security=self.secured.security(tenant),
            **{**options, **more},
        )

    @contextlib.asynccontextmanager
    async def producer(self, user: str = "admin") -> AsyncIterator[AIOKafkaProducer]:
        connection = self.secured.settings(self.stack.addresses.bootstrap, user).connection()
        async with AIOKafkaProducer(**connection, acks="all", request_timeout_ms=5_000) as made:
            yield made

    @contextlib.asynccontextmanager
    async def reading(self, *topic_names: str) -> AsyncIterator[Reading]:
        bootstrap = self.stack.addresses.bootstrap
        connection = self.secured.settings(bootstrap).connection()
        async with Reading(bootstrap, *topic_names, connection=connection) as made:
            yield made

    # what is to be seen

    async def span(self, trace_id: str) -> Span:
        """The span of the record with this trace."""
        spans = await asyncio.to_thread(fetch, self.stack.addresses.zipkin, trace_id, TRACE_S, ("process",))
        return next(span for span in spans if span["name"].startswith("process"))

    async def counts(self, mode: str, name: str, **labels: str) -> float:
        return await asyncio.to_thread(metric, await self.worker(mode), name, **labels)


class Reading(Log):
    """Everything that is written to some topics from now on, as an operator may see it."""

    def events(self, job_id: str, topic: str | None = None) -> list[dict[str, Any]]:
        return [
            orjson.loads(record.value)
            for record in self.records
            if record.key == job_id.encode() and dict(record.headers).get("t") and topic in (None, record.topic)
        ]

    def ends(self, job_id: str, topic: str | None = None) -> list[dict[str, Any]]:
        return [event for event in self.events(job_id, topic) if event["type"] in TERMINAL]

    async def ended(self, job_id: str, topic: str | None = None, timeout_s: float = 30.0) -> dict[str, Any]:
        await until(lambda: self.ends(job_id, topic), f"the end of {job_id} on {topic or 'any topic'}", timeout_s)
        return self.ends(job_id, topic)[0]

    def letters(self, job_id: str) -> list[Any]:
        return [r for r in self.records if r.topic == names.DEAD_LETTERS and job_id.encode() in (r.value or b"")]


def own(tenant: str) -> str:
    return names.reply_topic_of(tenant)


def traced() -> tuple[str, tuple[str, bytes]]:
    """A trace id, and the header that puts a record into that trace."""
    trace_id = secrets.token_hex(16)
    return trace_id, (names.H_TRACEPARENT, f"00-{trace_id}-{secrets.token_hex(8)}-01".encode())


def plain(id: str, tenant: str, **more: Any) -> dict[str, Any]:
    """A job that names no reply topic."""
    made = job(id, tenant=tenant)
    del made["reply"]
    return {**made, **more}


def authorization(
    value: bytes, tenant: str, job_id: str, *, signer: str | None = None, pool: str = "signed", age_s: float = 0.0
) -> tuple[str, bytes]:
    """The header of a signed job; `age_s`: signed so long ago, to live for 300 s."""
    made = SIGNERS[signer or tenant]
    if not age_s:
        return names.H_AUTHORIZATION, made.job(tenant=tenant, job_id=job_id, pool=pool, value=value).encode()
    return names.H_AUTHORIZATION, _at(
        time.time() - age_s, lambda: made.job(tenant=tenant, job_id=job_id, pool=pool, value=value)
    ).encode()


def _at(moment: float, sign: Callable[[], str]) -> str:
    """Signs as if it were that moment."""
    from unittest.mock import patch

    with patch("client.signing.time.time", return_value=moment):
        return sign()
