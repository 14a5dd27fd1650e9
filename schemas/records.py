"""What the service keeps of jobs beside their events: status, usage and cancels. Operators' topics, not callers'."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from schemas.blob import BlobRef
from schemas.events import Ulid, Usage
from schemas.fields import Asked, Count, JobId, Place, Run, Sha256, TenantId, Time, Written

Seconds = Annotated[float, Field(ge=0)]
# Identity as it was answered: a refused job may carry a tenant that does not exist, or none.
AnsweredTenant = Annotated[str, Field(max_length=128)]


class StatusRecord(Written):
    """How a job ended. What a new owner of the partition reads to settle ended jobs (R4) and to answer copies (R7).

    Key: `tenant|job id|run`, but `origin` for a `repeat`, so that compaction leaves the job's own; the partition's
    number is that of the job's record.
    """

    schema_version: Literal[1] = 1
    tenant: AnsweredTenant
    job_id: Annotated[str, Field(max_length=128)]
    run: Run
    kind: Literal["completed", "failed", "cancelled", "expired", "dead", "undeliverable", "moved"]
    attempt: Ulid | None = Field(default=None, description="the attempt that counts; billing follows it (R6)")
    origin: str = Field(description="topic/partition/offset of the record's first place", pattern=r"^[^/]+/\d+/\d+$")
    place: str | None = Field(
        default=None,
        description="the record's last place, if it was moved: what this ends there",
        pattern=r"^[^/]+/\d+/\d+$",
    )
    digest: Sha256 | Literal[""] = Field(description="SHA-256 of the job's content, run left out; empty if not JSON")
    usage: Usage | None = None
    code: str | None = Field(default=None, description="error code of failed, dead and undeliverable")
    terminal: Place | None = Field(default=None, description="where the terminal event lies")
    output: BlobRef | None = None
    at: Time
    repeat: bool = Field(
        default=False,
        description="a further record of a job: answered from the first (same attempt), refused, or stopped by itself",
    )


class UsageRecord(Written):
    """What one attempt cost. Key: tenant. Billing counts the attempts that status records name."""

    schema_version: Literal[1] = 1
    tenant: AnsweredTenant
    job_id: Annotated[str, Field(max_length=128)]
    run: Run
    attempt: Ulid
    model: str
    tier: str
    endpoint: str | None = None
    kind: Literal["completed", "failed", "cancelled", "expired", "abandoned"]
    prompt_tokens: Count
    completion_tokens: Count
    cached_tokens: Count
    reasoning_tokens: Count = 0
    queued_s: Seconds = Field(description="received → accepted by the engine")
    running_s: Seconds = Field(description="accepted by the engine → ended")
    at: Time


class CancelRecord(Asked):
    """A wish to stop a job. Key: `tenant|job id`. Hits records whose broker time is not later than its own (R13)."""

    model_config = ConfigDict(json_schema_extra={"dependentRequired": {"run": ["job_id"]}})

    schema_version: Literal[1] = 1
    tenant: TenantId
    job_id: JobId | None = Field(default=None, description="left out: all of the tenant; the key is then `tenant|`")
    run: Run | None = Field(default=None, description="left out: all runs published so far")
    reason: Annotated[str, Field(max_length=512)] | None = None
    at: Time | None = None

    @model_validator(mode="after")
    def _run_of_a_job(self) -> Self:
        if self.run is not None and self.job_id is None:
            raise ValueError("run needs a job_id")
        return self


def status_key(tenant: str, job_id: str, run: int) -> bytes:
    """Record key on the status topic: compaction keeps the last status of each (tenant, id, run)."""
    return f"{tenant}|{job_id}|{run}".encode()


def cancel_key(tenant: str, job_id: str | None) -> bytes:
    """Record key on `inference.cancel`; without a job id, of a cancel of the whole tenant."""
    return f"{tenant}|{job_id or ''}".encode()
