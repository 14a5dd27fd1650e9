"""The topics that each tenant has to itself in the identity modes `topic` and `signed` (tenancy.md §2). Pure.

    signed   inference.replies.<tenant>
    topic    also inference.<pool>.jobs.<tier>.<tenant> (the tenant's tier) and inference.cancel.<tenant>

A tenant may have a jobs topic for each tier; the one of its registry entry is made for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from schemas import names
from schemas.tenants import Tenant
from service.settings import Settings
from service.topics import Topic, plan


def own_topics(settings: Settings, tenants: Iterable[Tenant]) -> tuple[Topic, ...]:
    """Made like the shared ones beside them."""
    if settings.identity == "trusted":
        return ()
    shared = {topic.name: topic for topic in plan(settings.pool, settings.partitions, settings.replication_factor)}
    replies, cancels = shared[names.REPLIES], replace(shared[names.CANCEL], partitions=1)
    found: list[Topic] = []
    for tenant in tenants:
        if tenant.own_reply_topic == names.reply_topic_of(tenant.id):
            found.append(replace(replies, name=tenant.own_reply_topic, optional=True))
        if settings.identity == "topic":
            jobs = shared[names.jobs_topic(settings.pool, tenant.tier)]
            found.append(replace(jobs, name=names.jobs_topic(settings.pool, tenant.tier, tenant.id), optional=True))
            found.append(replace(cancels, name=names.cancel_topic(tenant.id), optional=True))
    return tuple(found)
