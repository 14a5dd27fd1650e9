"""What is known of a record's sender: a proof, or a doubt with its reason. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from schemas.errors import ErrorCode, Refusal


class Reason(StrEnum):
    """Why a sender is not believed; a label of the metric."""

    NO_TOKEN = "no_token"
    BAD_TOKEN = "bad_token"  # not a JWT with EdDSA, or without a claim that it must have
    UNKNOWN_KEY = "unknown_key"
    SIGNATURE = "signature"
    EXPIRED = "expired"
    NOT_YET = "not_yet"
    LIFE = "life"  # made to live longer than allowed
    AUDIENCE = "audience"
    CONTENT = "content"  # the token is of another record
    TENANT = "tenant"  # the record names another tenant than the sender's
    JOB = "job"  # the token is of another job
    TOPIC = "topic"  # a topic that proves nobody, where one must
    SEAL = "seal"  # the service's own mark is missing or forged


@dataclass(frozen=True, slots=True)
class Proof:
    """`tenant`: whose record it is; None: whoever it says, since the service vouches for it or everybody is trusted.

    `job_id`: the only one that the record may name, where a token says so. `by_topic`: the topic says whose it is.
    `sealed`: the mark of a copy is on it.
    """

    tenant: str | None = None
    job_id: str | None = None
    by_topic: bool = False
    sealed: bool = False

    def doubt(self, tenant: str, job_id: str) -> Doubt | None:
        """Whether the record's own words fit: the tenant and the job that it names."""
        if self.tenant is not None and tenant != self.tenant:
            if self.by_topic:
                message = "tenant is another one than the topic's; a tenant's topic takes its own jobs only"
                return Doubt(Reason.TENANT, message, sender=self.tenant)
            return Doubt(Reason.TENANT, "tenant is another one than the token's; sign with a key of that tenant")
        if self.job_id is not None and job_id != self.job_id:
            return Doubt(Reason.JOB, "id is another one than the token's; sign the job that you publish")
        return None


class Doubt(Refusal):
    """The sender is not believed. `message` echoes nothing of the record.

    `sender`: whose record it is all the same, where that is known: who wrote it can be told, as whom it is.
    """

    def __init__(
        self,
        reason: Reason,
        message: str,
        code: ErrorCode = ErrorCode.NOT_AUTHORIZED,
        *,
        sender: str | None = None,
    ) -> None:
        super().__init__(code, message)
        self.reason = reason
        self.sender = sender
