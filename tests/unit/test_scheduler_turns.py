"""Random lives of many jobs, and what must hold in all of them."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from service.scheduler.entry import Entry, Stage
from tests.unit.turns_kit import Hall

MAX_WAIT_S, BULK_WAIT_S = 60.0, 20.0
TENANTS = ("plain", "heavy", "one", "few", "rate", "talks", "strict")
SLOTS, RESERVED = 8, 2


class Lives(RuleBasedStateMachine):
    """Tenants with all kinds of limits and order modes on one small engine."""

    def __init__(self) -> None:
        super().__init__()
        self.hall = hall = Hall(
            seqs=SLOTS, reserved=RESERVED, kv=2000, reserve=0.1, max_wait_s=MAX_WAIT_S, bulk_wait_s=BULK_WAIT_S
        )
        hall.tenant("plain")
        hall.tenant("heavy", weight=4)
        hall.tenant("one", running_jobs=1)
        hall.tenant("few", tokens_in_engine=300)
        hall.tenant("rate", tokens_per_minute=600)
        hall.tenant("talks", order="conversation")
        hall.tenant("strict", order="tenant")
        hall.on_start = self.check_start
        self.away = False
        self.clock = 0.0
        self.since: dict[tuple[str, str], float] = {}  # when each tenant of a tier had its last turn, or began to wait
        self.spent: list[tuple[float, int]] = []  # by the tenant `rate`: when, tokens

    # -- what happens

    @rule(
        tenant=st.sampled_from(TENANTS),
        tier=st.sampled_from(("interactive", "standard", "bulk")),
        count=st.integers(1, 6),
        n=st.sampled_from([1, 1, 1, 2, 5]),
        prompt=st.integers(1, 150),
        output=st.sampled_from([1, 20, 100]),
        talk=st.sampled_from([None, "x", "y"]),
    )
    def jobs_come(self, tenant: str, tier: str, count: int, n: int, prompt: int, output: int, talk: str | None) -> None:
        for _ in range(count):
            self.hall.put(tenant, tier, talk, n=n, prompt_tokens=prompt, max_tokens=output)
        self.note()

    @precondition(lambda self: not self.away)
    @rule()
    def the_loop_turns(self) -> None:
        self.hall.turn()
        self.note()

    @rule(seconds=st.sampled_from([0.1, 1.0, 7.0, 30.0]))
    def time_passes(self, seconds: float) -> None:
        self.hall.now += seconds
        self.clock += 0.0 if self.away else seconds
        self.hall.turns.survey(self.hall.now, None)
        self.note()

    @rule()
    def the_engine_goes_or_comes_back(self) -> None:
        """While it is away nothing is admitted: nobody ages by it."""
        if self.away:
            self.hall.turns.clock.unhold(self.hall.now)
        else:
            self.hall.turns.clock.hold(self.hall.now)
        self.away = not self.away

    @rule()
    def renderers_are_slow_or_fast(self) -> None:
        self.hall.slow = not self.hall.slow

    @precondition(lambda self: self.hall.running)
    @rule(data=st.data(), factor=st.sampled_from([0.0, 0.3, 1.0]))
    def one_ends(self, data: st.DataObject, factor: float) -> None:
        entry = data.draw(st.sampled_from(self.hall.running))
        assert entry.prepared is not None
        self.hall.end(entry, int(entry.prepared.n * entry.prepared.max_tokens * factor))
        self.note()

    @precondition(lambda self: self.hall.running)
    @rule(data=st.data(), factor=st.sampled_from([0.1, 0.9]))
    def one_gets_on(self, data: st.DataObject, factor: float) -> None:
        entry = data.draw(st.sampled_from(self.hall.running))
        assert entry.prepared is not None and entry.usage is not None
        entry.first_output()
        entry.usage.completion = int(entry.prepared.n * entry.prepared.max_tokens * factor)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def one_goes_away(self, data: st.DataObject) -> None:
        self.hall.turns.remove(data.draw(st.sampled_from(self.waiting)), self.hall.now)
        self.note()

    @precondition(lambda self: self.hall.running)
    @rule()
    def the_engine_is_lost(self) -> None:
        for entry in self.hall.running:
            self.hall.turns.requeue(entry, self.hall.now)
            entry.prepared = None
            self.hall.rendering.append(entry)
        self.note()

    @rule(jobs=st.sampled_from([1, 2, None]), tokens=st.sampled_from([200, 400]))
    def limits_change(self, jobs: int | None, tokens: int) -> None:
        self.hall.tenant("one", running_jobs=jobs)
        self.hall.tenant("few", tokens_in_engine=tokens)

    # -- what must hold

    @property
    def waiting(self) -> list[Entry]:
        return [e for e in self.hall.entries if e.stage not in (Stage.RUNNING, Stage.GONE)]

    def may_start(self, entry: Entry) -> bool:
        return entry.stage is Stage.PICKED and entry.prepared is not None and not entry.parked

    def waits(self, entry: Entry) -> bool:
        """It could have its turn, for all that its tenant's own limits and order say."""
        blocked = entry.flow is not None and entry.flow.blocked
        return (entry.stage is Stage.QUEUED and not blocked) or (entry.stage is Stage.PICKED and not entry.parked)

    def note(self) -> None:
        """Counts anew who waits since when; not the scheduler's own book."""
        now = self.clock
        waits = {(e.tier, e.job.tenant) for e in self.hall.entries if self.waits(e)}
        self.since = {key: self.since.get(key, now) for key in waits}

    def check_start(self, entry: Entry) -> None:
        """Called for each job that starts, with it started and nothing else done."""
        hall, turns = self.hall, self.hall.turns
        assert turns.admission is not None and entry.claim is not None
        name, n = entry.job.tenant, entry.claim.sequences
        own = [e for e in hall.running if e.job.tenant == name]
        limits = hall.tenants[name].limits
        assert limits.running_jobs is None or len(own) <= limits.running_jobs
        claimed = sum(e.claim.tokens for e in own if e.claim is not None)
        assert limits.tokens_in_engine is None or claimed <= limits.tokens_in_engine or len(own) == 1
        if name == "rate":
            self.spent.append((hall.now, entry.metered))
        # Whoever has waited too long goes first. A job of another tenant's may start only if none of those could.
        now = self.clock - 1e-6
        late = {key for key, since in self.since.items() if now - since > MAX_WAIT_S}
        ready = {(e.tier, e.job.tenant) for e in hall.entries if self.may_start(e)}
        key = (entry.tier, name)
        assert key in late or not late & ready, "the ageing bound"
        # The reserve: beyond the ordinary slots only `interactive` and those below their share.
        sequences = turns.admission.sequences
        assert sequences <= SLOTS or len(hall.running) == 1
        if sequences > SLOTS - RESERVED and len(hall.running) > 1:
            mine = [e for e in hall.running if e.flow is entry.flow]
            assert entry.flow is not None
            share = turns.share(turns.tiers[entry.tier], entry.flow) * turns.admission.most_sequences
            held = sum(e.claim.sequences for e in mine if e.claim is not None)
            below = len(mine) == 1 or held <= share + 1e-9
            assert below or (entry.tier == "interactive" and sequences <= SLOTS - RESERVED / 2), "the reserve"
        assert n <= SLOTS or len(hall.running) == 1
        self.since[key] = now

    @invariant()
    def all_counts_are_right(self) -> None:
        self.hall.check()

    @invariant()
    def order_is_kept(self) -> None:
        """Of a key, whoever waits behind another one came after it."""
        for key in {e.order for e in self.hall.entries if e.order}:
            own = [e for e in self.hall.entries if e.order == key and e.stage is not Stage.GONE]
            front = [e for e in own if e.stage is not Stage.BEHIND]
            assert len(front) <= 1 and (not own or front), "one goes, and one does go"

    def teardown(self) -> None:
        """Nothing is lost: with limits as they are, all that is here ends."""
        self.hall.on_start = lambda entry: None
        self.hall.turns.clock.unhold(self.hall.now)
        self.hall.drain()
        self.hall.check()
        admission = self.hall.turns.admission
        assert admission is not None and admission.sequences == 0
        assert not len(self.hall.turns.order)


Lives.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestLives = Lives.TestCase
