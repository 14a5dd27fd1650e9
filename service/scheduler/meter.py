"""What each job is charged, in three places at once: its tenant's fair share, its tenant's rate, the engine's room.

Predicted when it is picked, corrected when it is rendered, raised while it produces more than was expected, and settled
with what it used. Pure; called for jobs, and for those that run four times a second, never for tokens.
"""

from __future__ import annotations

from collections.abc import Iterable

from service.frames import Usage
from service.scheduler.admission import Admission, Claim
from service.scheduler.entry import Entry
from service.scheduler.prediction import Price
from service.scheduler.tier import Tier

# A job that has passed its prediction is expected to go on for so many tokens a choice, or this share of what it has.
STEP, STEP_SHARE = 64, 0.25


class Meter:
    def __init__(self, price: Price) -> None:
        self._price = price

    # -- a job's way

    def expect(self, entry: Entry) -> None:
        """Before it is rendered: by its size, and what its tenant's jobs were like."""
        assert entry.account is not None
        prediction = entry.account.prediction
        prompt = prediction.expected_prompt(entry.job.size)
        output = entry.demand.output(prediction.expected_output())
        entry.output = output
        entry.expected = entry.metered = prompt + output
        entry.cost = self._price.cost(prompt * (1.0 - prediction.cached), output)

    def rendered(self, entry: Entry) -> None:
        """Its prompt is counted now."""
        assert entry.prepared is not None and entry.account is not None
        entry.account.prediction.learn_prompt(entry.job.size, entry.prepared.prompt_tokens)
        expected = entry.prepared.prompt_tokens + entry.output
        entry.account.expected += expected - entry.expected
        entry.account.meter(expected - entry.metered)
        entry.expected = entry.metered = expected

    def withdrawn(self, entry: Entry, tier: Tier) -> None:
        """It was picked, and goes away without having been admitted: it pays nothing."""
        assert entry.account is not None
        entry.account.meter(-entry.metered)
        entry.metered = 0
        _correct(entry, tier, 0.0)

    def claim(self, entry: Entry, admission: Admission) -> Claim:
        assert entry.prepared is not None and entry.account is not None
        prediction = entry.account.prediction
        return admission.claim(entry.prepared, prediction.expected_output(), prediction.cached)

    def admitted(self, entry: Entry, tier: Tier) -> None:
        """Its cost by the rendered prompt, before the tier pays for it."""
        assert entry.prepared is not None and entry.account is not None
        fresh = entry.prepared.prompt_tokens * (1.0 - entry.account.prediction.cached)
        cost = self._price.cost(fresh, entry.output)
        _correct(entry, tier, cost)

    def settle(self, entry: Entry, tier: Tier) -> None:
        """It is over: what it used is what it pays, whatever became of it."""
        usage = entry.usage
        if usage is None or entry.flow is None or entry.account is None:
            return
        if entry.begun:
            entry.account.prediction.learn_cached(usage)
        entry.account.meter(usage.prompt + usage.completion - entry.metered)
        entry.metered = usage.prompt + usage.completion
        self._pay(entry, tier, self._price.of(usage))

    # -- while it runs

    def survey(self, running: Iterable[Entry], admission: Admission, tier_of: dict[str, Tier]) -> None:
        """What the running ones have produced so far."""
        for entry in running:
            claim, usage = entry.claim, entry.usage
            if claim is None or usage is None or not entry.begun:
                continue
            produced = usage.completion
            if produced > entry.output:
                self._overrun(entry, tier_of[entry.tier], usage)
            if produced >= claim.output:
                self._grow(entry, admission, claim, produced)
            admission.produced(claim, produced)

    def _overrun(self, entry: Entry, tier: Tier, usage: Usage) -> None:
        more = usage.completion - entry.output
        entry.output = usage.completion
        if entry.account is not None:
            entry.account.meter(more)
            entry.metered += more
        self._pay(entry, tier, entry.cost + self._price.cost(0, more))

    def _grow(self, entry: Entry, admission: Admission, claim: Claim, produced: int) -> None:
        prepared = entry.prepared
        if prepared is None or entry.flow is None or entry.account is None:
            return
        most = prepared.n * prepared.max_tokens
        more = admission.grow(claim, min(most, produced + max(STEP * prepared.n, int(produced * STEP_SHARE))))
        entry.flow.tokens += more
        entry.account.tokens += more

    @staticmethod
    def _pay(entry: Entry, tier: Tier, cost: float) -> None:
        tier.position += (cost - entry.cost) / tier.weight
        _correct(entry, tier, cost)


def _correct(entry: Entry, tier: Tier, cost: float) -> None:
    assert entry.flow is not None
    tier.queue.charge(entry.flow, cost - entry.cost)
    entry.cost = cost
