"""A scheduler without event loop: the pure turns, a clock that is told the time, and an engine in the test's hands."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from schemas.tenants import Tenant, TenantLimits
from service.engine.protocol import Capacity, Prepared
from service.frames import Usage
from service.scheduler.admission import Admission
from service.scheduler.entry import Entry, Stage
from service.scheduler.turns import Turns
from service.settings import SchedulerSettings
from tests.unit.jobs import job


class Hall:
    """`prepared(entry)`: what the engine makes of a job; at once, unless `slow`."""

    def __init__(self, seqs: int = 4, reserved: int = 0, kv: int = 1_000_000, reserve: float = 0.0, **settings: Any):
        self.now = 1000.0
        self.tenants: dict[str, Tenant] = {}
        self.turns = Turns(self.tenants.get, SchedulerSettings(**settings))
        capacity = Capacity(
            max_model_len=100_000, max_num_seqs=seqs, kv_tokens=kv, block_size=1, model="m", version="1"
        )
        self.turns.resize(Admission(capacity, reserved, reserve))
        self.entries: list[Entry] = []
        self.rendering: list[Entry] = []
        self.started: list[Entry] = []  # in order
        self.slow = False
        self.offset = 0
        self.prepared: Callable[[Entry], Prepared] = lambda entry: Prepared(
            prompt_tokens=entry.job.body.get("prompt_tokens", 10),
            max_tokens=entry.job.body["max_tokens"],
            n=entry.job.body.get("n", 1),
        )
        self.on_start: Callable[[Entry], None] = lambda entry: None

    def tenant(self, name: str, weight: float = 1.0, order: str = "none", **limits: Any) -> None:
        self.tenants[name] = Tenant(id=name, weight=weight, order=order, limits=TenantLimits(**limits))  # type: ignore[arg-type]

    def put(self, tenant: str = "acme", tier: str = "standard", conversation: str | None = None, **body: Any) -> Entry:
        self.offset += 1
        one = job(self.offset, tenant=tenant, tier=tier, **body)
        one.conversation = conversation
        entry = Entry(one, time.time(), on_first=self.turns.begin)
        self.entries.append(entry)
        self.turns.arrive(entry, self.now)
        self.turns.put(entry, self.now)
        return entry

    def render(self, entry: Entry) -> None:
        if entry.stage is Stage.PICKED and entry.prepared is None:
            entry.prepared = self.prepared(entry)
            self.turns.meter.rendered(entry)

    def turn(self) -> list[Entry]:
        """One turn of the loop, as the scheduler makes it. Returns those that started."""
        started = []
        while True:
            self.rendering += self.turns.fill(self.now)
            if not self.slow:
                for entry in self.rendering:
                    self.render(entry)
                self.rendering.clear()
            before = len(started)
            for entry in self.turns.admit(self.now):
                started.append(entry)
                self.started.append(entry)
                entry.usage = Usage(prompt=entry.prepared.prompt_tokens if entry.prepared else 0)
                self.on_start(entry)
            if len(started) == before:
                return started

    def end(self, entry: Entry, output: int | None = None) -> None:
        assert entry.usage is not None and entry.prepared is not None
        entry.first_output()
        if output is not None:
            entry.usage.completion = output
        self.turns.release(entry, self.now)

    @property
    def running(self) -> list[Entry]:
        return list(self.turns.running.values())

    def check(self) -> None:
        """What must hold at any time, counted anew from the jobs themselves."""
        turns, admission = self.turns, self.turns.admission
        assert admission is not None
        waiting = [e for e in self.entries if e.stage not in (Stage.RUNNING, Stage.GONE)]
        running = self.running
        assert {id(e) for e in running} == {id(e) for e in self.entries if e.stage is Stage.RUNNING}
        claims = [e.claim for e in running if e.claim is not None]
        assert admission.jobs == len(running) == len(claims)
        assert admission.sequences == sum(c.sequences for c in claims)
        assert admission.tokens == sum(c.tokens for c in claims)
        assert admission._growth == sum(c.growth for c in claims)
        for name in {e.job.tenant for e in self.entries}:
            account = turns.accounts.find(name)
            assert account is not None
            own = [e for e in running if e.job.tenant == name]
            picked = [e for e in waiting if e.job.tenant == name and e.stage is Stage.PICKED]
            assert account.queued == sum(e.job.tenant == name for e in waiting)
            assert account.running == len(own) and account.picked == len(own) + len(picked)
            assert account.tokens == sum(e.claim.tokens for e in own if e.claim)
            assert account.expected == sum(e.expected for e in picked)
            assert {id(e) for e in account.parked} == {id(e) for e in picked if e.parked}
        held = [e.order for e in self.entries if e.order and e.stage in (Stage.QUEUED, Stage.PICKED, Stage.RUNNING)]
        assert len(held) == len(set(held)), "one at a time"
        for name, tier in turns.tiers.items():
            window = [e for e in waiting if e.tier == name and e.stage is Stage.PICKED]
            assert {id(e) for e in tier.window} == {id(e) for e in window}
            assert len(tier.queue) == sum(e.tier == name and e.stage is Stage.QUEUED for e in waiting)
            assert tier.parked == sum(e.parked for e in window)
            busy = [f for f in tier.queue.flows.values() if f.lane or f.busy]
            assert tier.queue.active == len(busy)
            assert abs(tier.queue.active_weight - sum(f.weight for f in busy)) < 1e-6
            for flow in tier.queue.flows.values():
                own = [e for e in running if e.flow is flow]
                assert flow.jobs == len(own)
                assert flow.sequences == sum(e.claim.sequences for e in own if e.claim)
                assert flow.ahead == sum(e.flow is flow and not e.parked for e in window)
                assert flow.busy == flow.jobs + sum(e.flow is flow for e in window)
                assert (flow in tier.waiting) == flow.waits
            assert list(tier.waiting.values()) == sorted(tier.waiting.values())

    def drain(self, limit: int = 10_000) -> None:
        """Runs everything to its end, with time passing."""
        self.slow = False
        while any(e.stage is not Stage.GONE for e in self.entries):
            self.turn()
            self.now += 1.0
            self.turns.survey(self.now, None)
            for entry in self.running:
                self.end(entry, 1)
            limit -= 1
            assert limit, "something waits for ever"
