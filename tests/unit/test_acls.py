"""The rights that workers and tenants get: what they need in each identity mode, and nothing of anybody else."""

from __future__ import annotations

from typing import Any

import pytest

from schemas import names
from schemas.tenants import Tenant
from service import acls
from service.acls import Acl
from service.own_topics import own_topics
from service.settings import Settings

ACME, GLOBEX = Tenant(id="acme", tier="bulk"), Tenant(id="globex", reply_topics=["*", "answers", "g-*-x"])


def settings(mode: Any) -> Settings:
    return Settings(pool="p", identity=mode, service_secret="s")


def may(rights: list[Acl], operation: str, topic: str) -> bool:
    return any(
        operation in acl.operations and (topic == acl.name or (acl.prefix and topic.startswith(acl.name)))
        for acl in rights
        if acl.resource == "topic"
    )


@pytest.mark.parametrize("tier", names.TIERS)
def test_in_topic_mode_a_tenant_writes_to_its_own_topics_only(tier: Any) -> None:
    rights = acls.tenant(settings("topic"), ACME, "User:acme")
    assert may(rights, "Write", names.jobs_topic("p", tier, "acme"))
    for foreign in (
        names.jobs_topic("p", tier),
        names.jobs_topic("p", tier, "acme2"),
        names.jobs_topic("p", tier, "a"),
    ):
        assert not may(rights, "Write", foreign)
    assert may(rights, "Write", names.cancel_topic("acme")) and not may(rights, "Write", names.CANCEL)


def test_in_signed_mode_tenants_share_topics_and_still_read_only_their_own_answers() -> None:
    rights = acls.tenant(settings("signed"), ACME, "User:acme")
    assert may(rights, "Write", names.jobs_topic("p", "standard")) and may(rights, "Write", names.CANCEL)
    assert may(rights, "Read", "inference.replies.acme") and may(rights, "Read", "acme.answers")
    for foreign in (names.REPLIES, "inference.replies.globex", "acme", "globex.answers"):
        assert not may(rights, "Read", foreign), foreign


@pytest.mark.parametrize("mode", ["trusted", "topic", "signed"])
@pytest.mark.parametrize("tenant", [ACME, GLOBEX])
def test_no_tenant_gets_at_what_is_the_services(mode: str, tenant: Tenant) -> None:
    rights = acls.tenant(settings(mode), tenant, "User:t")
    for topic in (
        *(names.deferred_topic("p"), names.overflow_topic("p"), names.status_topic("p")),
        *(names.DEAD_LETTERS, names.USAGE, names.TENANTS, names.MODELS, names.CONTROL),
    ):
        assert not may(rights, "Write", topic) and not may(rights, "Read", topic), topic
    assert not any(may(rights, "Read", names.jobs_topic("p", tier)) for tier in names.TIERS)
    assert all(acl.resource == "topic" for acl in rights)


def test_a_pattern_becomes_a_right_only_as_far_as_a_prefix_says_it() -> None:
    rights = acls.tenant(settings("signed"), GLOBEX, "User:globex")
    assert may(rights, "Read", "answers") and not may(rights, "Read", "answers.of.acme")
    assert not any(acl.name in ("", "g-") for acl in rights)


def test_a_worker_reads_every_tenants_jobs_and_writes_what_it_must() -> None:
    rights = acls.worker(settings("topic"), "User:worker", [ACME, GLOBEX])
    for topic in (names.jobs_topic("p", "bulk", "acme"), names.jobs_topic("p", "bulk"), names.cancel_topic("acme")):
        assert may(rights, "Read", topic) and not may(rights, "Write", topic)
    for topic in (names.status_topic("p"), names.deferred_topic("p"), "inference.replies.acme", "acme.x", "answers"):
        assert may(rights, "Write", topic) and may(rights, "Read", topic)
    assert not may(rights, "Read", names.jobs_topic("other", "bulk"))
    assert not may(rights, "Write", names.TENANTS)
    assert {acl.name for acl in rights if acl.resource == "group"} == {names.group_id("p")}


def test_a_right_is_printed_as_kafkas_own_tool_takes_it() -> None:
    one = Acl("User:acme", "topic", "acme.", ("Read", "Describe"), prefix=True)
    assert one.command() == (
        "--allow-principal 'User:acme' --operation Read --operation Describe --topic 'acme.'"
        " --resource-pattern-type prefixed"
    )
    assert Acl("User:w", "cluster", acls.CLUSTER, ("Describe",)).command().endswith("--operation Describe --cluster")


def test_each_mode_has_its_own_topics() -> None:
    def made(mode: str) -> set[str]:
        return {topic.name for topic in own_topics(settings(mode), [ACME, Tenant(id="x", reply_topic="x.answers")])}

    assert made("trusted") == set()
    assert made("signed") == {"inference.replies.acme"}
    assert made("topic") == {
        *("inference.replies.acme", "inference.p.jobs.bulk.acme", "inference.cancel.acme"),
        *("inference.p.jobs.standard.x", "inference.cancel.x"),
    }
    jobs = next(t for t in own_topics(settings("topic"), [ACME]) if "jobs" in t.name)
    assert (jobs.exact, jobs.partitions, jobs.optional) == (True, 48, True)
    assert jobs.config["message.timestamp.type"] == "LogAppendTime"


@pytest.mark.parametrize(
    ("topic", "said"),
    [
        ("inference.p.jobs.bulk", ("p", "bulk", None)),
        ("inference.p.jobs.bulk.acme", ("p", "bulk", "acme")),
        ("inference.p.jobs.standard.bulk", ("p", "standard", "bulk")),
        ("inference.a.b.jobs.bulk.x-y_1", ("a.b", "bulk", "x-y_1")),
        ("inference.p.jobs.fast", None),
        ("inference.p.jobs.bulk.a.b", None),
        ("inference.p.deferred", None),
        ("acme.jobs.bulk", None),
    ],
)
def test_what_a_jobs_topics_name_says(topic: str, said: tuple[str, str, str | None] | None) -> None:
    assert names.parse_jobs_topic(topic) == said
