"""`headrace bench fairness` in small: a real worker, Kafka, every window; what it reports is complete and adds up.

Nothing here depends on how fast the machine is: the bounds themselves are the bench's to judge.
"""

from __future__ import annotations

import dataclasses
import io

import orjson
import pytest
from rich.console import Console

from infra.progress import Quiet
from load.fairness import bench, table
from load.fairness.plan import SIMULATED, Regime, Shape
from service.cli.process import WorkerProcess

pytestmark = pytest.mark.timeout(150)

SMALL = Shape(16, 8, 16)
SIZES = dataclasses.replace(
    SIMULATED,
    slots=32,
    shape=SMALL,
    neighbours=2,
    per_s=5.0,
    heavy_per_s=4.0,
    window_s=3.0,
    warm_s=1.0,
    rounds=1,
    shares=((1, SMALL), (4, SMALL)),
    shares_s=4.0,
    shares_jobs=1500,
    rare=SMALL,
    wait_bound_s=1.0,
    costs=(Regime("fitted", fitted=True, shape=SMALL, jobs=60, pairs=2),),
)


async def test_the_bench_runs_all_its_windows_and_its_figures_add_up() -> None:
    said: list[str] = []
    result = await bench.run(WorkerProcess, "simulated", said.append, Quiet(), SIZES)
    line = orjson.loads(orjson.dumps(result.line()))
    assert {"ttft_p95_ratio_worst", "jain", "scheduler_cost", "ttft_p95_ratio_idle"} <= line.keys()
    assert {"max_wait_s", "wait_bound_s", "verdict", "windows"} <= line.keys()
    kinds = ["flood", "idle", "baseline", "shares", "cost_fitted"]
    assert [window["kind"] for window in line["windows"]] == kinds
    flood, idle, baseline, shares, cost = line["windows"]
    assert flood["tenants"].keys() == idle["tenants"].keys() == baseline["tenants"].keys()
    for name in flood["tenants"]:  # the same arrivals in each of them
        assert flood["tenants"][name]["jobs"] == idle["tenants"][name]["jobs"] == baseline["tenants"][name]["jobs"] > 0
        assert idle["tenants"][name]["unanswered"] == baseline["tenants"][name]["unanswered"] == 0
    assert flood["heavy_offered_per_s"] == 400 and baseline["heavy_ended_per_s"] > 0 == idle["heavy_ended_per_s"]
    assert line["ttft_p95_ratio_worst"] == max(line["ttft_p95_ratios"].values()) > 0
    assert [one["policy"] for one in cost["rounds"]] == ["fifo", "fair", "fair", "fifo"]
    assert all(8 <= one["tokens_per_s"] / one["jobs_per_s"] <= 16 for one in cost["rounds"])
    assert line["scheduler_cost"] < 1 and line["scheduler_costs"].keys() == {"fitted"} and 0 < line["jain"] <= 1
    # On a slow machine everybody's wait reaches the bound, and ageing evens out the weights.
    served = {one["weight"]: one["cost_tokens"] for one in shares["tenants"].values()}
    assert served.keys() == {1, 4} and min(served.values()) > 0
    assert shares["max_wait_rare_s"] > 0, "the tenant of hardly any weight never had to wait"
    told = io.StringIO()
    table.show(Console(file=told, width=100), result)
    assert all(name in told.getvalue() for name in ("ttft_p95_ratio_worst", "jain", "max_wait_s", "not promised"))
