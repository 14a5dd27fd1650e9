"""The tenants as a worker with the same settings knows them: from its file, from the topic, or the development ones."""

from __future__ import annotations

from client import UnknownTopic
from schemas.names import TENANTS
from schemas.tenants import Tenant
from service.cli.registry_topic import RegistryTopic, sort
from service.settings import Settings
from service.tenants import DEVELOPMENT, ENTRIES, load


async def known_tenants(found: Settings) -> dict[str, Tenant]:
    """By id; entries that are not valid are left out. Raises RegistryError, Unreachable."""
    if found.tenants_source != "topic" and found.tenants_file is not None:
        return load(found.tenants_file)
    tenants: dict[str, Tenant] = {}
    try:
        async with RegistryTopic(found, TENANTS) as topic:
            tenants, _ = sort(ENTRIES, await topic.read())
    except UnknownTopic:
        pass
    if not tenants and found.tenants_source != "topic":
        return {tenant.id: tenant for tenant in DEVELOPMENT}
    return tenants
