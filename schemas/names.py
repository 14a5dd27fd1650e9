"""Every name that is on the wire: topics and record headers. No other file spells one."""

from __future__ import annotations

import re
from typing import NamedTuple

SCHEMA_VERSION = 1

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
EMBEDDINGS = "/v1/embeddings"

TIERS = ("interactive", "standard", "bulk")
_JOBS_TOPIC = re.compile(rf"inference\.(.+)\.jobs\.({'|'.join(TIERS)})(?:\.([A-Za-z0-9_-]+))?", re.ASCII)

REPLIES = "inference.replies"
DEAD_LETTERS = "inference.dead-letters"
CANCEL = "inference.cancel"
CONTROL = "inference.control"
USAGE = "inference.usage"
TENANTS = "inference.tenants"
MODELS = "inference.models"


def jobs_topic(pool: str, tier: str, tenant: str | None = None) -> str:
    """Where jobs of a tier are published; with a tenant, its own topic (identity mode `topic`)."""
    shared = f"inference.{pool}.jobs.{tier}"
    return shared if tenant is None else f"{shared}.{tenant}"


def jobs_topics(pool: str) -> tuple[str, ...]:
    return tuple(jobs_topic(pool, tier) for tier in TIERS)


def deferred_topic(pool: str) -> str:
    return f"inference.{pool}.deferred"


def overflow_topic(pool: str) -> str:
    return f"inference.{pool}.overflow"


def consumed_topics(pool: str) -> tuple[str, ...]:
    """What a pool's workers read as one group; partition n of each belongs to the same worker (R1)."""
    return (*jobs_topics(pool), deferred_topic(pool), overflow_topic(pool))


def status_topic(pool: str) -> str:
    return f"inference.{pool}.status"


def group_id(pool: str) -> str:
    """The consumer group of a pool's workers."""
    return f"headrace.{pool}"


class JobsTopic(NamedTuple):
    """What the name of a jobs topic says."""

    pool: str
    tier: str
    tenant: str | None  # None: a topic that all tenants share


def parse_jobs_topic(topic: str) -> JobsTopic | None:
    """None: not a jobs topic."""
    found = _JOBS_TOPIC.fullmatch(topic)
    return JobsTopic(found[1], found[2], found[3]) if found is not None else None


def tier_of(topic: str) -> str:
    """The tier a jobs topic serves; records of other topics count as `standard`."""
    found = parse_jobs_topic(topic)
    return found.tier if found is not None else "standard"


def cancel_topic(tenant: str | None = None) -> str:
    """Where cancels are published; with a tenant, its own topic (identity mode `topic`)."""
    return CANCEL if tenant is None else f"{CANCEL}.{tenant}"


def reply_topic_of(tenant: str) -> str:
    """A tenant's own default reply topic, where it is not the common one (identity modes `topic` and `signed`)."""
    return f"{REPLIES}.{tenant}"


# Request headers. Spring's binary forms of the reply headers are read too (service/intake).
H_TRACEPARENT = "traceparent"
H_TRACESTATE = "tracestate"
H_BAGGAGE = "baggage"
H_CORRELATION = "correlation_id"
H_REPLY_TO = "reply_to"
H_REPLY_PARTITION = "reply_partition"
H_SPRING_REPLY_TO = "kafka_replyTopic"
H_SPRING_REPLY_PARTITION = "kafka_replyPartition"
H_SPRING_CORRELATION = "kafka_correlationId"
H_AUTHORIZATION = "authorization"  # a JWT, signed mode (schemas/verification.py)

# Headers the service itself writes.
H_TYPE = "t"  # reply events: type, attempt and number, so that a reader can filter without parsing
H_ATTEMPT = "a"
H_SEQ = "s"
H_ORIGIN = "headrace-origin"  # topic/partition/offset of a record's first place (delivery.md R7)
H_STARTS = "headrace-starts"  # unclean starts so far (R11)
H_REASON = "headrace-reason"  # dead letters: the error code
H_MESSAGE = "headrace-message"  # dead letters: what is wrong and what to do
H_ATTEMPTS = "headrace-attempts"
H_FAILED_AT = "headrace-failed-at"
H_REPLAY_OF = "headrace-replay-of"  # replayed jobs: topic/partition/offset of the dead letter
H_REPLAYED = "headrace-replayed"  # notes beside dead letters: partition/offset of the letter that was replayed
H_DUE = "headrace-due"  # deferred records: when their time comes, milliseconds since 1970 (R12)
H_HOP = "headrace-hop"  # records sent on by another pool, whose name it is: they are not sent on again
H_JOB = "headrace-job"  # deferred records: tenant|job id|run, so that a cancel finds them unread
H_SEAL = "headrace-seal"  # that the service vouches for the sender of this record (service/credentials/seal.py)
H_PUBLISHED = "headrace-published"  # copies: the broker's time of the record's first place, milliseconds (R13)

# Headers of the service itself begin so; a replay leaves them behind.
SERVICE_HEADERS = "headrace-"
