"""What one tenant has here and may have: limits on concurrency and rate, over which its jobs wait. Pure; has no clock.

A tenant's jobs of all tiers count together, those of one worker. Limits are read when a decision falls, so a change
holds for the next one. What fails instead of waiting is said here too, since it takes the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from schemas.errors import ErrorCode, Refusal
from schemas.tenants import TenantLimits
from service.scheduler.prediction import Prediction

MINUTE_S = 60.0
# Accounts that are kept before those of tenants without jobs are forgotten: what they were like is learnt again.
ACCOUNTS = 10_000


@dataclass(slots=True)
class Bucket:
    """Tokens that may be begun now: one minute's at most, less than none while more was used than expected."""

    level: float
    at: float  # monotonic

    def refill(self, per_minute: int, now: float) -> None:
        self.level = min(float(per_minute), self.level + (now - self.at) * per_minute / MINUTE_S)
        self.at = now


@dataclass(slots=True, eq=False)
class Account:
    """One tenant's counts. `picked` jobs are those that wait for the engine's next place, or run."""

    tenant: str
    queued: int = 0  # jobs that wait, wherever
    picked: int = 0
    expected: int = 0  # tokens that picked jobs which do not run are expected to claim
    running: int = 0
    tokens: int = 0  # claimed by those that run
    bucket: Bucket | None = None
    prediction: Prediction = field(default_factory=Prediction)
    blocked: dict[Any, Any] = field(default_factory=dict)  # flows without a turn → their tier
    parked: set[Any] = field(default_factory=set)  # picked jobs that must not start yet

    def may_pick(self, limits: TenantLimits, tokens: int, now: float) -> bool:
        """Whether one more job, expected to take so many tokens, may be picked. A tenant that has none gets one in."""
        if limits.running_jobs is not None and self.picked >= limits.running_jobs:
            return False
        most = limits.tokens_in_engine
        if most is not None and self.picked and self.tokens + self.expected + tokens > most:
            return False
        per_minute = limits.tokens_per_minute
        if per_minute is None:
            self.bucket = None
            return True
        if self.bucket is None:
            self.bucket = Bucket(float(per_minute), now)
        self.bucket.refill(per_minute, now)
        return self.bucket.level >= min(tokens, per_minute)

    def may_start(self, limits: TenantLimits, tokens: int) -> bool:
        """Whether a picked job may start, now that what it claims is known."""
        if limits.running_jobs is not None and self.running >= limits.running_jobs:
            return False
        most = limits.tokens_in_engine
        return most is None or not self.running or self.tokens + tokens <= most

    def meter(self, tokens: float) -> None:
        """Takes tokens from the rate; negative gives back."""
        if self.bucket is not None:
            self.bucket.level -= tokens


class Accounts:
    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}

    def of(self, tenant: str, now: float) -> Account:
        account = self._accounts.get(tenant)
        if account is None:
            if len(self._accounts) >= ACCOUNTS:
                self._sweep(now)
            account = self._accounts[tenant] = Account(tenant)
        return account

    def find(self, tenant: str) -> Account | None:
        return self._accounts.get(tenant)

    def __iter__(self) -> Any:
        return iter(self._accounts.values())

    def _sweep(self, now: float) -> None:
        """An empty bucket is full again after a minute; debts are at most as old as the job that made them."""
        for account in list(self._accounts.values()):
            bucket = account.bucket
            rested = bucket is None or (bucket.level >= 0 and now - bucket.at > MINUTE_S)
            if not account.queued and not account.picked and rested:
                del self._accounts[account.tenant]


def check_queue(limits: TenantLimits, queued: int) -> None:
    """Raises Refusal: `queued` jobs of the tenant wait already, and no more may."""
    if limits.queued_jobs is not None and queued >= limits.queued_jobs:
        raise Refusal(
            ErrorCode.QUOTA_EXCEEDED,
            f"{queued} jobs of this tenant wait already, its limit is {limits.queued_jobs}; "
            "publish the job again with run + 1 when some of them have ended",
        )


def check_room(limits: TenantLimits, prompt_tokens: int, n: int) -> None:
    """Raises Refusal for a job that would wait for ever, whatever it produces."""
    most = limits.tokens_in_engine
    if most is not None and prompt_tokens + n > most:
        raise Refusal(
            ErrorCode.QUOTA_EXCEEDED,
            f"the job needs {prompt_tokens + n} tokens in the engine at least, the limit of this tenant is {most}; "
            "shorten the prompt, or ask for fewer choices",
        )
