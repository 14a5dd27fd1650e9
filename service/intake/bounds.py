"""A tenant's bounds on tokens, which are known only once a job is rendered. Decides nothing else about a job."""

from __future__ import annotations

from typing import Protocol

from schemas.errors import ErrorCode, Refusal
from schemas.tenants import Tenant
from service.engine.protocol import Prepared
from service.job import Job


class Rendering(Protocol):
    async def prepare(self, job: Job) -> Prepared: ...


class Registry(Protocol):
    def get(self, tenant: str) -> Tenant | None: ...


class Bounds:
    """The engine's `prepare` for the scheduler, with the tenant's bounds on what came of it."""

    def __init__(self, engine: Rendering, tenants: Registry) -> None:
        self._engine = engine
        self._tenants = tenants

    async def prepare(self, job: Job) -> Prepared:
        """Raises Refusal, also with `quota_exceeded`; EngineLost."""
        prepared = await self._engine.prepare(job)
        tenant = self._tenants.get(job.tenant)
        most = tenant.limits.prompt_tokens if tenant is not None else None
        if most is not None and prepared.prompt_tokens > most:
            raise Refusal(
                ErrorCode.QUOTA_EXCEEDED,
                f"the prompt has {prepared.prompt_tokens} tokens, the limit of this tenant is {most}; shorten it",
            )
        return prepared
