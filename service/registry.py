"""Changes of the registry: what an operator asks for, as entries that are valid, and how they differ. Pure, no clock.

The two fields that remember a change of spread are the service's own to keep, whatever a file says.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from schemas.fields import at
from schemas.tenants import Tenant
from service.tenants import RegistryError, valid
from service.topics import JOBS_RETENTION_MS

# Publishers go over to a new spread so many seconds after the change, all at once, when every worker knows of it.
SPREAD_LEAD_S = 5.0
# The former spread is forgotten when no job of its time can be left on the logs, seconds.
FORMER_KEPT_S = JOBS_RETENTION_MS / 1000

Kind = Literal["added", "changed", "removed", "same"]


@dataclass(frozen=True, slots=True)
class Line:
    """One field that differs; values as they are in JSON."""

    field: str
    before: Any
    after: Any


@dataclass(frozen=True, slots=True)
class Change:
    """What becomes of one entry; None: there is none."""

    id: str
    before: Tenant | None
    after: Tenant | None

    @property
    def kind(self) -> Kind:
        if self.before == self.after:
            return "same"
        return "added" if self.before is None else "removed" if self.after is None else "changed"

    @property
    def moves(self) -> bool:
        """Whether jobs that are published afterwards lie on other partitions than before."""
        return self.before is not None and self.after is not None and self.before.spread != self.after.spread

    def lines(self) -> list[Line]:
        """The fields that differ, in the order of the model; of a new entry those that are not the default."""
        ordinary = Tenant(id=self.id)
        before, after = (flat(self.before or ordinary), flat(self.after or ordinary))
        return [Line(name, before[name], value) for name, value in after.items() if before[name] != value]


def flat(tenant: Tenant) -> dict[str, Any]:
    """All fields, limits as `limits.n`."""
    fields: dict[str, Any] = {}
    for name, value in tenant.model_dump(mode="json").items():
        if name == "limits":
            fields |= {f"limits.{key}": bound for key, bound in value.items()}
        else:
            fields[name] = value
    return fields


def edited(id: str, before: Tenant | None, fields: Mapping[str, Any], limits: Mapping[str, int | None]) -> Tenant:
    """`before`, or a new entry, with these fields; None takes a field or a limit back. Raises RegistryError."""
    entry: dict[str, Any] = before.model_dump(mode="json", exclude_defaults=True) if before is not None else {"id": id}
    entry = _merged(entry, fields)
    if limits:
        entry["limits"] = _merged(entry.get("limits", {}), limits)
    return valid(entry, f"tenant {id}")


def _merged(entry: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in {**entry, **fields}.items() if value is not None}


def moved(before: Tenant | None, after: Tenant, now: float, window_s: float) -> Tenant:
    """`after` with what must be remembered of the former spread. Raises RegistryError.

    `window_s`: how long copies of ended jobs are recognised. Only two spreads can be told apart at a time, so a third
    one must wait until the first is over.
    """
    if before is None:
        return after
    former, since = before.former_spread, before.spread_since
    if after.spread != before.spread:
        until = since.timestamp() + window_s if since is not None else 0.0
        if former is not None and after.spread != former and now < until:
            raise RegistryError(
                f"tenant {after.id}: its spread was changed from {former} to {before.spread} within the last"
                f" {window_s / 60:g} minutes; change it back to {former}, or to {after.spread} after {at(until)}"
            )
        former = before.spread
        # Jobs in order have no former ones left, and must not go two ways for a while.
        since = datetime.fromtimestamp(now + (SPREAD_LEAD_S if after.order == "none" else 0.0), UTC)
    elif since is not None and now > since.timestamp() + window_s + FORMER_KEPT_S:
        former = since = None
    return after.model_copy(update={"former_spread": former, "spread_since": since})


def changes(
    before: Mapping[str, Tenant], wanted: Iterable[Tenant], *, prune: bool, now: float, window_s: float
) -> list[Change]:
    """What makes the registry as `wanted`, entries that stay as they are left out. Raises RegistryError.

    `prune`: entries that are not wanted go.
    """
    found = [Change(t.id, before.get(t.id), moved(before.get(t.id), t, now, window_s)) for t in wanted]
    if prune:
        kept = {change.id for change in found}
        found += [Change(id, tenant, None) for id, tenant in before.items() if id not in kept]
    return [change for change in found if change.kind != "same"]
