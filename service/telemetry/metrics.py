"""The worker's Prometheus metrics. Owns the families, their labels and what is counted; opens no port and keeps no job.

Counters and histograms are fed once per job, never per token. What other rooms know anyway (queues, ledger, lease …)
is read when somebody scrapes: `Readings`. vLLM keeps its own families in the process's default registry; `render` shows
both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

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
from service.telemetry.names import METRIC_PREFIX

# Buckets advised by the generative AI conventions, in seconds; the long ones go on doubling, since batch jobs wait.
FIRST_TOKEN_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    30.0,
    120.0,
)
PER_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
DURATION_S = tuple(0.01 * 2**k for k in range(18))  # 0.01, 0.02 … 81.92 … 1310.72
LAG_S = (0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 10.0)

OTHER = "other"  # the tenant label of everybody who is not on the allow list


@dataclass(frozen=True, slots=True)
class Family:
    """One metric as the documentation shows it."""

    name: str  # without prefix and without `_total`
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def full_name(self) -> str:
        return f"{METRIC_PREFIX}_{self.name}" + ("_total" if self.kind == "counter" else "")


_JOB = ("tier", "model", "tenant")
JOBS = Family("jobs", "counter", "Attempts that ended, by outcome", ("outcome", *_JOB))
COMPLETE = Family("jobs_complete", "counter", "Records of which everything is acknowledged, by outcome", ("outcome",))
ERRORS = Family("job_errors", "counter", "Attempts that ended with an error, by its code", ("code", "tier"))
TOKENS = Family("tokens", "counter", "Tokens by type: input, cached (part of input), output", ("type", *_JOB))
FIRST_TOKEN = Family(
    "first_token_seconds", "histogram", "From the record's receipt to the first token", _JOB, FIRST_TOKEN_S
)
ENGINE_FIRST_TOKEN = Family(
    "engine_first_token_seconds",
    "histogram",
    "From the engine's acceptance to the first token",
    ("model",),
    FIRST_TOKEN_S,
)
PER_TOKEN = Family(
    "time_per_output_token_seconds", "histogram", "Per token after the first; completed only", ("model",), PER_TOKEN_S
)
BACKLOG = Family(
    "backlog_seconds", "histogram", "From the broker's append to the record's receipt", ("tier",), DURATION_S
)
QUEUED = Family("queue_seconds", "histogram", "From receipt to the scheduler's pick", ("tier",), DURATION_S)
DURATION = Family(
    "job_duration_seconds", "histogram", "From receipt to the attempt's end", ("outcome", "tier", "model"), DURATION_S
)
REPLY_BYTES = Family("reply_bytes", "counter", "Bytes of acknowledged reply events")
REPLY_CHUNKS = Family("reply_chunks", "counter", "Acknowledged chunk events")
STORED = Family("outputs_stored", "counter", "Outputs that went to the object store")
DEAD_LETTERS = Family("dead_letters", "counter", "Records written to the dead-letter topic, by code", ("code",))
DUPLICATES = Family(
    "duplicates",
    "counter",
    "Further records of a job: answered from the first, dropped (the same record), conflict, run_again",
    ("outcome",),
)
DEFERRED = Family("deferred", "counter", "Jobs moved to the deferred topic until they are due")
CANCELS = Family("cancels", "counter", "Jobs that a cancel ended, by where it met them", ("stage",))
DELIVERY = Family("delivery_events", "counter", "What the delivery process counted, by event", ("event",))
LOOP_LAG = Family("event_loop_lag_seconds", "histogram", "How late the worker's event loop runs its timers", (), LAG_S)

RUNNING = Family("jobs_running", "gauge", "Jobs that hold a place at the engine until their terminal is acknowledged")
WAITING = Family("jobs_waiting", "gauge", "Jobs received and not yet admitted to the engine")
TIMED = Family("jobs_timed", "gauge", "Jobs on the deferred topic whose time has not come")
OLDEST = Family("oldest_waiting_seconds", "gauge", "Age of the longest-waiting job", ("tier",))
HELD = Family("admission_held", "gauge", "1 while nothing is admitted for this reason", ("reason",))
ENGINE_RUNNING = Family("engine_running", "gauge", "Sequences in the engine's batch")
ENGINE_WAITING = Family("engine_waiting", "gauge", "Requests in the engine's own queue")
KV_USAGE = Family("engine_kv_usage_ratio", "gauge", "Share of the KV cache in use, 0 to 1")
STEP_AGE = Family("engine_step_age_seconds", "gauge", "Time since the engine's last step; of interest while it runs")
REBUILDS = Family("engine_rebuilds", "counter", "Engines rebuilt after a death or a hang")
RECEIVED = Family("records_received", "counter", "Records read from the jobs topics, those that were not new included")
PARTITIONS = Family("partitions_assigned", "gauge", "Partitions of the jobs topics assigned to this worker")
LAG = Family(
    "ledger_lag_records", "gauge", "Records between the watermark and the newest received", ("topic", "partition")
)
UNFINISHED = Family("ledger_unfinished_records", "gauge", "Received and not complete", ("topic", "partition"))
COMMITS = Family("commits", "counter", "Successful offset commits")
COMMIT_FAILURES = Family("commit_failures", "counter", "Failed offset commits")
REBALANCES = Family("rebalances", "counter", "Assignments received from the consumer group")
LEASE = Family(
    "lease_left_seconds", "gauge", "How long jobs may still be ended without a further commit; <= 0: not at all"
)
UNACKNOWLEDGED = Family("unacknowledged_bytes", "gauge", "Output not yet acknowledged by broker or store")
DELIVERY_UP = Family("delivery_up", "gauge", "1 while the delivery process runs")
RESTARTS = Family("delivery_restarts", "counter", "Delivery processes started after the first")

FED = (
    *(JOBS, COMPLETE, ERRORS, TOKENS, FIRST_TOKEN, ENGINE_FIRST_TOKEN, PER_TOKEN, BACKLOG, QUEUED, DURATION),
    *(REPLY_BYTES, REPLY_CHUNKS, STORED, DEAD_LETTERS, DUPLICATES, DEFERRED, CANCELS),
    *(DELIVERY, LOOP_LAG, UNACKNOWLEDGED),
)
READ = (
    *(RUNNING, WAITING, TIMED, OLDEST, HELD, ENGINE_RUNNING, ENGINE_WAITING, KV_USAGE, STEP_AGE, REBUILDS),
    *(RECEIVED, PARTITIONS, LAG, UNFINISHED, COMMITS, COMMIT_FAILURES, REBALANCES, LEASE, DELIVERY_UP, RESTARTS),
)
FAMILIES = (*FED, *READ)


@dataclass(slots=True)
class Readings:
    """What the worker's rooms know of themselves at the moment of a scrape. Counts are totals since the start."""

    running: int = 0
    waiting: int = 0
    timed: int = 0
    oldest: Mapping[str, float] = field(default_factory=dict)  # tier → seconds
    holds: Iterable[str] = ()  # reasons why nothing is admitted
    engine_running: int = 0
    engine_waiting: int = 0
    kv_usage: float = 0.0  # 0..1
    step_age: float = 0.0  # seconds
    rebuilds: int = 0
    received: int = 0  # records
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
        self._cancels = self._counter(CANCELS)
        self._delivery = self._counter(DELIVERY)
        self._loop_lag = self._histogram(LOOP_LAG)
        self._unacknowledged = self._gauge(UNACKNOWLEDGED)
        self._series: dict[tuple[str, str, str, str], _Series] = {}
        self._readings = _ReadingsCollector()
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

    def duplicate(self, outcome: str) -> None:
        self._duplicates.labels(outcome).inc()

    def cancel(self, stage: str) -> None:
        """`stage`: admission, waiting or running."""
        self._cancels.labels(stage).inc()

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

    def __init__(self) -> None:
        self.now = Readings()
        self._holds: set[str] = set()  # reasons seen so far: shown as 0 when they are over

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        now = self.now
        self._holds.update(now.holds)
        held = frozenset(now.holds)
        yield _plain(RUNNING, now.running)
        yield _plain(WAITING, now.waiting)
        yield _plain(TIMED, now.timed)
        yield _labelled(OLDEST, (((tier,), now.oldest.get(tier, 0.0)) for tier in TIERS))
        yield _labelled(HELD, (((reason,), float(reason in held)) for reason in sorted(self._holds)))
        yield _plain(ENGINE_RUNNING, now.engine_running)
        yield _plain(ENGINE_WAITING, now.engine_waiting)
        yield _plain(KV_USAGE, now.kv_usage)
        yield _plain(STEP_AGE, now.step_age)
        yield _plain(REBUILDS, now.rebuilds)
        yield _plain(RECEIVED, now.received)
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


def table() -> str:
    """The families as the Markdown table of docs/operations.md."""
    rows = (
        f"| `{family.full_name}` | {family.kind} | {', '.join(family.labels)} | {family.help} |" for family in FAMILIES
    )
    return "\n".join(chain(("| metric | kind | labels | says |", "| --- | --- | --- | --- |"), rows))
