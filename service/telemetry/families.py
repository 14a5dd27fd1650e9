"""Every metric of the worker as the documentation shows it: name, kind, labels, buckets. No other file spells one."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Literal

from service.telemetry.names import METRIC_PREFIX

# Buckets advised by the generative AI conventions, in seconds; the long ones go on doubling, since batch jobs wait.
FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25),
    *(0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 30.0, 120.0),
)
PER_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
DURATION_S = tuple(0.01 * 2**k for k in range(18))  # 0.01, 0.02 … 81.92 … 1310.72
LAG_S = (0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 10.0)


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
SPILLED = Family(
    "moved_to_overflow",
    "counter",
    "Jobs moved to an overflow topic: full (their tenant filled the partition), spread (their home is elsewhere), "
    "model (another pool serves it)",
    ("reason",),
)
DEFERRED = Family("deferred", "counter", "Jobs moved to the deferred topic until they are due")
UNVERIFIED = Family(
    "unverified", "counter", "Jobs and cancels whose sender was not believed, by reason", ("record", "reason")
)
CANCELS = Family("cancels", "counter", "Jobs that a cancel ended, by where it met them", ("stage",))
DELIVERY = Family("delivery_events", "counter", "What the delivery process counted, by event", ("event",))
LOOP_LAG = Family("event_loop_lag_seconds", "histogram", "How late the worker's event loop runs its timers", (), LAG_S)

RUNNING = Family("jobs_running", "gauge", "Jobs that hold a place at the engine until their terminal is acknowledged")
WAITING = Family("jobs_waiting", "gauge", "Jobs received and not yet admitted to the engine")
TIMED = Family("jobs_timed", "gauge", "Jobs on the deferred topic whose time has not come")
OLDEST = Family("oldest_waiting_seconds", "gauge", "Age of the longest-waiting job", ("tier",))
WAITS = Family(
    "jobs_waiting_for", "gauge", "Waiting jobs by reason: capacity, quota, order, not_before, engine", ("reason",)
)
TENANT_RUNNING = Family("tenant_jobs_running", "gauge", "As jobs_running, by tenant", ("tier", "tenant"))
TENANT_WAITING = Family("tenant_jobs_waiting", "gauge", "As jobs_waiting, by tenant", ("tier", "tenant"))
TENANT_SHARE = Family(
    "tenant_share_ratio", "gauge", "Part of the engine due by weight to tenants with jobs here", ("tier", "tenant")
)
SCHEDULER_SECONDS = Family("scheduler_seconds", "counter", "Time of the event loop spent on deciding who is next")
HELD = Family("admission_held", "gauge", "1 while nothing is admitted for this reason", ("reason",))
ENGINE_RUNNING = Family("engine_running", "gauge", "Sequences in the engine's batch")
ENGINE_WAITING = Family("engine_waiting", "gauge", "Requests in the engine's own queue")
KV_USAGE = Family("engine_kv_usage_ratio", "gauge", "Share of the KV cache in use, 0 to 1")
PREEMPTIONS = Family("engine_preemptions", "counter", "Sequences put back for want of KV blocks, to be computed again")
KV_TOKENS = Family("engine_kv_tokens", "gauge", "Tokens that fit into the KV cache, as the engine reported them")
KV_BLOCK = Family("engine_kv_block_tokens", "gauge", "Tokens of one KV block")
CONTEXT = Family("engine_context_tokens", "gauge", "Tokens of one sequence at most, prompt and output together")
SLOTS = Family("engine_slots", "gauge", "Sequences of one batch at most")
ENGINE_INFO = Family("engine_info", "gauge", "1: the model served and the engine's version", ("model", "version"))
STEP_AGE = Family("engine_step_age_seconds", "gauge", "Time since the engine's last step; of interest while it runs")
REBUILDS = Family("engine_rebuilds", "counter", "Engines rebuilt after a death or a hang")
RECEIVED = Family("records_received", "counter", "Records read from the jobs topics, those that were not new included")
TENANTS_REFUSED = Family("tenant_entries_refused", "counter", "Changes of the registry that were not valid")
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
    *(REPLY_BYTES, REPLY_CHUNKS, STORED, DEAD_LETTERS, DUPLICATES, DEFERRED, SPILLED, CANCELS),
    *(UNVERIFIED,),
    *(DELIVERY, LOOP_LAG, UNACKNOWLEDGED),
)
READ = (
    *(RUNNING, WAITING, TIMED, OLDEST, HELD, ENGINE_RUNNING, ENGINE_WAITING, KV_USAGE, PREEMPTIONS, STEP_AGE, REBUILDS),
    *(KV_TOKENS, KV_BLOCK, CONTEXT, SLOTS, ENGINE_INFO),
    *(WAITS, TENANT_RUNNING, TENANT_WAITING, TENANT_SHARE, SCHEDULER_SECONDS),
    *(RECEIVED, TENANTS_REFUSED, PARTITIONS, LAG, UNFINISHED, COMMITS, COMMIT_FAILURES, REBALANCES),
    *(LEASE, DELIVERY_UP, RESTARTS),
)
FAMILIES = (*FED, *READ)


def table() -> str:
    """The families as the Markdown table of docs/operations.md."""
    rows = (
        f"| `{family.full_name}` | {family.kind} | {', '.join(family.labels)} | {family.help} |" for family in FAMILIES
    )
    return "\n".join(chain(("| metric | kind | labels | says |", "| --- | --- | --- | --- |"), rows))
