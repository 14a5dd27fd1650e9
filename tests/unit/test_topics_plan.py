"""The plan of topics keeps what delivery.md promises; comparing it with a cluster finds every deviation."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas import names
from service.tenants import load
from service.topics import COPY_BYTES, MAX_JOB_BYTES, Found, compare, doubts, job_retention_s, plan

PLAN = {topic.name: topic for topic in plan("default", 48)}


def found() -> dict[str, Found]:
    return {topic.name: Found(topic.partitions, topic.config, topic.config) for topic in PLAN.values()}


def test_every_name_on_the_wire_is_planned() -> None:
    own = {*names.jobs_topics("default"), names.deferred_topic("default"), names.overflow_topic("default")}
    own.add(names.status_topic("default"))
    shared = {names.REPLIES, names.DEAD_LETTERS, names.CANCEL, names.CONTROL, names.USAGE, names.TENANTS, names.MODELS}
    assert set(PLAN) == own | shared
    assert {topic.name for topic in PLAN.values() if topic.exact} == own


@given(st.integers(1, 1000))
def test_all_topics_of_a_pool_have_equal_counts(partitions: int) -> None:  # R1
    assert {topic.partitions for topic in plan("p", partitions) if topic.exact} == {partitions}


def test_cancels_and_jobs_carry_the_brokers_time() -> None:  # R13
    for name in (*names.jobs_topics("default"), names.CANCEL):
        assert PLAN[name].config["message.timestamp.type"] == "LogAppendTime"


def test_a_cancel_outlives_the_jobs_it_may_hit() -> None:  # R13
    cancel = PLAN[names.CANCEL].config
    assert "compact" in cancel["cleanup.policy"]
    for name in names.jobs_topics("default"):
        assert int(cancel["retention.ms"]) >= int(PLAN[name].config["retention.ms"])


def test_a_copy_of_the_largest_job_fits() -> None:  # R15
    for name in (names.DEAD_LETTERS, names.deferred_topic("default"), names.overflow_topic("default")):
        assert int(PLAN[name].config["max.message.bytes"]) == MAX_JOB_BYTES + COPY_BYTES


def test_status_is_compacted_and_short() -> None:
    status = PLAN[names.status_topic("default")].config
    assert set(status["cleanup.policy"].split(",")) == {"compact", "delete"}
    assert status["retention.ms"] == "86400000"
    assert int(status["segment.ms"]) < 86_400_000  # an open segment is neither compacted nor deleted


def test_acknowledged_means_two_copies_where_there_are_three() -> None:
    assert all(topic.config["min.insync.replicas"] == "2" for topic in plan("p", 6, 3))
    assert not any("min.insync.replicas" in topic.config for topic in plan("p", 6, 1))


def test_a_cluster_as_planned_has_no_findings() -> None:
    assert compare(tuple(PLAN.values()), found()) == []


def test_a_missing_topic_is_found_with_the_command_that_makes_it() -> None:
    cluster = found()
    del cluster[names.CANCEL]
    (finding,) = compare(tuple(PLAN.values()), cluster)
    assert finding.topic == names.CANCEL and "headrace topics apply" in str(finding)


def test_a_wrong_count_is_found_for_the_pools_own_topics_only() -> None:
    cluster = found()
    for name in (names.status_topic("default"), names.REPLIES):
        cluster[name] = Found(7, cluster[name].config, {})
    (finding,) = compare(tuple(PLAN.values()), cluster)
    assert finding.topic == names.status_topic("default")
    assert "7 partitions" in finding.problem and "HEADRACE_PARTITIONS=7" in finding.remedy


@pytest.mark.parametrize(
    ("key", "value", "refused"),
    [
        ("message.timestamp.type", "CreateTime", True),
        ("max.message.bytes", "1000", True),
        ("max.message.bytes", "99999999", False),  # more does no harm
        ("cleanup.policy", "compact", True),
        ("retention.ms", "1", False),  # an operator's to tune
    ],
)
def test_settings_that_a_promise_rests_on_are_binding(key: str, value: str, refused: bool) -> None:
    name = names.jobs_topic("default", "standard")
    cluster = found()
    cluster[name] = Found(48, {**cluster[name].config, key: value}, {})
    assert bool(compare(tuple(PLAN.values()), cluster)) is refused


def kept(cluster: dict[str, Found], name: str, retention_ms: int) -> None:
    real = cluster[name]
    cluster[name] = Found(real.partitions, {**real.config, "retention.ms": str(retention_ms)}, {})


def test_jobs_are_kept_as_long_as_where_they_are_kept_shortest() -> None:
    cluster = found()
    assert job_retention_s("default", cluster) == 7 * 86_400
    kept(cluster, names.deferred_topic("default"), 3_600_000)
    assert job_retention_s("default", cluster) == 3600
    for name in (*names.jobs_topics("default"), names.deferred_topic("default"), names.overflow_topic("default")):
        kept(cluster, name, -1)
    assert job_retention_s("default", cluster) == math.inf


def test_cancels_that_are_forgotten_before_their_jobs_are_warned_of() -> None:
    cluster = found()
    assert doubts("default", cluster) == []
    kept(cluster, names.jobs_topic("default", "bulk"), 30 * 86_400_000)
    (doubt,) = doubts("default", cluster)
    assert doubt.warning and doubt.topic == names.CANCEL and "192 hours" in doubt.problem and "720" in doubt.problem
    kept(cluster, names.CANCEL, -1)
    assert doubts("default", cluster) == []
    kept(cluster, names.jobs_topic("default", "bulk"), -1)
    assert doubts("default", cluster) == []


def test_the_order_of_cleanup_policies_does_not_matter() -> None:
    name = names.status_topic("default")
    cluster = found()
    cluster[name] = Found(48, {**cluster[name].config, "cleanup.policy": "delete,compact"}, {})
    assert compare(tuple(PLAN.values()), cluster) == []


def test_the_development_tenants_are_valid() -> None:
    tenants = load(Path(__file__).parents[2] / "infra" / "dev" / "tenants.yaml")
    assert set(tenants) == {"acme", "globex", "initech"}
    assert {tenant.tier for tenant in tenants.values()} == set(names.TIERS)
