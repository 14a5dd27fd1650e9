"""The worker's Prometheus metrics. Owns the families, their labels and what is counted; opens no port and keeps no job.

Counters and histograms are fed once per job, never per token. What other rooms know anyway (queues, ledger, lease …)
is read when somebody scrapes: `Readings`. vLLM keeps its own families in the process's default registry; `render` shows
both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from prometheus_client import (
    REGISTRY,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from schemas.names import TIERS
from service.frames import Ended, Error, Head, Pressure, Timing, Usage
from service.settings import Settings
from service.telemetry.families import (
    BACKLOG,
    CANCELS,
    COMMIT_FAILURES,
    COMMITS,
    COMPLETE,
    CONTEXT,
    DEAD_LETTERS,
    DEFERRED,
    DELIVERY,
    DELIVERY_UP,
    DUPLICATES,
    DURATION,
    ENGINE_FIRST_TOKEN,
    ENGINE_INFO,
    ENGINE_RUNNING,
    ENGINE_WAITING,
    ERRORS,
    FIRST_TOKEN,
    HELD,
    JOBS,
    KV_BLOCK,
    KV_TOKENS,
    KV_USAGE,
    LAG,
    LEASE,
    LOOP_LAG,
    OLDEST,
    PARTITIONS,
    PER_TOKEN,
    PREEMPTIONS,
    QUEUED,
    REBALANCES,
    REBUILDS,
    RECEIVED,
    REPLY_BYTES,
    REPLY_CHUNKS,
    RESTARTS,
    RUNNING,
    SCHEDULER_SECONDS,
    SLOTS,
    SPILLED,
    STEP_AGE,
    STORED,
    TENANT_RUNNING,
    TENANT_SHARE,
    TENANT_WAITING,
    TENANTS_REFUSED,
    TIMED,
    TOKENS,
    UNACKNOWLEDGED,
    UNFINISHED,
    UNVERIFIED,
    WAITING,
    WAITS,
    Family,
)

WAIT_REASONS = ("capacity", "quota", "order", "not_before", "engine")
OTHER = "other"  # the tenant label of everybody who is not on the allow list


class EngineReport(Protocol):
    """What an engine said of itself when it had started (service/engine/protocol.py: Capacity)."""

    @property
    def max_model_len(self) -> int: ...
    @property
    def max_num_seqs(self) -> int: ...
    @property
    def kv_tokens(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def model(self) -> str: ...
    @property
    def version(self) -> str: ...


@dataclass(slots=True)
class Readings:
    """What the worker's rooms know of themselves at the moment of a scrape. Counts are totals since the start."""

    running: int = 0
    waiting: int = 0
    timed: int = 0
    oldest: Mapping[str, float] = field(default_factory=dict)  # tier → seconds
    waits: Mapping[str, int] = field(default_factory=dict)  # reason → jobs
    standings: Iterable[tuple[str, str, int, int, float]] = ()  # tier, tenant, running, waiting, share due to it
    scheduler_seconds: float = 0.0
    holds: Iterable[str] = ()  # reasons why nothing is admitted
    engine_running: int = 0
    engine_waiting: int = 0
    kv_usage: float = 0.0  # 0..1
    preemptions: int = 0
    capacity: EngineReport | None = None  # None until the engine has started
    step_age: float = 0.0  # seconds
    rebuilds: int = 0
    received: int = 0  # records
    tenants_refused: int = 0
    partitions: Mapping[tuple[str, int], tuple[int, int]] = field(default_factory=dict)  # → (lag, unfinished) records
    commits: int = 0
    commit_failures: int = 0
    rebalances: int = 0
    lease_left: float = 0.0  # seconds
    delivery_up: bool = False
    delivery_restarts: int = 0


@dataclass(frozen=True, slots=True)
class _Series:
    """What one attempt feeds, looked up once per set of labels: the look-up costs more than the count."""

    jobs: Counter
    input: Counter
    cached: Counter
    output: Counter
    first_token: Histogram
    engine_first_token: Histogram
    per_token: Histogram
    backlog: Histogram
    queued: Histogram
    duration: Histogram


class Metrics:
    """One per worker. All methods are cheap and for one thread, but `render`, which any thread may call."""

    def __init__(self, settings: Settings) -> None:
        self._tenants = frozenset(settings.telemetry.tenant_labels)
        # A second series for each counter, which nobody reads; vLLM's too.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._jobs = self._counter(JOBS)
        self._complete = self._counter(COMPLETE)
        self._errors = self._counter(ERRORS)
        self._tokens = self._counter(TOKENS)
        self._first_token = self._histogram(FIRST_TOKEN)
        self._engine_first_token = self._histogram(ENGINE_FIRST_TOKEN)
        self._per_token = self._histogram(PER_TOKEN)
        self._backlog = self._histogram(BACKLOG)
        self._queued = self._histogram(QUEUED)
        self._duration = self._histogram(DURATION)
        self._reply_bytes = self._counter(REPLY_BYTES)
        self._reply_chunks = self._counter(REPLY_CHUNKS)
        self._stored = self._counter(STORED)
        self._dead_letters = self._counter(DEAD_LETTERS)
        self._duplicates = self._counter(DUPLICATES)
        self._deferred = self._counter(DEFERRED)
        self._spilled = self._counter(SPILLED)
        self._cancels = self._counter(CANCELS)
        self._unverified = self._counter(UNVERIFIED)
        self._delivery = self._counter(DELIVERY)
        self._loop_lag = self._histogram(LOOP_LAG)
        self._unacknowledged = self._gauge(UNACKNOWLEDGED)
        self._series: dict[tuple[str, str, str, str], _Series] = {}
        self._readings = _ReadingsCollector(self._tenants)
        self.registry.register(self._readings)

    # -- once per job

    def attempt(self, head: Head, kind: str, usage: Usage, timing: Timing, error: Error | None = None) -> None:
        """An attempt is over. `kind` as in `End`: completed, failed, cancelled, expired or abandoned."""
        tenant = head.tenant if head.tenant in self._tenants else OTHER
        # The model of a job that never ran may be any text that a caller wrote: never a label.
        model = OTHER if timing.admitted is None and kind != "completed" else head.model
        key = (kind, head.tier, model, tenant)
        series = self._series.get(key)
        if series is None:
            series = self._series[key] = self._bind(*key)
        series.jobs.inc()
        if error is not None:
            self._errors.labels(error.code, head.tier).inc()
        series.backlog.observe(max(0.0, timing.received - head.broker_time))
        if timing.ended is not None:
            series.duration.observe(max(0.0, timing.ended - timing.received))
        if timing.admitted is None:
            return
        series.queued.observe(max(0.0, timing.admitted - timing.received))
        series.input.inc(usage.prompt)
        series.cached.inc(usage.cached)
        series.output.inc(usage.completion)
        first, last = timing.first_token, timing.last_token
        if first is None:
            return
        series.first_token.observe(max(0.0, first - timing.received))
        if timing.submitted is not None:
            series.engine_first_token.observe(max(0.0, first - timing.submitted))
        if kind == "completed" and last is not None and usage.completion > 1:
            series.per_token.observe(max(0.0, last - first) / (usage.completion - 1))

    def ended(self, ended: Ended) -> None:
        """Everything that was sent for a record is acknowledged (R6). `kind` may also be dead or undeliverable."""
        self._complete.labels(ended.kind).inc()
        self._reply_bytes.inc(ended.bytes)
        self._reply_chunks.inc(ended.chunks)
        if ended.stored:
            self._stored.inc()

    def dead_letter(self, code: str) -> None:
        self._dead_letters.labels(code).inc()

    def deferred(self) -> None:
        self._deferred.inc()

    def spilled(self, reason: str) -> None:
        """`reason`: full, spread or model."""
        self._spilled.labels(reason).inc()

    def duplicate(self, outcome: str) -> None:
        self._duplicates.labels(outcome).inc()

    def cancel(self, stage: str) -> None:
        """`stage`: admission, waiting or running."""
        self._cancels.labels(stage).inc()

    def unverified(self, record: str, reason: str) -> None:
        """`record`: job or cancel, whose sender is not believed for this reason."""
        self._unverified.labels(record, reason).inc()

    # -- on a timer

    def pressure(self, pressure: Pressure) -> None:
        """The delivery process's report, every 0.5 s."""
        self._unacknowledged.set(pressure.unacknowledged)
        for event, amount in pressure.counters.items():
            self._delivery.labels(event).inc(max(0.0, amount))

    def loop_lag(self, seconds: float) -> None:
        self._loop_lag.observe(seconds)

    # -- at a scrape

    def render(self, readings: Readings | None = None) -> bytes:
        """The text format: the worker's families, then the process's (vLLM's among them). None: the last readings."""
        if readings is not None:
            self._readings.now = readings
        return generate_latest(self.registry) + generate_latest(REGISTRY)

    def _bind(self, kind: str, tier: str, model: str, tenant: str) -> _Series:
        job = (tier, model, tenant)
        return _Series(
            jobs=self._jobs.labels(kind, *job),
            input=self._tokens.labels("input", *job),
            cached=self._tokens.labels("cached", *job),
            output=self._tokens.labels("output", *job),
            first_token=self._first_token.labels(*job),
            engine_first_token=self._engine_first_token.labels(model),
            per_token=self._per_token.labels(model),
            backlog=self._backlog.labels(tier),
            queued=self._queued.labels(tier),
            duration=self._duration.labels(kind, tier, model),
        )

    def _counter(self, family: Family) -> Counter:
        return Counter(family.full_name, family.help, family.labels, registry=self.registry)

    def _gauge(self, family: Family) -> Gauge:
        return Gauge(family.full_name, family.help, family.labels, registry=self.registry)

    def _histogram(self, family: Family) -> Histogram:
        return Histogram(family.full_name, family.help, family.labels, buckets=family.buckets, registry=self.registry)


class _ReadingsCollector(Collector):
    """Shows the last `Readings`."""

    def __init__(self, tenants: frozenset[str]) -> None:
        self.now = Readings()
        self._named = tenants
        self._holds: set[str] = set()  # reasons seen so far: shown as 0 when they are over

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        now = self.now
        self._holds.update(now.holds)
        held = frozenset(now.holds)
        yield _plain(RUNNING, now.running)
        yield _plain(WAITING, now.waiting)
        yield _labelled(WAITS, (((reason,), float(now.waits.get(reason, 0))) for reason in WAIT_REASONS))
        yield from _by_tenant(now.standings, self._named)
        yield _plain(SCHEDULER_SECONDS, now.scheduler_seconds)
        yield _plain(TIMED, now.timed)
        yield _labelled(OLDEST, (((tier,), now.oldest.get(tier, 0.0)) for tier in TIERS))
        yield _labelled(HELD, (((reason,), float(reason in held)) for reason in sorted(self._holds)))
        yield _plain(ENGINE_RUNNING, now.engine_running)
        yield _plain(ENGINE_WAITING, now.engine_waiting)
        yield _plain(KV_USAGE, now.kv_usage)
        yield _plain(PREEMPTIONS, now.preemptions)
        yield from _engine(now.capacity)
        yield _plain(STEP_AGE, now.step_age)
        yield _plain(REBUILDS, now.rebuilds)
        yield _plain(RECEIVED, now.received)
        yield _plain(TENANTS_REFUSED, now.tenants_refused)
        yield _plain(PARTITIONS, len(now.partitions))
        places = [((topic, str(number)), counts) for (topic, number), counts in sorted(now.partitions.items())]
        yield _labelled(LAG, ((place, float(lag)) for place, (lag, _) in places))
        yield _labelled(UNFINISHED, ((place, float(unfinished)) for place, (_, unfinished) in places))
        yield _plain(COMMITS, now.commits)
        yield _plain(COMMIT_FAILURES, now.commit_failures)
        yield _plain(REBALANCES, now.rebalances)
        yield _plain(LEASE, now.lease_left)
        yield _plain(DELIVERY_UP, float(now.delivery_up))
        yield _plain(RESTARTS, now.delivery_restarts)


def _by_tenant(
    standings: Iterable[tuple[str, str, int, int, float]], named: frozenset[str]
) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
    """Tenants that are not named count together."""
    totals: dict[tuple[str, str], list[float]] = {}
    for tier, tenant, *figures in standings:
        sums = totals.setdefault((tier, tenant if tenant in named else OTHER), [0.0, 0.0, 0.0])
        for place, figure in enumerate(figures):
            sums[place] += figure
    for place, family in enumerate((TENANT_RUNNING, TENANT_WAITING, TENANT_SHARE)):
        yield _labelled(family, ((labels, sums[place]) for labels, sums in sorted(totals.items())))


def _engine(report: EngineReport | None) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
    """No samples before the engine's first start: a zero would be a report too."""
    gauges = ((KV_TOKENS, "kv_tokens"), (KV_BLOCK, "block_size"), (CONTEXT, "max_model_len"), (SLOTS, "max_num_seqs"))
    for family, name in gauges:
        yield _labelled(family, () if report is None else (((), float(getattr(report, name))),))
    yield _labelled(ENGINE_INFO, () if report is None else (((report.model, report.version), 1.0),))


def _plain(family: Family, value: float) -> GaugeMetricFamily | CounterMetricFamily:
    return _labelled(family, (((), value),))


def _labelled(
    family: Family, samples: Iterable[tuple[tuple[str, ...], float]]
) -> GaugeMetricFamily | CounterMetricFamily:
    kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    metric = kind(family.full_name, family.help, labels=family.labels)
    for labels, value in samples:
        metric.add_metric(labels, value)
    return metric
