"""The registry of tenants as the worker knows it: from a file, replaced as a whole, or from a topic, entry by entry.

What is not valid never replaces what is. Owns the prefix-cache salts; never counts or limits anything, reads no topic.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from schemas.keys import entry_name
from schemas.names import TENANTS
from schemas.problems import named
from schemas.tenants import Tenant, TenantLimits
from service.entries import Entries
from service.settings import Settings

log = logging.getLogger(__name__)

# Seconds between looks at the file: a change is in force within this time.
FOLLOW_S = 2.0

_NAMES = frozenset(Tenant.model_fields) | frozenset(TenantLimits.model_fields)

# Without any registry: the development one, whose tenants trust one another with their reply topics.
DEVELOPMENT = tuple(Tenant(id=id, reply_topics=["*"]) for id in ("acme", "globex", "initech"))


class RegistryError(ValueError):
    """The registry cannot be read, or is not valid. One line: what is wrong and where."""


class Tenants:
    """From a file, from the topic `inference.tenants`, or the development tenants (`HEADRACE_TENANTS_SOURCE`).

    With a file: call `follow`. Else give `take` every record of the topic, and call `opened` once it was read whole.
    """

    def __init__(self, settings: Settings) -> None:
        """Raises RegistryError if the file is missing or invalid, or if there is no secret for salts."""
        if not settings.cache_secret:
            # An empty salt is no salt: tenants would see one another's cached prefixes.
            raise RegistryError("HEADRACE_CACHE_SECRET is empty; set a secret, the same for all workers of a pool")
        source = settings.tenants_source
        if source == "file" and settings.tenants_file is None:
            raise RegistryError("HEADRACE_TENANTS_SOURCE is file, and HEADRACE_TENANTS_FILE names none; set it")
        self.refused = 0  # entries and files that were not valid
        self.version = 0  # grows with every change
        self._secret = settings.cache_secret.encode()
        self._file = settings.tenants_file if source != "topic" else None
        self._must_have = source == "topic"
        self._stamp: tuple[int, int] | None = None
        self._tenants: dict[str, Tenant] = {}
        self._salts: dict[str, str] = {}
        if self._file is not None:
            self.reload()

    @property
    def follows_topic(self) -> bool:
        """Whether the registry is the topic's (or, as long as that is empty, the development one)."""
        return self._file is None

    def take(self, records: Iterable[tuple[bytes | None, bytes | None]]) -> None:
        """The next records of the topic, key and value. One that is not valid leaves the entry as it was."""
        for key, value in records:
            name = entry_name(key)
            try:
                if value is None:
                    if self._tenants.pop(name, None) is None:
                        continue
                    log.info("tenant removed tenant=%s", name)
                else:
                    tenant = read_entry(name, value)
                    if self._tenants.get(name) == tenant:
                        continue
                    self._tenants[name] = tenant
            except RegistryError as error:
                self.refused += 1
                former = "the former entry stays in force" if name in self._tenants else "its jobs are refused"
                log.error("tenant entry refused, %s: %s", former, error)
            else:
                self.version += 1

    def opened(self) -> None:
        """The topic was read to its end. Empty, it means the development tenants; what comes later is added to them.

        Raises RegistryError if the topic must be the source, and has no tenants: all jobs would be refused.
        """
        if self._file is not None or self._tenants:
            return
        if self._must_have:
            raise RegistryError(f"{TENANTS} has no tenants; fill it: headrace tenants apply FILE")
        log.warning("no registry is given, only the development tenants are known: headrace tenants apply FILE")
        self._tenants = {tenant.id: tenant for tenant in DEVELOPMENT}
        self.version += 1

    def get(self, tenant: str) -> Tenant | None:
        return self._tenants.get(tenant)

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._tenants.values())

    def __len__(self) -> int:
        return len(self._tenants)

    def weight(self, tenant: str) -> float:
        """Share of the engine; 1 for a tenant that left the registry while its jobs were queued."""
        found = self._tenants.get(tenant)
        return found.weight if found is not None else 1.0

    def salt(self, tenant: str) -> str:
        """What keeps the tenant's cached prefixes apart from those of other cache domains; 64 hex digits, never empty.

        A domain that is named and a tenant's own never coincide, even if their names do.
        """
        found = self._tenants.get(tenant)
        named_domain = found.cache_domain if found is not None else None
        domain = f"tenant:{tenant}" if named_domain is None else f"domain:{named_domain}"
        salt = self._salts.get(domain)
        if salt is None:
            if len(self._salts) > 100_000:
                self._salts.clear()
            salt = self._salts[domain] = hmac.digest(self._secret, domain.encode(), "sha256").hex()
        return salt

    def reload(self) -> bool:
        """Reads the file if it changed; whether it did. Raises RegistryError and keeps the former registry."""
        if self._file is None:
            return False
        try:
            state = self._file.stat()
            stamp = (state.st_mtime_ns, state.st_size)
            if stamp == self._stamp:
                return False
            text = self._file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RegistryError(f"{self._file}: cannot be read ({error.__class__.__name__})") from None
        # An invalid file is complained about once, not at every look.
        self._stamp = stamp
        self._tenants = parse(text, str(self._file))
        self.version += 1
        return True

    async def follow(self) -> None:
        """Keeps up with the file, if there is one, until cancelled. A faulty one changes nothing."""
        while self._file is not None:
            await asyncio.sleep(FOLLOW_S)
            try:
                if await asyncio.to_thread(self.reload):
                    log.info("tenants reloaded tenants=%d", len(self))
            except RegistryError as error:
                self.refused += 1
                log.error("tenants not reloaded, the former registry stays in force: %s", error)


def load(path: Path) -> dict[str, Tenant]:
    """The tenants of a file, for tools. Raises RegistryError."""
    try:
        return parse(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise RegistryError(f"{path}: cannot be read ({error.__class__.__name__})") from None


def parse(text: str, source: str) -> dict[str, Tenant]:
    """YAML or JSON with one key `tenants`, a list of entries, as id → tenant. Raises RegistryError naming the entry."""
    try:
        document: Any = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark is not None else ""
        raise RegistryError(f"{source}: not YAML or JSON{where}") from None
    if not isinstance(document, dict) or set(document) != {"tenants"} or not isinstance(document["tenants"], list):
        raise RegistryError(f"{source}: must have one key 'tenants' with a list of tenants")
    tenants: dict[str, Tenant] = {}
    for place, entry in enumerate(document["tenants"]):
        name = named(entry.get("id")) if isinstance(entry, dict) and "id" in entry else f"entry {place + 1}"
        tenant = valid(entry, f"{source}: tenant {name}")
        if tenant.id in tenants:
            raise RegistryError(f"{source}: tenant {tenant.id} is there twice")
        tenants[tenant.id] = tenant
    if not tenants:
        raise RegistryError(f"{source}: has no tenants")
    return tenants


ENTRIES = Entries(TENANTS, "tenant", Tenant, "id", _NAMES, RegistryError)
valid, read_entry, write_entry = ENTRIES.valid, ENTRIES.read, ENTRIES.write
