"""Proves that one tenant's cached prompts never serve another, by what the engine itself counts. Pure but for `ask`.

A prompt that was never sent before is asked for twice by its owner: the second time it must come from the cache, or
the test would prove nothing. Then another tenant asks for the very same, and must find none of it. Both directions,
both endpoints, on one engine.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from schemas.errors import ErrorCode
from schemas.names import CHAT, COMPLETIONS
from schemas.tenants import Tenant

# A chat template may begin every prompt alike, so that a tenant finds that beginning of its own earlier jobs in the
# cache. It is short; what leaks is nearly the whole prompt.
TEMPLATE_SHARE = 0.5
CHARS_PER_TOKEN = 4
WORDS = (
    *("river", "mill", "stone", "water", "wheel", "gate", "lamp", "grain", "miller", "weir", "sack", "dawn", "leaf"),
    *("north", "cargo", "silver", "window", "garden", "letter", "market", "signal", "bridge", "copper", "harbour"),
)


@dataclass(frozen=True, slots=True)
class Answer:
    """How a job of one output token ended."""

    worker: str = ""
    prompt_tokens: int = 0
    cached: int = 0
    code: str | None = None  # error code; None = completed
    message: str = ""


class NoAnswer(Exception):
    """Nothing came back in time. One line: what that may mean."""


class Asker(Protocol):
    async def ask(self, tenant: Tenant, endpoint: str, prompt: str, **fields: Any) -> Answer:
        """One job; `fields` go into its body. Raises NoAnswer."""


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    ok: bool
    says: str
    endpoint: str = ""
    tenants: tuple[str, ...] = ()
    prompt_tokens: int = 0
    cached_tokens: int | None = None


@dataclass(slots=True)
class Outcome:
    checks: list[Check] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    workers: set[str] = field(default_factory=set)

    @property
    def ok(self) -> bool:
        return bool(self.checks) and all(check.ok for check in self.checks)


class CacheIsolation:
    """`run` once. `first` and `second` have different cache domains; `shared` are two of one domain, if there are."""

    def __init__(
        self,
        asker: Asker,
        first: Tenant,
        second: Tenant,
        shared: tuple[Tenant, Tenant] | None = None,
        *,
        prompt_tokens: int = 600,
    ) -> None:
        self._asker = asker
        self._first, self._second, self._shared = first, second, shared
        self._prompt_tokens = prompt_tokens
        self.outcome = Outcome()

    async def run(self) -> Outcome:
        """Raises NoAnswer; what was found until then is in `outcome`."""
        outcome = self.outcome
        for endpoint in (COMPLETIONS, CHAT):
            if not await self._direction(endpoint, self._first, self._second):
                continue
            await self._direction(endpoint, self._second, self._first)
            if self._shared is not None:
                await self._one_domain(endpoint, *self._shared)
            await self._own_salt(endpoint, self._first)
        if self._shared is None:
            outcome.notes.append("no two tenants share a cache domain: sharing was not tested")
        if len(outcome.workers) > 1:
            who = ", ".join(sorted(outcome.workers))
            self._add("one engine", False, f"several workers answered ({who}), so nothing is proved: run it again")
        return outcome

    async def _direction(self, endpoint: str, owner: Tenant, other: Tenant) -> bool:
        """Whether this endpoint can be tested."""
        prompt = unseen(self._prompt_tokens)
        new = await self._ask(owner, endpoint, prompt)
        if new.code is not None:
            if endpoint == CHAT and new.code == ErrorCode.INVALID_REQUEST and "template" in new.message:
                self.outcome.notes.append("the model has no chat template: chat was not tested")
            else:
                self._add("answer", False, f"a job of {owner.id} failed: {new.code}: {new.message}", endpoint, owner)
            return False
        again = await self._ask(owner, endpoint, prompt)
        allowed = 0 if endpoint == COMPLETIONS else int(TEMPLATE_SHARE * again.cached)
        if again.code is not None or not again.cached:
            says = (
                f"{again.code}: {again.message}"
                if again.code is not None
                else f"the same prompt of {again.prompt_tokens} tokens found nothing in the cache the second time, so "
                "nothing is proved: is prefix caching off, the KV cache full, or a block longer than that?"
            )
            self._add("own hit", False, says, endpoint, owner, answer=again)
            return False
        says = f"{again.cached} of {again.prompt_tokens} prompt tokens from the cache the second time"
        self._add("own hit", True, says, endpoint, owner, answer=again)
        if new.cached > allowed:
            says = f"a prompt that nobody had sent found {new.cached} tokens in the cache: nothing is proved"
            self._add("unseen prompt", False, says, endpoint, owner, answer=new)
        found = await self._ask(other, endpoint, prompt)
        if found.code is not None:
            self._add("isolated", False, f"{found.code}: {found.message}", endpoint, owner, other, answer=found)
        elif found.cached > allowed:
            says = f"LEAK: {other.id} was served {found.cached} tokens that {owner.id} had cached"
            self._add("isolated", False, says, endpoint, owner, other, answer=found)
        else:
            says = f"{other.id} found {found.cached or 'none'} of them"
            self._add("isolated", True, says, endpoint, owner, other, answer=found)
        return True

    async def _one_domain(self, endpoint: str, owner: Tenant, other: Tenant) -> None:
        prompt = unseen(self._prompt_tokens)
        await self._ask(owner, endpoint, prompt)
        found = await self._ask(other, endpoint, prompt)
        says = f"{other.id} found {found.cached} tokens of {owner.id}'s prompt; both have domain {owner.domain}"
        self._add("shared domain", found.cached > 0, says, endpoint, owner, other, answer=found)

    async def _own_salt(self, endpoint: str, tenant: Tenant) -> None:
        """A caller that may name its salt could name another's."""
        found = await self._ask(tenant, endpoint, "hello", cache_salt="chosen-by-the-caller")
        refused = found.code == ErrorCode.INVALID_REQUEST and "cache_salt" in found.message
        says = "refused" if refused else f"not refused as it must be: {found.code or 'completed'} {found.message}"
        self._add("caller's salt", refused, says, endpoint, tenant)

    async def _ask(self, tenant: Tenant, endpoint: str, prompt: str, **fields: Any) -> Answer:
        answer = await self._asker.ask(tenant, endpoint, prompt, **fields)
        if answer.worker and answer.code is None:
            self.outcome.workers.add(answer.worker)
        return answer

    def _add(
        self, name: str, ok: bool, says: str, endpoint: str = "", *tenants: Tenant, answer: Answer | None = None
    ) -> None:
        self.outcome.checks.append(
            Check(
                name=name,
                ok=ok,
                says=says,
                endpoint=endpoint,
                tenants=tuple(tenant.id for tenant in tenants),
                prompt_tokens=answer.prompt_tokens if answer is not None else 0,
                cached_tokens=answer.cached if answer is not None else None,
            )
        )


class Unsuitable(ValueError):
    """These tenants cannot be tested against each other. One line."""


def choose(tenants: Sequence[Tenant], wanted: Sequence[str], model: str) -> tuple[Tenant, Tenant]:
    """Two tenants of different cache domains: those that are wanted, else the first that may. Raises Unsuitable."""
    known = {tenant.id: tenant for tenant in tenants}
    if missing := [name for name in wanted if name not in known]:
        raise Unsuitable(f"tenant {missing[0]} is not in the registry ({', '.join(sorted(known)[:8])} …)")
    usable = [tenant for tenant in tenants if may_use(tenant, model)]
    if barred := [name for name in wanted if known[name] not in usable]:
        raise Unsuitable(f"tenant {barred[0]} is disabled, or may not use the model {model}")
    first = known[wanted[0]] if wanted else None
    for one in [first] if first is not None else usable:
        for other in [known[wanted[1]]] if len(wanted) > 1 else usable:
            if domain_of(other) != domain_of(one):
                return one, other
    if len(wanted) > 1:
        raise Unsuitable(f"{wanted[0]} and {wanted[1]} share a cache domain: name two that do not")
    raise Unsuitable("the registry has no two enabled tenants of different cache domains that may use this model")


def sharing(tenants: Sequence[Tenant], model: str) -> tuple[Tenant, Tenant] | None:
    """Two tenants that share a cache domain."""
    seen: dict[str, Tenant] = {}
    for tenant in tenants:
        if tenant.cache_domain is not None and may_use(tenant, model):
            if (other := seen.get(tenant.cache_domain)) is not None:
                return other, tenant
            seen[tenant.cache_domain] = tenant
    return None


def domain_of(tenant: Tenant) -> tuple[str, str]:
    """What the salt is made of: a domain that is named and a tenant's own never coincide, even if their names do."""
    return ("tenant", tenant.id) if tenant.cache_domain is None else ("domain", tenant.cache_domain)


def may_use(tenant: Tenant, model: str) -> bool:
    return tenant.enabled and (tenant.models is None or model in tenant.models)


def unseen(tokens: int) -> str:
    """A text of about so many tokens whose very beginning nobody has sent before."""
    word = random.SystemRandom().choice
    parts, length = [uuid.uuid4().hex], 32
    while length < tokens * CHARS_PER_TOKEN:
        parts.append(word(WORDS))
        length += len(parts[-1]) + 1
    return " ".join(parts)
