"""Scenario files name what is wrong in them and give the same work every time; the tally counts what the log holds."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson
import pytest

from load.generator import good, scaled, told
from load.scenario import FOLDER, Closed, Scenario, ScenarioError, plan, record
from load.tally import Tally, delays, doubled
from schemas.job import Job


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_scenario_of_the_project_makes_jobs_of_the_contract(path: Path) -> None:
    scenario = scaled(Scenario.load(path.stem), jobs=5)
    assert scenario.name == path.stem
    parts = plan(scenario, "run", "m")
    assert sum(map(len, parts)) == scenario.jobs
    for job in (job for part in parts for job in part):
        made = Job.model_validate(orjson.loads(record(scenario, job, "inference.replies")))
        assert made.body is not None and made.body["model"] == "m"


def test_a_plan_is_the_same_every_time_and_its_prompts_do_not_depend_on_the_run() -> None:
    scenario = Scenario.load("smoke")
    once, again, other = plan(scenario, "a", "m"), plan(scenario, "a", "m"), plan(scenario, "b", "m")
    assert once == again
    assert [[job.prompt for job in part] for part in once] == [[job.prompt for job in part] for part in other]
    assert not {job.id for part in once for job in part} & {job.id for part in other for job in part}


def test_lengths_arrivals_and_stream_shares_are_the_ones_asked_for() -> None:
    scenario = scaled(Scenario.load("poisson"), jobs=400)
    chats, completions = plan(scenario, "r", "m")
    gaps = [(later.at_s or 0) - (job.at_s or 0) for job, later in pairwise(chats)]
    assert 0.4 < sum(gaps) / len(gaps) < 0.6, "2 a second"
    assert all(16 <= job.body["max_tokens"] <= 48 for job in chats) and all(job.stream for job in chats)
    assert not any(job.stream for job in completions)
    half = plan(scaled(Scenario.load("smoke"), jobs=400), "r", "m")[1]
    assert 150 < sum(job.stream for job in half) < 250
    shared = plan(Scenario.load("smoke"), "r", "m")[2]
    assert len({tuple(job.prompt.split()[:60]) for job in shared}) == 1 and len({job.prompt for job in shared}) == 8


def test_a_benchmark_can_scale_a_scenario() -> None:
    one = scaled(Scenario.load("pipeline-streams"), jobs=10, in_flight=3, output_tokens=7).tenants[0]
    assert (one.jobs, one.arrivals, one.output_tokens.min) == (10, Closed(kind="closed", in_flight=3), 7)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("name: x\ntenants: []", "tenants"),
        ("name: x\ntenants: [{tenant: acme, jobs: 1, arrivals: {kind: sine}}]", "arrivals"),
        ("name: x\ntenants: [{tenant: acme, jobs: 0, arrivals: {kind: burst}}]", "jobs"),
        ("name: x\ntenants: [{tenant: acme, jobs: 1, arrivals: {kind: burst}, oops: 1}]", "oops"),
        (
            "name: x\ntenants: [{tenant: acme, jobs: 1, arrivals: {kind: burst}, prompt_words: {min: 3, max: 2}}]",
            "prompt_words",
        ),
        ("name: [", "YAML"),
    ],
)
def test_a_wrong_scenario_is_refused_in_one_line_naming_the_field(tmp_path: Path, text: str, names: str) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(text)
    with pytest.raises(ScenarioError) as refused:
        Scenario.load(path)
    assert names in str(refused.value) and "\n" not in str(refused.value)


def test_an_unknown_scenario_lists_the_known_ones() -> None:
    with pytest.raises(ScenarioError, match="smoke"):
        Scenario.load("nothing-of-the-kind")


def event(kind: str, job: str = "r-0-0", seq: int = 0, attempt: str = "A", **more: Any) -> dict[str, Any]:
    return {"type": kind, "job_id": job, "run": 0, "attempt": attempt, "seq": seq, **more}


def tally(*jobs: str) -> Tally:
    made = Tally(["acme"])
    for job in jobs:
        made.published(job, 0, 100.0)
    return made


USAGE = {"prompt_tokens": 3, "completion_tokens": 5}


def test_the_tally_of_a_clean_run() -> None:
    count = tally("r-0-0", "r-0-1")
    for job in ("r-0-0", "r-0-1"):
        assert count.take(event("started", job), 0, 10, 100.1) is None
        assert count.take(event("chunk", job, 1, tokens=2), 0, 10, 100.2) is None
        assert count.take(event("chunk", job, 2, tokens=3), 0, 10, 100.4) is None
        assert count.take(event("completed", job, 3, usage=USAGE), 0, 10, 101.0) == 0
    report = {**count.report(), "planned": 2, "scenario": "s"}
    assert good(report)
    assert report["completion_tokens"] == 10 and report["tokens_per_s"] == 10.0 and report["jobs_per_s"] == 2.0
    assert report["first_token_ms"]["p50"] == pytest.approx(200, abs=0.1)
    assert report["started_ms"]["p50"] == pytest.approx(100, abs=0.1)
    assert report["per_token_ms"]["p50"] == pytest.approx(200, abs=0.1)
    assert report["tenants"]["acme"]["jobs"] == 2 and "2 of 2 jobs" in told(report)


def test_lost_jobs_gaps_repeats_and_further_terminals_are_counted() -> None:
    count = tally("r-0-0", "r-0-1", "r-0-2")
    for one in (
        event("started"),
        event("chunk", seq=1, tokens=1),
        event("chunk", seq=1, tokens=1),
        event("chunk", seq=4, tokens=1),
        event("completed", seq=5, usage=USAGE),
        event("completed", seq=0, attempt="B", usage=USAGE),
    ):
        count.take(one, 0, 10, 101.0)
    count.take(event("failed", "r-0-1", error={"code": "internal"}), 0, 10, 101.0)
    count.take(event("completed", "another-run", usage=USAGE), 0, 10, 101.0)
    report = {**count.report(), "planned": 3}
    assert not good(report)
    assert (report["lost"], report["seq_gaps"], report["seq_repeats"], report["suppressed"]) == (1, 2, 1, 1)
    assert (report["duplicated"], report["reruns"], report["codes"]) == (0, 1, {"internal": 1})


def test_only_ends_without_a_common_order_are_doubled() -> None:
    assert doubled([(0, 1), (0, 2)])
    assert not doubled([(0, 1), (0, 1)]) and not doubled([(0, 1), (1, 2)]) and not doubled([])


def test_percentiles_are_of_the_values_measured() -> None:
    assert delays([]) is None
    found = delays([n / 1000 for n in range(1, 101)])
    assert found == {"p50": 51.0, "p95": 96.0, "p99": 100.0, "max": 100.0, "count": 100}
