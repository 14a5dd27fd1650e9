"""What a scrape shows."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from service.frames import Ended, Error, Pressure, Timing, Usage
from service.telemetry.families import FAMILIES
from service.telemetry.metrics import Metrics, Readings
from tests.unit.telemetry_samples import T0, ended, head, refused, settings

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(metrics: Metrics, readings: Readings | None = None) -> Samples:
    text = metrics.render(readings).decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, frozenset(labels.items())]


def attempt(metrics: Metrics, tenant: str = "acme", kind: str = "completed") -> None:
    end = ended(kind)
    metrics.attempt(head(tenant=tenant), kind, end.usage, end.timing)


def test_tenants_that_are_not_named_are_shown_together() -> None:
    metrics = Metrics(settings(tenant_labels=("acme",)))
    standings = [("bulk", "acme", 2, 5, 0.5), ("bulk", "x", 1, 2, 0.25), ("bulk", "y", 3, 4, 0.25)]
    now = Readings(standings=standings, waits={"quota": 3}, scheduler_seconds=1.5)
    samples = scrape(metrics, now)
    assert value(samples, "headrace_tenant_jobs_running", tier="bulk", tenant="acme") == 2
    assert value(samples, "headrace_tenant_jobs_waiting", tier="bulk", tenant="other") == 6
    assert value(samples, "headrace_tenant_share_ratio", tier="bulk", tenant="other") == 0.5
    assert value(samples, "headrace_jobs_waiting_for", reason="quota") == 3
    assert value(samples, "headrace_jobs_waiting_for", reason="order") == 0
    assert value(samples, "headrace_scheduler_seconds_total") == 1.5


def test_an_attempt_is_counted_with_its_tokens_and_times() -> None:
    metrics = Metrics(settings(tenant_labels=("acme",)))
    attempt(metrics)
    samples = scrape(metrics)
    job = {"tier": "interactive", "model": "m1", "tenant": "acme"}
    assert value(samples, "headrace_jobs_total", outcome="completed", **job) == 1
    assert value(samples, "headrace_tokens_total", type="input", **job) == 20
    assert value(samples, "headrace_tokens_total", type="cached", **job) == 16
    assert value(samples, "headrace_tokens_total", type="output", **job) == 11
    assert value(samples, "headrace_first_token_seconds_sum", **job) == pytest.approx(0.3)
    assert value(samples, "headrace_engine_first_token_seconds_sum", model="m1") == pytest.approx(0.15)
    assert value(samples, "headrace_time_per_output_token_seconds_sum", model="m1") == pytest.approx(0.1)
    assert value(samples, "headrace_queue_seconds_sum", tier="interactive") == pytest.approx(0.1)
    assert value(samples, "headrace_backlog_seconds_sum", tier="interactive") == pytest.approx(0.5)
    duration = {"outcome": "completed", "tier": "interactive", "model": "m1"}
    assert value(samples, "headrace_job_duration_seconds_sum", **duration) == pytest.approx(1.31)


def test_tenants_off_the_list_share_one_label() -> None:
    metrics = Metrics(settings(tenant_labels=("acme",)))
    for tenant in ("acme", *(f"t{i}" for i in range(3_000))):
        attempt(metrics, tenant)
    samples = scrape(metrics)
    job = {"outcome": "completed", "tier": "interactive", "model": "m1"}
    assert value(samples, "headrace_jobs_total", tenant="other", **job) == 3_000
    assert value(samples, "headrace_jobs_total", tenant="acme", **job) == 1
    assert {dict(labels)["tenant"] for name, labels in samples if name == "headrace_jobs_total"} == {"acme", "other"}


def test_the_model_name_of_a_refused_job_is_no_label() -> None:
    metrics = Metrics(settings())
    for i in range(100):
        end = refused()
        metrics.attempt(head(model=f"made-up-{i}"), "failed", end.usage, end.timing, end.error)
    samples = scrape(metrics)
    job = {"tier": "interactive", "tenant": "other"}
    assert value(samples, "headrace_jobs_total", outcome="failed", model="other", **job) == 100
    assert value(samples, "headrace_job_errors_total", code="model_not_found", tier="interactive") == 100


def test_a_failed_attempt_gives_no_time_per_token() -> None:
    metrics = Metrics(settings())
    end = ended("failed", Error("engine_failed", ""))
    metrics.attempt(head(), "failed", end.usage, end.timing, end.error)
    assert value(scrape(metrics), "headrace_time_per_output_token_seconds_count", model="m1") == 0


def test_clocks_that_disagree_give_no_negative_time() -> None:
    metrics = Metrics(settings())
    late = Timing(T0, admitted=T0 - 1, submitted=T0, first_token=T0 - 2, last_token=T0 - 3, ended=T0 - 4)
    metrics.attempt(head(broker_time=T0 + 9), "completed", Usage(1, 5), late)
    assert all(value >= 0 for (name, _), value in scrape(metrics).items() if name.startswith("headrace_"))


def test_acknowledged_records_dead_letters_and_delivery_counts() -> None:
    metrics = Metrics(settings())
    place = {"topic": "t", "partition": 0, "offset": 1, "epoch": 1}
    metrics.ended(Ended(stream=1, kind="completed", bytes=900, chunks=4, stored=True, **place))
    metrics.ended(Ended(stream=None, kind="dead", **place))
    metrics.dead_letter("invalid_job")
    metrics.pressure(Pressure(unacknowledged=77, counters={"sent": 3.0}))
    metrics.pressure(Pressure(unacknowledged=55, counters={"sent": 2.0, "spans_exported": 8.0}))
    samples = scrape(metrics)
    assert value(samples, "headrace_jobs_complete_total", outcome="completed") == 1
    assert value(samples, "headrace_jobs_complete_total", outcome="dead") == 1
    assert value(samples, "headrace_reply_bytes_total") == 900
    assert value(samples, "headrace_reply_chunks_total") == 4
    assert value(samples, "headrace_outputs_stored_total") == 1
    assert value(samples, "headrace_dead_letters_total", code="invalid_job") == 1
    assert value(samples, "headrace_delivery_events_total", event="sent") == 5
    assert value(samples, "headrace_delivery_events_total", event="spans_exported") == 8
    assert value(samples, "headrace_unacknowledged_bytes") == 55


def test_readings_are_shown_as_they_are_at_the_scrape() -> None:
    metrics = Metrics(settings())
    first = Readings(
        running=3,
        waiting=9,
        oldest={"bulk": 12.5},
        holds={"memory"},
        partitions={("jobs", 1): (5, 2), ("jobs", 0): (0, 0)},
        commits=7,
        lease_left=6.5,
        delivery_up=True,
    )
    samples = scrape(metrics, first)
    assert value(samples, "headrace_jobs_running") == 3
    assert value(samples, "headrace_oldest_waiting_seconds", tier="bulk") == 12.5
    assert value(samples, "headrace_oldest_waiting_seconds", tier="standard") == 0
    assert value(samples, "headrace_admission_held", reason="memory") == 1
    assert value(samples, "headrace_ledger_lag_records", topic="jobs", partition="1") == 5
    assert value(samples, "headrace_ledger_unfinished_records", topic="jobs", partition="1") == 2
    assert value(samples, "headrace_partitions_assigned") == 2
    assert value(samples, "headrace_commits_total") == 7
    assert value(samples, "headrace_lease_left_seconds") == 6.5
    assert value(samples, "headrace_delivery_up") == 1
    later = scrape(metrics, Readings())
    assert value(later, "headrace_admission_held", reason="memory") == 0
    assert not [name for name, _ in later if name == "headrace_ledger_lag_records"]


def test_the_scrape_has_every_family_and_the_process_beside_them() -> None:
    metrics = Metrics(settings())
    attempt(metrics)
    text = metrics.render(Readings()).decode()
    for family in FAMILIES:
        assert f"# HELP {family.full_name} {family.help}\n# TYPE {family.full_name} {family.kind}" in text
    assert "process_cpu_seconds_total" in text  # the default registry, where the engine's own metrics are
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names))
    assert {name for name in names if name.startswith("headrace_")} == {family.full_name for family in FAMILIES}


def test_two_workers_in_one_process_do_not_share_their_counts() -> None:
    first, second = Metrics(settings()), Metrics(settings())
    attempt(first)
    assert not [name for name, _ in scrape(second) if name == "headrace_jobs_total"]
