"""Which topics a pool needs, whether a cluster has them so, and making them (design.md §4).

The service never creates a topic on the side: `apply` is for operators (`headrace topics apply`) and the local stack,
`require` for a worker before it joins. Partition counts are never changed in place: a key would move to another one.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import KafkaError, TopicAlreadyExistsError, for_code

from schemas import names
from service.settings import Settings

log = logging.getLogger(__name__)

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS

# A job's record, as stored: key, value and headers of the largest one. Larger inputs come by claim check.
MAX_JOB_BYTES = 1_048_576
# What a copy of a job's record may add in headers: origin, reason, attempts (R15).
COPY_BYTES = 65_536

JOBS_RETENTION_MS = 7 * DAY_MS
# Longer than any job that it may hit can lie there (R13), so that a late job still meets its cancel.
CANCEL_RETENTION_MS = JOBS_RETENTION_MS + DAY_MS
STATUS_RETENTION_MS = DAY_MS
# How long a client may be away and still resume a stream.
REPLIES_RETENTION_MS = 12 * HOUR_MS
DEAD_RETENTION_MS = 30 * DAY_MS
USAGE_RETENTION_MS = 30 * DAY_MS
CONTROL_RETENTION_MS = HOUR_MS
# Retention and compaction spare the segment that is being written; a topic of hours needs segments of less.
SHORT_SEGMENT_MS = HOUR_MS

# Topics shared by all pools need no equal counts; few partitions are enough for what is written once a job or less.
SHARED_PARTITIONS = 6

COMMAND = "headrace topics apply"
REMEDY = f"run: {COMMAND}"
MISSING = "is missing"
# How long a change may take from the controller to every broker: tens of milliseconds, more on a busy machine.
SETTLE_S = 15.0

# Compared by `check`: without these a promise breaks. Others (retention) are an operator's to tune.
BINDING = ("cleanup.policy", "message.timestamp.type", "max.message.bytes")


@dataclass(frozen=True)
class Topic:
    name: str
    partitions: int
    # The count is binding: partition n of one topic belongs to partition n of the others (R1).
    exact: bool
    config: Mapping[str, str]
    optional: bool = False  # a worker does without it until it is there


@dataclass(frozen=True)
class Finding:
    """One thing that is not as it must be; `remedy` is a command or what else to do."""

    topic: str  # empty: it is about the broker
    problem: str
    remedy: str
    warning: bool = False  # a worker starts all the same

    def __str__(self) -> str:
        return f"{self.topic}{': ' if self.topic else ''}{self.problem}; {self.remedy}"


class TopicsRefused(Exception):
    """The cluster's topics do not fit; the message names every problem and what mends it."""

    def __init__(self, findings: list[Finding]) -> None:
        missing = [finding for finding in findings if finding.problem == MISSING]
        told = [str(finding) for finding in findings if len(missing) < 2 or finding not in missing]
        if len(missing) > 1:
            told.insert(0, f"{len(missing)} topics are missing ({', '.join(one.topic for one in missing)}); {REMEDY}")
        super().__init__(" | ".join(told))
        self.findings = findings


class BrokerUnreachable(Exception):
    """No answer from the cluster; one line."""


@dataclass
class Applied:
    created: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)  # what `apply` must not mend by itself


@dataclass(frozen=True)
class Found:
    """A topic as the cluster has it; `own` are the settings made on the topic itself."""

    partitions: int
    config: Mapping[str, str]
    own: Mapping[str, str]


def plan(pool: str, partitions: int, replication_factor: int = 1) -> tuple[Topic, ...]:
    """All topics that a pool works with, its own first."""
    # Cancels are compared with jobs by the broker's time, and token times too (R13, tenancy.md §2).
    broker_time = {"message.timestamp.type": "LogAppendTime"}
    jobs = _kept(JOBS_RETENTION_MS) | broker_time | {"max.message.bytes": str(MAX_JOB_BYTES)}
    copies = {"max.message.bytes": str(MAX_JOB_BYTES + COPY_BYTES)}
    own: dict[str, Mapping[str, str]] = dict.fromkeys(names.jobs_topics(pool), jobs)
    own |= dict.fromkeys((names.deferred_topic(pool), names.overflow_topic(pool)), jobs | copies)
    own[names.status_topic(pool)] = _compacted(STATUS_RETENTION_MS, short=True)
    shared: dict[str, Mapping[str, str]] = {
        names.REPLIES: _kept(REPLIES_RETENTION_MS, short=True),
        names.USAGE: _kept(USAGE_RETENTION_MS),
        names.DEAD_LETTERS: _kept(DEAD_RETENTION_MS) | copies,
        names.CANCEL: _compacted(CANCEL_RETENTION_MS) | broker_time,
        names.CONTROL: _kept(CONTROL_RETENTION_MS, short=True),
        names.TENANTS: {"cleanup.policy": "compact"},
        names.MODELS: {"cleanup.policy": "compact"},
    }
    counts = {
        names.REPLIES: partitions,  # as many streams as the jobs topics feed
        names.CONTROL: 1,
        names.TENANTS: 1,  # a registry is read whole and in order
        names.MODELS: 1,
    }
    # acks=all means this many copies; one less than there are, so that one broker may be away.
    safety = {"min.insync.replicas": str(replication_factor - 1)} if replication_factor >= 3 else {}
    return (
        *(Topic(name, partitions, True, {**config, **safety}) for name, config in own.items()),
        *(
            Topic(name, counts.get(name, min(partitions, SHARED_PARTITIONS)), False, {**config, **safety})
            for name, config in shared.items()
        ),
    )


def compare(wanted: tuple[Topic, ...], found: Mapping[str, Found]) -> list[Finding]:
    """What differs from the plan. Pure."""
    findings = []
    for topic in wanted:
        real = found.get(topic.name)
        if real is None:
            findings.append(Finding(topic.name, MISSING, REMEDY, warning=topic.optional))
            continue
        if topic.exact and real.partitions != topic.partitions:
            findings.append(_wrong_count(topic, real))
        for key in _differing(topic, real):
            problem = f"has {key}={real.config.get(key)} instead of {topic.config[key]}"
            findings.append(Finding(topic.name, problem, REMEDY))
    return findings


def job_retention_s(pool: str, found: Mapping[str, Found]) -> float:
    """The shortest time that a job's record is kept, wherever it lies in this pool; seconds. Pure."""
    return min((_retention_s(found[name]) for name in _job_holders(pool) if name in found), default=math.inf)


def doubts(pool: str, found: Mapping[str, Found]) -> list[Finding]:
    """What is an operator's to tune and has been tuned too far. Pure."""
    cancels = found.get(names.CANCEL)
    longest = max((_retention_s(found[name]) for name in _job_holders(pool) if name in found), default=0.0)
    if cancels is None or _retention_s(cancels) >= longest:
        return []
    return [
        Finding(
            names.CANCEL,
            f"keeps cancels for {_retention_s(cancels) / 3600:g} hours and jobs are kept for {longest / 3600:g}: "
            "a job that waits longer may run although it was cancelled",
            "raise retention.ms there, or lower it on the pool's topics",
            warning=True,
        )
    ]


async def check(settings: Settings, more: Iterable[Topic] = ()) -> list[Finding]:
    """Everything that is not as it must be; empty = good. `more`: beside the pool's. Raises BrokerUnreachable."""
    return (await _judge(settings, more))[0]


async def require(settings: Settings) -> float:
    """A worker's start; returns how long jobs are kept at least, seconds. Raises TopicsRefused, BrokerUnreachable."""
    findings, found = await _judge(settings)
    if refused := [finding for finding in findings if not finding.warning]:
        raise TopicsRefused(refused)
    for finding in findings:
        log.warning("%s", finding)
    return job_retention_s(settings.pool, found)


async def _judge(settings: Settings, more: Iterable[Topic] = ()) -> tuple[list[Finding], Mapping[str, Found]]:
    wanted = (*_plan(settings), *more)
    async with _admin(settings) as admin:
        broker = await _broker(admin)
        found = await _look(admin, wanted)
    return broker + compare(wanted, found) + doubts(settings.pool, found), found


async def apply(settings: Settings, more: Iterable[Topic] = ()) -> Applied:
    """Creates what is missing, sets what differs except partition counts. `more`: beside the pool's.

    Raises BrokerUnreachable, TopicsRefused.
    """
    wanted = (*_plan(settings), *more)
    done = Applied()
    async with _admin(settings) as admin:
        done.findings += await _broker(admin)
        found = await _look(admin, wanted)
        missing = [topic for topic in wanted if topic.name not in found]
        if missing:
            await _create(admin, missing, settings.replication_factor)
            done.created = [topic.name for topic in missing]
        for topic in wanted:
            real = found.get(topic.name)
            if real is None:
                continue
            if topic.exact and real.partitions != topic.partitions:
                done.findings.append(_wrong_count(topic, real))
            if differing := _differing(topic, real):
                await _set(admin, topic, real, differing)
                done.changed.append(topic.name)
        if done.created or done.changed:
            await _settle(admin, wanted)
        done.findings += doubts(settings.pool, found)
    return done


def _plan(settings: Settings) -> tuple[Topic, ...]:
    return plan(settings.pool, settings.partitions, settings.replication_factor)


def _job_holders(pool: str) -> tuple[str, ...]:
    return (*names.jobs_topics(pool), names.deferred_topic(pool), names.overflow_topic(pool))


def _retention_s(topic: Found) -> float:
    kept = int(topic.config.get("retention.ms") or -1)
    return kept / 1000 if kept >= 0 else math.inf


def _kept(retention_ms: int, *, short: bool = False) -> dict[str, str]:
    config = {"cleanup.policy": "delete", "retention.ms": str(retention_ms)}
    return config | ({"segment.ms": str(SHORT_SEGMENT_MS)} if short else {})


def _compacted(retention_ms: int, *, short: bool = False) -> dict[str, str]:
    return _kept(retention_ms, short=short) | {"cleanup.policy": "compact,delete"}


def _wrong_count(topic: Topic, real: Found) -> Finding:
    return Finding(
        topic.name,
        f"has {real.partitions} partitions, this pool is set to {topic.partitions}",
        f"set HEADRACE_PARTITIONS={real.partitions}, or delete the pool's topics and run: {COMMAND}"
        " (counts are never changed in place)",
    )


def _differing(topic: Topic, real: Found) -> list[str]:
    keys = []
    for key in BINDING:
        want = topic.config.get(key)
        if want is None:
            continue
        have = real.config.get(key, "")
        if key == "max.message.bytes":
            same = have.isdigit() and int(have) >= int(want)  # more does no harm
        else:
            same = sorted(have.split(",")) == sorted(want.split(","))
        if not same:
            keys.append(key)
    return keys


@asynccontextmanager
async def _admin(settings: Settings) -> AsyncIterator[AIOKafkaAdminClient]:
    address = settings.kafka.bootstrap
    admin = AIOKafkaAdminClient(
        **settings.kafka.connection(),
        request_timeout_ms=settings.kafka.request_timeout_ms,
        client_id="headrace-topics",
    )
    try:
        await admin.start()
        yield admin
    except (KafkaError, OSError, TimeoutError) as error:
        raise BrokerUnreachable(
            f"Kafka at {address} does not answer ({type(error).__name__}){settings.kafka.security.hint}; "
            "start it (headrace up) or set HEADRACE_KAFKA__BOOTSTRAP"
        ) from error
    finally:
        await admin.close()


async def _broker(admin: AIOKafkaAdminClient) -> list[Finding]:
    """R16: with automatic creation a mistyped reply topic would come into being instead of being refused."""
    cluster = await admin.describe_cluster()
    brokers = [str(broker["node_id"]) for broker in cluster["brokers"]]
    wanted = [ConfigResource(ConfigResourceType.BROKER, node, {"auto.create.topics.enable": ""}) for node in brokers]
    answers = await admin.describe_configs(wanted)
    on = [
        resource["resource_name"]
        for answer in answers
        for resource in answer.to_object()["resources"]
        # Without the right to see a broker's settings nothing can be said about them.
        if resource["error_code"] == 0 and _entries(resource).get("auto.create.topics.enable") == "true"
    ]
    if not on:
        return []
    return [
        Finding(
            "",
            f"automatic topic creation is on (broker {', '.join(on)})",
            "set auto.create.topics.enable=false in the broker's server.properties and restart it",
        )
    ]


async def _look(admin: AIOKafkaAdminClient, wanted: tuple[Topic, ...]) -> dict[str, Found]:
    asked = {topic.name for topic in wanted}
    # All topics' metadata, not only of ours: asking for a missing one by name may create it.
    counts = {
        topic["topic"]: len(topic["partitions"]) for topic in await admin.describe_topics() if topic["topic"] in asked
    }
    if not counts:
        return {}
    found = {}
    answers = await admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, name, None) for name in counts])
    for answer in answers:
        for resource in answer.to_object()["resources"]:
            name = resource["resource_name"]
            _raise_for(resource["error_code"], f"reading the settings of {name}")
            found[name] = Found(counts[name], _entries(resource), _entries(resource, own=True))
    return found


def _entries(resource: dict[str, Any], *, own: bool = False) -> dict[str, str]:
    """Settings by name; with `own` only those made on the resource itself (source 1 = dynamic topic setting)."""
    return {
        entry["config_names"]: entry["config_value"] or ""
        for entry in resource["config_entries"]
        if not own or entry.get("config_source", 1) == 1
    }


async def _create(admin: AIOKafkaAdminClient, topics: list[Topic], replication_factor: int) -> None:
    new = [
        NewTopic(topic.name, topic.partitions, replication_factor, topic_configs=dict(topic.config)) for topic in topics
    ]
    answer = await admin.create_topics(new)
    for topic, code, *rest in answer.topic_errors:
        if code not in (0, TopicAlreadyExistsError.errno):  # somebody else applied at the same moment
            _raise_for(code, f"creating {topic}", *rest)


async def _set(admin: AIOKafkaAdminClient, topic: Topic, real: Found, keys: list[str]) -> None:
    """This call replaces all settings of a topic, so those that it has are sent along."""
    config = dict(real.own) | {key: topic.config[key] for key in keys}
    for answer in await admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, topic.name, config)]):
        for resource in answer.to_object()["resources"]:
            _raise_for(resource["error_code"], f"setting {', '.join(keys)} of {topic.name}")


async def _settle(admin: AIOKafkaAdminClient, wanted: tuple[Topic, ...]) -> None:
    """Waits until the brokers show what their controller has accepted, so that a worker may start right afterwards."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        findings = [one for one in compare(wanted, await _look(admin, wanted)) if one.remedy == REMEDY]
        if not findings:
            return
        if time.monotonic() > deadline:
            raise TopicsRefused(findings)
        await asyncio.sleep(0.05)


def _raise_for(code: int, doing: str, message: str | None = None) -> None:
    if code != 0:
        error = for_code(code)
        raise TopicsRefused(
            [Finding("", f"{doing} failed: {message or error.description}", "check the rights of this client")]
        )
