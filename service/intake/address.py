"""Where a job's events may go. Decides whether an address is usable; never looks at a topic on the broker."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from schemas.errors import ErrorCode, Undeliverable
from schemas.fields import is_topic
from schemas.names import REPLIES, reply_topic_of
from schemas.tenants import Tenant
from service.intake.headers import Headers

# Topics of any pool, whatever its name: a job must not write where jobs or the service's own records are read.
_POOL_TOPIC = re.compile(r"inference\..+\.(?:jobs\.[^.]+(?:\.[^.]+)?|deferred|overflow|status)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Address:
    topic: str
    partition: int | None


def is_reserved(topic: str) -> bool:
    """Kafka's internal topics, and all of the service's own but the reply topics."""
    if topic.startswith("__"):
        return True
    if not topic.startswith("inference."):
        return False
    return not (topic == REPLIES or topic.startswith(f"{REPLIES}.")) or _POOL_TOPIC.fullmatch(topic) is not None


def resolve(
    reply: object, headers: Headers, tenant: Tenant | None, reserved: Collection[str], *, own: bool = False
) -> Address:
    """The job's own words, else the headers, else the tenant's default. `tenant` is None if nobody knows it: then only
    the common reply topic will do. `own`: each tenant has a default topic of its own, and the common one is the
    operators'. Raises Undeliverable."""
    if reply is None:
        reply = {}
    if not isinstance(reply, dict):
        raise _refused("reply must be an object with topic, partition, stream and progress")
    topic, partition = reply.get("topic"), reply.get("partition")
    if topic is None:
        topic = headers.reply_topic
    if partition is None and headers.reply_partition is not None and topic == headers.reply_topic:
        partition = headers.reply_partition
    if topic is None:
        topic = REPLIES if tenant is None else tenant.own_reply_topic if own else tenant.reply_topic
    if not isinstance(topic, str) or not is_topic(topic):
        raise _refused("reply.topic is not the name of a Kafka topic")
    if partition is not None and (type(partition) is not int or partition < 0):
        raise _refused("reply.partition must be a partition number of the reply topic")
    if own and tenant is not None and topic == reply_topic_of(tenant.id):
        return Address(topic, partition)
    if is_reserved(topic) or topic in reserved:
        raise _refused(f"reply.topic {topic} is an internal topic; name a reply topic of your own")
    if tenant is None:
        if topic != REPLIES:
            raise Undeliverable(
                ErrorCode.UNKNOWN_TENANT, "the tenant is not in the registry, so that its reply topic cannot be trusted"
            )
    elif own and topic != tenant.own_reply_topic and (topic == REPLIES or topic.startswith(f"{REPLIES}.")):
        raise _refused(f"reply.topic {topic} is not this tenant's; its own is {tenant.own_reply_topic}")
    elif not tenant.may_reply_to(topic):
        raise _refused(
            f"reply.topic {topic} is not among the topics of this tenant; use one that its registry entry allows"
        )
    return Address(topic, partition)


def _refused(message: str) -> Undeliverable:
    return Undeliverable(ErrorCode.REPLY_TOPIC_REFUSED, message)
