"""Usage is summed exactly once, and costs what the price or the machines say."""

from __future__ import annotations

import random
import tracemalloc
from datetime import UTC, datetime
from typing import Any

import orjson
import pytest
import typer

from schemas.records import UsageRecord
from service.cli.usage import fields_of, moment
from service.delivery.events import stamp
from service.usage import Fingerprints, Machines, Prices, Usage, Window, row_of

T0 = datetime(2030, 1, 31, 12, tzinfo=UTC).timestamp()
HOUR = 3600.0
WINDOW = Window(T0, T0 + 2 * HOUR)


def record(job: int = 0, attempt: str = "", **more: Any) -> bytes:
    value: dict[str, Any] = {
        "schema_version": 1,
        "tenant": "acme",
        "job_id": f"job-{job}",
        "run": 0,
        "attempt": attempt or f"01{job:024d}",
        "model": "m",
        "tier": "standard",
        "endpoint": "/v1/completions",
        "kind": "completed",
        "prompt_tokens": 100,
        "completion_tokens": 20,
        "cached_tokens": 60,
        "queued_s": 0.5,
        "running_s": 2.0,
        "at": stamp(T0 + 60),
        **more,
    }
    UsageRecord.model_validate_json(orjson.dumps(value))
    return orjson.dumps(value)


def summed(*records: bytes, by: tuple[str, ...] = (), **filters: str) -> Usage:
    usage = Usage(by, WINDOW, **filters)
    for value in records:
        usage.take(value)
    return usage


def test_a_record_that_lies_there_twice_counts_once() -> None:
    usage = summed(record(1), record(1), record(2), record(1))
    total = usage.total()
    assert (total.completed, total.prompt, total.cached, total.output) == (2, 200, 120, 40)
    assert (usage.records, usage.doubled) == (4, 2)


def test_of_a_job_that_ended_twice_the_first_end_counts_and_the_other_is_work_beside() -> None:
    total = summed(record(1, "A" * 26), record(1, "B" * 26, completion_tokens=18), record(1, "C" * 26)).total()
    assert (total.completed, total.output) == (1, 20)
    assert (total.other_attempts, total.other_prompt, total.other_output) == (2, 200, 38)


def test_an_abandoned_attempt_is_no_job() -> None:
    total = summed(record(1, "A" * 26, kind="abandoned"), record(1, "B" * 26, kind="failed")).total()
    assert (total.jobs, total.failed, total.completed) == (1, 1, 0)
    assert (total.other_attempts, total.other_output, total.output, total.completed_output) == (1, 20, 20, 0)


def test_another_run_is_another_job_and_another_tenants_job_too() -> None:
    total = summed(record(1), record(1, "B" * 26, run=1), record(1, "C" * 26, tenant="globex")).total()
    assert (total.completed, total.other_attempts) == (3, 0)


def test_partitions_are_summed_together_but_remembered_apart() -> None:
    usage = Usage((), WINDOW)
    usage.take(record(1))
    usage.partition()
    usage.take(record(2, tenant="globex"))
    assert usage.total().completed == 2


def test_the_window_has_its_beginning_and_not_its_end() -> None:
    before, first, last, end = (stamp(T0 + s) for s in (-0.001, 0, 2 * HOUR - 0.001, 2 * HOUR))
    usage = summed(record(1, at=before), record(2, at=first), record(3, at=last), record(4, at=end))
    assert usage.total().completed == 2
    # Its first end lies in the window before: there it was summed.
    again = summed(record(1, "A" * 26, at=before), record(1, "B" * 26, at=first)).total()
    assert (again.completed, again.other_attempts) == (0, 1)


def test_rows_by_tenant_and_time() -> None:
    usage = summed(
        record(1, at=stamp(T0 + HOUR)),
        record(2, at=stamp(T0)),
        record(3, tenant="globex", at=stamp(T0 + HOUR + 59)),
        record(4, at=stamp(T0 + 2 * HOUR - 1)),
        by=("tenant", "hour"),
    )
    assert [(*labels.values(), row.completed) for labels, row in usage.rows()] == [
        ("acme", "2030-01-31T12:00:00Z", 1),
        ("acme", "2030-01-31T13:00:00Z", 2),
        ("globex", "2030-01-31T13:00:00Z", 1),
    ]
    assert [row for row, _ in summed(record(1), by=("day", "tier")).rows()] == [
        {"day": "2030-01-31", "tier": "standard"}
    ]
    assert [row for row, _ in summed(record(1), by=("month",)).rows()] == [{"month": "2030-01"}]


def test_filters_leave_out_others() -> None:
    records = (record(1), record(2, tenant="globex"), record(3, model="n"))
    assert summed(*records, tenant="globex").total().completed == 1
    assert summed(*records, model="n").total().completed == 1


def test_what_is_no_usage_record_is_counted_and_changes_nothing() -> None:
    broken = [None, b"", b"[]", b"{}", b"\xff", orjson.dumps({**orjson.loads(record(9)), "completion_tokens": "x"})]
    usage = Usage(("tenant",), WINDOW)
    for value in (record(1), *broken):
        usage.take(value)
    assert (usage.total().completed, usage.unreadable) == (1, len(broken))
    assert len(list(usage.rows())) == 1


# -- costs


def test_a_price_charges_every_attempt_that_counts() -> None:
    total = summed(record(1), record(2, kind="failed"), record(3, "B" * 26, kind="abandoned")).total()
    row = row_of(total, Prices(prompt=1.0, cached=0.1, output=10.0))
    cost = (2 * 40 * 1.0 + 2 * 60 * 0.1 + 2 * 20 * 10.0) / 1e6
    assert row["cost"] == pytest.approx(cost)
    assert row["cost_per_completed_job"] == pytest.approx(cost)
    assert row["cost_per_million_output_tokens"] == pytest.approx(cost / 20 * 1e6)


def test_machines_cost_their_whole_time_and_completed_output_bears_it() -> None:
    usage = summed(
        record(1), record(2, tenant="globex", completion_tokens=60), record(3, kind="failed"), by=("tenant",)
    )
    price = Machines(4.0 * 3 * 2, usage.total().completed_output)  # 3 machines for two hours
    rows = {labels["tenant"]: row_of(row, price) for labels, row in usage.rows()}
    assert (rows["acme"]["cost"], rows["globex"]["cost"]) == (6.0, 18.0)
    total = row_of(usage.total(), price)
    assert (total["cost"], total["cost_per_completed_job"]) == (24.0, 12.0)
    assert total["cost_per_million_output_tokens"] == pytest.approx(24 / 80 * 1e6)


def test_nothing_completed_has_no_unit_cost() -> None:
    row = row_of(summed(record(1, kind="failed")).total(), Machines(24.0, 0))
    assert (row["cost_per_completed_job"], row["cost_per_million_output_tokens"]) == (None, None)
    assert "cost" not in row_of(summed(record(1)).total(), None)


# -- memory


def test_fingerprints_are_a_set() -> None:
    marks, plain = Fingerprints(), set()
    numbers = random.Random(7)
    for _ in range(30_000):
        thing = (f"t{numbers.randrange(20_000)}", 1)
        assert marks.add(thing) == (thing not in plain)
        plain.add(thing)


def test_memory_does_not_grow_with_records() -> None:
    usage = Usage(("tenant", "hour"), WINDOW)
    tracemalloc.start()
    try:
        for number in range(20_000):
            usage.take(record_of(number))
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    # Two fingerprints of a record, 8 bytes each, in a table that is at least 3/8 full; nothing else.
    assert held < 20_000 * 2 * 22 + 200_000
    assert usage.total().completed == 20_000


def record_of(number: int) -> bytes:
    return TEMPLATE.replace(b"job-0", b"job-%d" % number).replace(b"0" * 24, b"%024d" % number)


TEMPLATE = record()


# -- the command's own words


def test_times_are_spans_or_moments() -> None:
    assert moment("2h", T0, "--since") == T0 - 7200
    assert moment("2030-01-31T13:00:00+01:00", T0, "--since") == T0
    for text in ("yesterday", "2030-01-31", "2030-01-31T12:00:00"):
        with pytest.raises(typer.BadParameter):
            moment(text, T0, "--since")


@pytest.mark.parametrize("by", ["tenant,who", "tenant,tenant", "hour,day"])
def test_rows_by_what_is_not_there_are_refused(by: str) -> None:
    with pytest.raises(typer.BadParameter):
        fields_of(by)
