"""What the tests of identity modes share: tenants with keys, signers, an intake on fakes, records."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import orjson
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from client.signing import Signer
from schemas import names
from schemas.tenants import Tenant
from schemas.verification import PublicKey
from service.intake.intake import Intake
from service.intake.verdict import Lookup, Verdict
from service.job import Place, Record, Ticket
from service.settings import Settings

POOL = "default"
SECRET = "between-the-workers"
JOBS = names.jobs_topic(POOL, "standard")
DEFERRED = names.deferred_topic(POOL)
MODEL = "small"

KEYS = {name: Ed25519PrivateKey.generate() for name in ("acme", "acme-next", "globex", "stranger")}
SIGNERS = {name: Signer(key) for name, key in KEYS.items()}


def public(name: str, kid: str | None = None) -> str:
    return PublicKey.of(KEYS[name].public_key().public_bytes_raw(), kid).jwk()


REGISTRY = {
    tenant.id: tenant
    for tenant in (
        Tenant(id="acme", verification_keys=[public("acme"), public("acme-next")], reply_topics=["acme.*"]),
        Tenant(id="globex", verification_keys=[public("globex")], reply_topics=["*"]),
        Tenant(id="keyless"),
    )
}


class Topics:
    """Every topic is there, with six partitions."""

    def known(self, topic: str) -> int | None:
        return 6

    async def look_up(self, topic: str) -> int | None:
        return 6


class NoStore:
    async def get(self, bucket: str, key: str, size: int, sha256: str) -> bytes:
        raise AssertionError("nothing is fetched here")


def settings(mode: str, **more: Any) -> Settings:
    found = Settings(identity=mode, service_secret="" if mode == "trusted" else SECRET, **more)  # type: ignore[arg-type]
    found.engine.served_name = MODEL
    return found


def job(id: str = "job-1", tenant: str = "acme", **more: Any) -> dict[str, Any]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "a secret question"}], "max_tokens": 8}
    return {"schema_version": 1, "id": id, "tenant": tenant, "endpoint": names.CHAT, "body": body, **more}


def record(
    value: dict[str, Any] | bytes,
    *headers: tuple[str, bytes | None],
    topic: str = JOBS,
    offset: int = 17,
    at: float | None = None,
) -> Record:
    raw = value if isinstance(value, bytes) else orjson.dumps(value)
    return Record(Place(topic, 4, offset), b"acme", raw, headers, int((time.time() if at is None else at) * 1000))


def signed(value: dict[str, Any] | bytes, signer: str = "acme", **claims: Any) -> tuple[str, bytes]:
    """The header that the client library writes for this value; `tenant`, `job_id`, `pool` say otherwise."""
    raw = value if isinstance(value, bytes) else orjson.dumps(value)
    said = orjson.loads(raw)
    wanted = {"tenant": said["tenant"], "job_id": said["id"], "pool": POOL, **claims}
    return names.H_AUTHORIZATION, SIGNERS[signer].job(value=raw, **wanted).encode()


def judge(intake: Intake, one: Record) -> Verdict:
    """Through the door whole, whatever it takes."""

    async def run() -> Any:
        found = intake.read(one, Ticket(one.place, 3))
        return await found.finish() if isinstance(found, Lookup) else found

    return asyncio.run(run())


def intake(mode: str, **more: Any) -> Intake:
    return Intake(settings(mode, **more), REGISTRY, Topics(), NoStore(), models={MODEL})
