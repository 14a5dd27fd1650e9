"""Which rights on Kafka each party needs, and giving them (docs/tenancy.md). `worker` and `tenant` decide and are pure.

Rights are only added: what a principal has beyond these is an operator's to take away.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from aiokafka.client import AIOKafkaClient
from aiokafka.errors import KafkaError, for_code
from aiokafka.protocol.admin import CreateAclsRequest

from schemas import names
from schemas.tenants import Tenant
from service.settings import KafkaSettings, Settings
from service.topics import BrokerUnreachable

Resource = Literal["topic", "group", "cluster"]
Operation = Literal["Read", "Write", "Describe", "DescribeConfigs"]

CLUSTER = "kafka-cluster"
# Numbers of Kafka's protocol.
_RESOURCES = {"topic": 2, "group": 3, "cluster": 4}
_OPERATIONS = {"Read": 3, "Write": 4, "Describe": 8, "DescribeConfigs": 10}
_LITERAL, _PREFIXED = 3, 4
_ALLOW = 3
# Seconds of one request; and until every broker knows a right: a client that asks before is refused.
ANSWER_S = 10.0
SETTLE_S = 0.5


class AclsRefused(Exception):
    """The cluster does not give these rights; one line."""


@dataclass(frozen=True, slots=True)
class Acl:
    principal: str  # with its kind: `User:acme`
    resource: Resource
    name: str
    operations: tuple[Operation, ...]
    prefix: bool = False  # `name` is the beginning of many

    def command(self) -> str:
        """As options of Kafka's own tool: `kafka-acls.sh --bootstrap-server … --add` before them."""
        operations = " ".join(f"--operation {operation}" for operation in self.operations)
        kind = f"--{self.resource}" if self.resource == "cluster" else f"--{self.resource} '{self.name}'"
        pattern = " --resource-pattern-type prefixed" if self.prefix else ""
        return f"--allow-principal '{self.principal}' {operations} {kind}{pattern}"


def worker(settings: Settings, principal: str, tenants: Iterable[Tenant]) -> list[Acl]:
    """A worker's, its delivery process's among them. Reply topics are read too: copies of a job are answered from the
    first one's terminal event (R7)."""
    pool = settings.pool

    def topic(name: str, *operations: Operation, prefix: bool = False) -> Acl:
        return Acl(principal, "topic", name, (*operations, "Describe", "DescribeConfigs"), prefix)

    replies = {names.REPLIES: True}
    for entry in tenants:
        for name, prefix in (*_reply_names(entry), (entry.own_reply_topic, False)):
            replies[name] = replies.get(name, False) or prefix
    return [
        topic(f"inference.{pool}.jobs.", "Read", prefix=True),
        topic(names.deferred_topic(pool), "Read", "Write"),
        topic(names.overflow_topic(pool), "Read", "Write"),
        topic(names.status_topic(pool), "Read", "Write"),
        topic(names.CANCEL, "Read", prefix=True),
        topic(names.CONTROL, "Read", "Write"),
        topic(names.TENANTS, "Read"),
        topic(names.MODELS, "Read"),
        topic(names.DEAD_LETTERS, "Write"),
        topic(names.USAGE, "Write"),
        *(topic(name, "Read", "Write", prefix=prefix) for name, prefix in replies.items()),
        Acl(principal, "group", names.group_id(pool), ("Read", "Describe")),
        Acl(principal, "cluster", CLUSTER, ("Describe", "DescribeConfigs")),
    ]


def tenant(settings: Settings, entry: Tenant, principal: str) -> list[Acl]:
    """A tenant's, by identity mode: where it publishes, and where it reads its answers. In `trusted` mode anybody may
    publish as anybody, so it gets the common topics."""
    own = entry.id if settings.identity == "topic" else None
    writes = [names.jobs_topic(settings.pool, tier, own) for tier in names.TIERS]
    writes.append(names.cancel_topic(own))
    reads = dict(_reply_names(entry))
    if settings.identity == "trusted":
        reads[entry.reply_topic] = False
    else:
        reads[entry.own_reply_topic] = False
        reads.pop(names.REPLIES, None)  # the operators', and those of whoever is not believed
    return [
        *(Acl(principal, "topic", name, ("Write", "Describe")) for name in writes),
        *(Acl(principal, "topic", name, ("Read", "Describe"), prefix) for name, prefix in reads.items()),
    ]


def _reply_names(entry: Tenant) -> Iterable[tuple[str, bool]]:
    """The topics that its patterns allow, as far as a prefix can say it: `*` alone says nothing of whose they are."""
    for pattern in entry.reply_topics:
        text = pattern.replace("{id}", entry.id)
        name, star, rest = text.partition("*")
        if name and not rest:
            yield name, bool(star)


async def apply(settings: KafkaSettings, acls: Iterable[Acl]) -> int:
    """Gives the rights; returns how many. Raises AclsRefused, BrokerUnreachable."""
    client = AIOKafkaClient(**settings.connection(), request_timeout_ms=settings.request_timeout_ms)
    given = 0
    try:
        async with asyncio.timeout(ANSWER_S):
            await client.bootstrap()
        for acl in acls:
            for operation in acl.operations:
                await _give(client, acl, operation)
                given += 1
        await asyncio.sleep(SETTLE_S)
    except (KafkaError, OSError, TimeoutError) as error:
        raise BrokerUnreachable(
            f"Kafka at {settings.bootstrap} does not answer ({type(error).__name__}){settings.security.hint}"
        ) from error
    finally:
        await client.close()
    return given


async def _give(client: AIOKafkaClient, acl: Acl, operation: Operation) -> None:
    request = CreateAclsRequest(
        _RESOURCES[acl.resource],
        acl.name,
        _PREFIXED if acl.prefix else _LITERAL,
        acl.principal,
        "*",
        _OPERATIONS[operation],
        _ALLOW,
    )
    node = client.get_random_node()
    if node is None:
        raise KafkaError("no broker is known")
    async with asyncio.timeout(ANSWER_S):
        answer = (await client.send(node, request)).to_object()
    for result in next(value for value in answer.values() if isinstance(value, list)):
        code = result["error_code"]
        if code:
            said = result.get("error_message") or for_code(code).description
            raise AclsRefused(f"{acl.principal} was not given {operation} on {acl.resource} {acl.name}: {said}")
