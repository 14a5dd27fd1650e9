"""The self-test finds a leak, and does not call proved what is not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from schemas.names import CHAT, COMPLETIONS
from schemas.tenants import Tenant
from service.selftest import (
    Answer,
    CacheIsolation,
    NoAnswer,
    Outcome,
    Unsuitable,
    choose,
    domain_of,
    sharing,
    unseen,
)

ACME, GLOBEX = Tenant(id="acme"), Tenant(id="globex")
LEFT, RIGHT = Tenant(id="left", cache_domain="both"), Tenant(id="right", cache_domain="both")
BLOCK = 16
TEMPLATE = "system: you are helpful. " * 4  # 100 characters before every chat, 25 tokens


class Cache:
    """An engine of four characters a token whose prefix cache is split by `salt`."""

    def __init__(
        self, salt: Callable[[Tenant], Any] = domain_of, *, on: bool = True, salts_refused: bool = True
    ) -> None:
        self._salt, self._on, self._salts_refused = salt, on, salts_refused
        self._blocks: dict[Any, set[str]] = defaultdict(set)
        self.worker: Callable[[Tenant], str] = lambda tenant: "w1"
        self.chat = True
        self.asked = 0

    async def ask(self, tenant: Tenant, endpoint: str, prompt: str, **fields: Any) -> Answer:
        self.asked += 1
        if endpoint == CHAT and not self.chat:
            return Answer(code="invalid_request", message="the model has no chat template")
        if "cache_salt" in fields and self._salts_refused:
            return Answer(code="invalid_request", message="body.cache_salt is not a field of a request")
        text = (TEMPLATE if endpoint == CHAT else "") + prompt
        heads = [text[:end] for end in range(4 * BLOCK, len(text), 4 * BLOCK)]
        seen = self._blocks[self._salt(tenant)]
        found = sum(head in seen for head in heads) if self._on else 0
        seen.update(heads)
        return Answer(self.worker(tenant), len(text) // 4, found * BLOCK)


async def outcome_of(cache: Cache, *, shared: tuple[Tenant, Tenant] | None = (LEFT, RIGHT)) -> Outcome:
    return await CacheIsolation(cache, ACME, GLOBEX, shared).run()


def failed(outcome: Outcome) -> list[str]:
    return [check.name for check in outcome.checks if not check.ok]


async def test_an_isolated_cache_passes_in_both_directions_on_both_endpoints() -> None:
    cache = Cache()
    await cache.ask(ACME, CHAT, "earlier jobs of the same tenants")
    await cache.ask(GLOBEX, CHAT, "have left the template's beginning in the cache")
    outcome = await outcome_of(cache)
    assert outcome.ok and not outcome.notes
    isolated = [(check.endpoint, check.tenants) for check in outcome.checks if check.name == "isolated"]
    pairs = [("acme", "globex"), ("globex", "acme")]
    assert isolated == [(endpoint, pair) for endpoint in (COMPLETIONS, CHAT) for pair in pairs]
    assert [check.name for check in outcome.checks].count("shared domain") == 2


async def test_a_cache_without_salts_is_a_leak() -> None:
    outcome = await outcome_of(Cache(salt=lambda tenant: None))
    assert not outcome.ok and failed(outcome) == ["isolated"] * 4
    assert "LEAK: globex was served" in next(check.says for check in outcome.checks if not check.ok)


async def test_a_leak_in_one_direction_alone_is_found() -> None:
    class OneWay(Cache):
        async def ask(self, tenant: Tenant, endpoint: str, prompt: str, **fields: Any) -> Answer:
            answer = await super().ask(tenant, endpoint, prompt, **fields)
            if tenant is GLOBEX:  # also enters what it asked for under acme's salt
                self._blocks[domain_of(ACME)] |= self._blocks[domain_of(GLOBEX)]
            return answer

    outcome = await outcome_of(OneWay())
    assert [check.tenants for check in outcome.checks if not check.ok] == [("globex", "acme")] * 2


async def test_a_cache_that_is_off_proves_nothing() -> None:
    outcome = await outcome_of(Cache(on=False))
    assert not outcome.ok and failed(outcome) == ["own hit", "own hit"]
    assert "nothing is proved" in outcome.checks[0].says


async def test_tenants_of_one_domain_that_do_not_share_are_told() -> None:
    outcome = await outcome_of(Cache(salt=lambda tenant: tenant.id))
    assert failed(outcome) == ["shared domain"] * 2


async def test_without_a_shared_domain_that_is_said() -> None:
    outcome = await outcome_of(Cache(), shared=None)
    assert outcome.ok and outcome.notes == ["no two tenants share a cache domain: sharing was not tested"]


async def test_a_callers_salt_that_is_taken_is_a_failure() -> None:
    outcome = await outcome_of(Cache(salts_refused=False))
    assert failed(outcome) == ["caller's salt"] * 2


async def test_two_workers_prove_nothing() -> None:
    cache = Cache()
    cache.worker = lambda tenant: f"worker of {tenant.id}"
    outcome = await outcome_of(cache)
    assert failed(outcome) == ["one engine"]


async def test_a_model_without_chat_is_tested_by_completions() -> None:
    cache = Cache()
    cache.chat = False
    outcome = await outcome_of(cache)
    assert outcome.ok and outcome.notes == ["the model has no chat template: chat was not tested"]


async def test_a_worker_that_does_not_answer_leaves_what_was_found() -> None:
    class Dying(Cache):
        async def ask(self, tenant: Tenant, endpoint: str, prompt: str, **fields: Any) -> Answer:
            if self.asked == 4:
                raise NoAnswer("no worker answered")
            return await super().ask(tenant, endpoint, prompt, **fields)

    test = CacheIsolation(Dying(), ACME, GLOBEX)
    with pytest.raises(NoAnswer):
        await test.run()
    assert [check.name for check in test.outcome.checks] == ["own hit", "isolated"]


async def test_a_job_that_fails_is_told_with_its_error() -> None:
    class Refusing(Cache):
        async def ask(self, tenant: Tenant, endpoint: str, prompt: str, **fields: Any) -> Answer:
            return Answer(code="model_not_found", message="not served here")

    outcome = await outcome_of(Refusing())
    assert not outcome.ok and "model_not_found: not served here" in outcome.checks[0].says


# -- the choice of tenants


def test_tenants_are_chosen_of_different_domains() -> None:
    off, elsewhere = Tenant(id="off", enabled=False), Tenant(id="elsewhere", models=["other"])
    everybody = [off, elsewhere, LEFT, RIGHT, ACME]
    assert choose(everybody, [], "m") == (LEFT, ACME)
    assert choose(everybody, ["acme"], "m") == (ACME, LEFT)
    assert choose(everybody, ["right", "acme"], "m") == (RIGHT, ACME)
    assert sharing(everybody, "m") == (LEFT, RIGHT) and sharing([LEFT, ACME, GLOBEX], "m") is None


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        (["nobody"], "not in the registry"),
        (["off"], "disabled"),
        (["left", "right"], "share a cache domain"),
    ],
)
def test_tenants_that_cannot_be_tested_are_refused(wanted: list[str], says: str) -> None:
    with pytest.raises(Unsuitable, match=says):
        choose([Tenant(id="off", enabled=False), LEFT, RIGHT, ACME], wanted, "m")
    with pytest.raises(Unsuitable, match="no two enabled tenants"):
        choose([LEFT, RIGHT], [], "m")


def test_a_named_domain_is_not_the_tenant_of_that_name() -> None:
    assert domain_of(Tenant(id="acme")) != domain_of(Tenant(id="x", cache_domain="acme"))


def test_a_prompt_is_unseen_and_about_as_long_as_asked() -> None:
    first, second = unseen(600), unseen(600)
    assert first[:8] != second[:8] and 2400 <= len(first) < 2420
