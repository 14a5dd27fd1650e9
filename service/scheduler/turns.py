"""Whose turn it is: all waiting jobs, and those that hold a place at the engine. Pure: no I/O, no clock.

    put ─▶ behind another job of its order key ─▶ queue of its tenant in its tier ──fill─▶ window ──admit─▶ running
                                                                                    │        ▲                 │
                                                                                    └ to be rendered   release ▼

Between tiers and between the tenants of a tier: start-time fair queueing, in cost tokens. `now` is monotonic seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from schemas.tenants import Tenant, TenantLimits
from service.job import Job, Place
from service.scheduler.admission import Admission, Claim
from service.scheduler.demand import Demand, likeness
from service.scheduler.entry import Entry, Stage
from service.scheduler.fair_queue import Flow
from service.scheduler.meter import Meter
from service.scheduler.order import Order, order_key
from service.scheduler.prediction import Price
from service.scheduler.quota import Account, Accounts
from service.scheduler.tier import WEIGHTS, Tier, WaitClock
from service.settings import SchedulerSettings

# Jobs of a tier that are rendered ahead of their turn: enough to keep the renderer busy, few enough that what is
# rendered is soon wanted. Newcomers that come before them are rendered too, up to so many times as many.
WINDOW, CROWD = 64, 4
# Steps of the engine's priority in one unit of virtual time (a cost token at weight 1).
FINE = 16
# What a job of the interactive tier may use of the reserve if its tenant has its share already.
INTERACTIVE_LIFT = 0.5

NO_LIMITS = TenantLimits()


class Turns:
    def __init__(self, tenant: Callable[[str], Tenant | None], settings: SchedulerSettings) -> None:
        self._tenant = tenant
        self._settings = settings
        self.fair = settings.policy == "fair"
        self.meter = Meter(Price(settings.prompt_cost, settings.output_cost))
        self.accounts = Accounts()
        self.order: Order[Entry] = Order()
        weights = WEIGHTS if self.fair else {"": 1.0}
        self.tiers = {name: Tier(name, weight) for name, weight in weights.items()}
        self.running: dict[Place, Entry] = {}
        self.admission: Admission | None = None
        self.clock = WaitClock()
        self._limited: set[Account] = set()  # with something that waits for a limit of its own
        self._root = 0.0  # virtual time among the tiers
        self._begun = 0.0  # the same, of what the engine has begun with
        self._number = 0

    # -- in

    def put(self, entry: Entry, now: float) -> None:
        """A job that may run as far as the clock is concerned."""
        entry.order = order_key(entry.job, self._tenant(entry.job.tenant))
        if entry.order is None or self.order.enter(entry.order, entry.job.place, entry):
            self._enqueue(entry, now)
        else:
            entry.stage = Stage.BEHIND

    def arrive(self, entry: Entry, now: float) -> None:
        """It is here, and counts; `put` follows when its time has come."""
        self._number += 1
        job = entry.job
        entry.number = self._number
        entry.demand = Demand.of(job)
        entry.tier = job.head.tier if self.fair else ""
        entry.account = self.accounts.of(job.tenant, now)
        entry.account.queued += 1

    def learn(self, job: Job, completion_tokens: int, n: int, now: float) -> None:
        """A job ended well; tokens of all its choices."""
        self.accounts.of(job.tenant, now).prediction.learn_output(completion_tokens // max(1, n))

    def retry(self, now: float) -> None:
        """Intake got on with earlier records of ordered keys."""
        for entry in self.order.retry():
            self._enqueue(entry, now)

    def _enqueue(self, entry: Entry, now: float) -> None:
        tier, job = self.tiers[entry.tier], entry.job
        if not tier.active:
            tier.position = max(tier.position, self._root)
        entry.stage = Stage.QUEUED
        if self.fair:
            alike = likeness(job) if entry.order is None else 0
            entry.flow = tier.queue.put(job.tenant, entry.number, entry, self._weight(job.tenant), alike)
        else:
            entry.flow = tier.queue.put("", entry.number, entry)
        tier.note(entry.flow, self.clock.at(now))

    # -- to the window

    def fill(self, now: float) -> list[Entry]:
        """Those that must be rendered now."""
        picked: list[Entry] = []
        for tier in self.tiers.values():
            if self.fair:
                for _, flow in tier.overdue(self.clock.at(now), self._settings.max_wait_s):
                    if not flow.ahead:
                        self._pick(tier, flow, now, picked, first=True)
            while (head := tier.queue.first()) is not None:
                full = len(tier.window) - tier.parked >= WINDOW
                if full and (len(tier.window) >= WINDOW * CROWD or head.start >= tier.window.last()):
                    break
                self._pick(tier, head, now, picked)
        return picked

    def _pick(self, tier: Tier, flow: Flow[Entry], now: float, picked: list[Entry], *, first: bool = False) -> None:
        """The flow's next job; or none, if its tenant is over a limit, until that may have changed."""
        number, entry = flow.lane.next()
        account = entry.account
        assert account is not None
        self.meter.expect(entry)
        weight = 1.0
        if self.fair:
            if not account.may_pick(self._limits(account.tenant), entry.expected, now):
                tier.queue.block(flow)
                account.blocked[flow] = tier
                self._limited.add(account)
                tier.note(flow, self.clock.at(now))
                return
            weight = self._weight(account.tenant)
        entry.start = tier.queue.take(flow, number, entry.cost, weight)
        account.meter(entry.metered)
        account.picked += 1
        account.expected += entry.expected
        entry.stage = Stage.PICKED
        tier.window.add(entry, first=first)
        picked.append(entry)

    # -- to the engine

    def admit(self, now: float) -> Iterator[Entry]:
        """Those that start now, one after the other."""
        admission = self.admission
        late = self._overdue(now) is not None  # nobody comes to be so meanwhile
        while admission is not None:
            entry = self._overdue(now) if late else None
            strict = entry is not None
            if entry is None:
                entry = self._next()
            if entry is None or self._must_wait_alone(entry):
                return
            claim = self.meter.claim(entry, admission)
            if self._park(entry, claim, now):
                continue
            # All wait for this one, else small jobs would overtake a large one for ever.
            if entry.crowded(self.running.values(), admission.most_sequences) or not admission.fits(claim):
                if not strict:
                    yield from self._urgent(admission, now)
                return
            entry.aged = strict
            self._start(entry, claim, admission, now)
            yield entry

    def _next(self) -> Entry | None:
        """By position among the tiers, then by start tag. One that is still being rendered keeps its claim."""
        found: tuple[float, Entry] | None = None
        for tier in self.tiers.values():
            if (found is None or tier.position < found[0]) and (entry := tier.window.ready()) is not None:
                found = (tier.position, entry)
        return None if found is None else found[1]

    def _overdue(self, now: float) -> Entry | None:
        """Whoever has waited too long since its tenant's last turn, or that of `bulk`: whatever its tag."""
        if not self.fair:
            return None
        age, first = self.clock.at(now), float("inf")
        found: Entry | None = None
        for tier in self.tiers.values():
            for since, flow in tier.overdue(age, self._settings.max_wait_s):
                if since < first and (entry := tier.window.ready(flow)) is not None:
                    first, found = since, entry
        if found is not None:
            return found
        bulk = self.tiers["bulk"]
        return bulk.window.ready() if bulk.waiting and age - bulk.served > self._settings.bulk_wait_s else None

    def _urgent(self, admission: Admission, now: float) -> Iterator[Entry]:
        """Past a job that waits for room, from the reserve: `interactive`, and tenants below their share."""
        if not self.fair or not admission.reserve_left:
            return
        for tier in self.tiers.values():
            if not tier.window.flows:
                continue
            least = INTERACTIVE_LIFT if tier.name == "interactive" else 0.0
            unit = self._share_of_one(tier)
            for flow in list(tier.window.flows):
                share = unit * flow.weight
                if flow.jobs and not least and flow.sequences + 1 > share * admission.most_sequences:
                    continue
                while (entry := tier.window.ready(flow)) is not None and not entry.suspect:
                    claim = self.meter.claim(entry, admission)
                    lift = 1.0 if admission.below(share, flow, claim) else least
                    if not lift or not admission.fits(claim, lift) or self._park(entry, claim, now):
                        break
                    self._start(entry, claim, admission, now)
                    yield entry

    def _must_wait_alone(self, entry: Entry) -> bool:
        """One that runs alone is the first and the only one (R11)."""
        return bool(self.running) and (entry.alone or next(iter(self.running.values())).alone)

    def _park(self, entry: Entry, claim: Claim, now: float) -> bool:
        """Now that it is rendered it turns out to be over a limit of its tenant: it waits, in nobody's way."""
        account, flow, tier = entry.account, entry.flow, self.tiers[entry.tier]
        assert account is not None and flow is not None
        if not self.fair or account.may_start(self._limits(account.tenant), claim.tokens):
            return False
        account.parked.add(entry)
        self._limited.add(account)
        entry.parked = True
        tier.parked += 1
        flow.ahead -= 1
        tier.note(flow, self.clock.at(now))
        return True

    def _start(self, entry: Entry, claim: Claim, admission: Admission, now: float) -> None:
        tier, flow, account = self.tiers[entry.tier], entry.flow, entry.account
        assert flow is not None and account is not None
        tier.window.remove(entry)
        self.meter.admitted(entry, tier)
        entry.root = tier.position
        if tier.position > self._root:
            self._root = tier.position
        tier.position += entry.cost / tier.weight
        if self.fair:  # where it stands among all that the engine may hold, tiers and tenants together
            ahead = entry.start - tier.queue.virtual_time
            if ahead < 0 or entry.aged:
                ahead = 0.0
            entry.priority = int(FINE * (self._begun + ahead * tier.queue.active_weight / tier.weight))
        admission.admit(claim)
        entry.claim = claim
        flow.ahead -= 1
        flow.jobs += 1
        flow.sequences += claim.sequences
        flow.tokens += claim.tokens
        account.queued -= 1
        account.expected -= entry.expected
        account.running += 1
        account.tokens += claim.tokens
        entry.stage = Stage.RUNNING
        self.running[entry.job.place] = entry
        tier.admitted(flow, self.clock.at(now))

    def begin(self, entry: Entry) -> None:
        """The engine's first output: virtual time moves on. Not by one that went out of turn: others lost nothing.

        Never past what waits: who came between its start and now would go before all that comes later, however long.
        """
        if not entry.aged:
            tier = self.tiers[entry.tier]
            tier.queue.begin(min(entry.start, tier.lowest()))
        if entry.root > self._begun:
            self._begun = entry.root

    # -- out

    def release(self, entry: Entry, now: float) -> None:
        """Its place at the engine is free, and it is over."""
        tier = self.tiers[entry.tier]
        self.begin(entry)
        self._vacate(entry)
        self.meter.settle(entry, tier)
        self._hand_on(entry, now)
        self._part(entry, tier, now)

    def requeue(self, entry: Entry, now: float) -> None:
        """From the engine back to the head of the window, to be rendered again: it had its turn already."""
        tier, flow, account = self.tiers[entry.tier], entry.flow, entry.account
        assert flow is not None and account is not None
        self._vacate(entry)
        tier.position -= entry.cost / tier.weight
        entry.usage = None
        entry.begun = False
        entry.stage = Stage.PICKED
        flow.ahead += 1
        account.queued += 1
        account.expected += entry.expected
        tier.window.add(entry, first=True)
        tier.note(flow, self.clock.at(now))

    def remove(self, entry: Entry, now: float) -> None:
        """It goes away without having started."""
        tier, flow, account = self.tiers[entry.tier], entry.flow, entry.account
        assert account is not None
        account.queued -= 1
        stage, entry.stage = entry.stage, Stage.GONE
        self._hand_on(entry, now)  # first: its tenant goes on waiting, with the next one
        if stage is Stage.QUEUED:
            assert flow is not None
            tier.queue.remove(flow, entry.number)
            tier.note(flow, self.clock.at(now))
        elif stage is Stage.PICKED:
            assert flow is not None
            tier.window.remove(entry)
            if entry.parked:
                self._unpark(entry)
            flow.ahead -= 1
            account.expected -= entry.expected
            self.meter.withdrawn(entry, tier)
            self._part(entry, tier, now)  # first: whom its limit held back goes on waiting in its stead
            tier.note(flow, self.clock.at(now))

    def _vacate(self, entry: Entry) -> None:
        flow, account, claim = entry.flow, entry.account, entry.claim
        assert flow is not None and account is not None and claim is not None and self.admission is not None
        del self.running[entry.job.place]
        self.admission.release(claim)
        entry.claim = None
        flow.jobs -= 1
        flow.sequences -= claim.sequences
        flow.tokens -= claim.tokens
        account.running -= 1
        account.tokens -= claim.tokens

    def _part(self, entry: Entry, tier: Tier, now: float) -> None:
        """A picked job is over: whom it kept waiting may go on."""
        flow, account = entry.flow, entry.account
        assert flow is not None and account is not None
        entry.stage = Stage.GONE
        account.picked -= 1
        tier.queue.done(flow)
        self._free(account, now)

    def _hand_on(self, entry: Entry, now: float) -> None:
        if entry.order is not None:
            following = self.order.leave(entry.order, entry)
            if following is not None:
                self._enqueue(following, now)

    # -- limits and growth

    def survey(self, now: float, kv_usage: float | None) -> None:
        """Several times a second: what runs has grown, rates have room again, limits may have changed."""
        if self.admission is not None:
            self.meter.survey(self.running.values(), self.admission, self.tiers)
            if kv_usage is not None:
                self.admission.measure(kv_usage)
        for account in list(self._limited):
            self._free(account, now)

    def _free(self, account: Account, now: float) -> None:
        """Whatever waits for a limit of this tenant is looked at again."""
        if account not in self._limited:
            return
        self._limited.discard(account)
        for entry in list(account.parked):
            self._unpark(entry)
            assert entry.flow is not None
            self.tiers[entry.tier].note(entry.flow, self.clock.at(now))
        for flow, tier in account.blocked.items():
            tier.queue.unblock(flow)
            tier.note(flow, self.clock.at(now))
        account.blocked.clear()

    def _unpark(self, entry: Entry) -> None:
        assert entry.account is not None and entry.flow is not None
        entry.account.parked.discard(entry)
        entry.parked = False
        self.tiers[entry.tier].parked -= 1
        entry.flow.ahead += 1

    def resize(self, admission: Admission) -> None:
        """A rebuilt engine may have another capacity; what runs keeps its claims."""
        for entry in self.running.values():
            if entry.claim is not None:
                admission.admit(entry.claim)
        self.admission = admission

    # -- what they go by

    def share(self, tier: Tier, flow: Flow[Entry]) -> float:
        """The part of the engine that is due to a tenant now, by the weights of tiers and tenants with jobs here."""
        return flow.weight * self._share_of_one(tier)

    def _share_of_one(self, tier: Tier) -> float:
        """That of a tenant with weight 1."""
        return tier.weight / (sum(t.weight for t in self.tiers.values() if t.active) * tier.queue.active_weight)

    def _weight(self, tenant: str) -> float:
        """1 for one that left the registry while its jobs were here."""
        found = self._tenant(tenant)
        return found.weight if found is not None else 1.0

    def _limits(self, tenant: str) -> TenantLimits:
        found = self._tenant(tenant)
        return found.limits if found is not None else NO_LIMITS
