"""`headrace tenants list|show|set|disable|enable|apply`: the registry of tenants, changed while all goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.markup import escape
from rich.table import Table

from schemas.names import TENANTS, TIERS
from schemas.tenants import Tenant, TenantLimits
from service.cli import keygen, session
from service.cli.options import Bootstrap, DryRun, Json, Yes
from service.cli.registry_topic import RegistryTopic, sort
from service.cli.tenant_changes import change, refuse, say_who_reads_it
from service.cli.terminal import Screen, say
from service.registry import edited
from service.tenants import ENTRIES, RegistryError, load

Id = Annotated[str, typer.Argument(help="The tenant's id.")]

ORDERS = ("none", "conversation", "tenant")
NONE = "none"  # takes a limit back
# Fields of the service's own, which a file does not set.
KEPT = ("former_spread", "spread_since")


def register(app: typer.Typer) -> None:
    group = typer.Typer(
        help="Who may use the service, and how much of it: seen and changed while workers run.", no_args_is_help=True
    )
    group.command("list")(list_)
    group.command("show")(show)
    group.command("set")(set_)
    group.command("disable")(disable)
    group.command("enable")(enable)
    group.command("apply")(apply)
    keygen.register(group)
    app.add_typer(group, name="tenants")


# Looking


def list_(json: Json = False, bootstrap: Bootstrap = None) -> None:
    """Lists the tenants of the registry topic.

    Exit codes: 0 done (also if there are none), 2 wrong usage, 3 not reachable.
    """
    found = session.settings(bootstrap)

    async def main() -> int:
        async with RegistryTopic(found, TENANTS) as topic:
            known, invalid = sort(ENTRIES, await topic.read())
        tenants = sorted(known.values(), key=lambda tenant: tenant.id)
        if json:
            session.print_json({"tenants": [t.model_dump(mode="json") for t in tenants], "invalid": invalid})
        elif tenants:
            Screen(highlight=False).print(_table(tenants))
        else:
            typer.echo("the registry topic is empty; fill it: headrace tenants apply FILE")
        for why in invalid.values():
            say(f"headrace: {why}", err=True)
        say_who_reads_it(found)
        return 0

    session.run(main())


def show(id: Id, json: Json = False, bootstrap: Bootstrap = None) -> None:
    """Shows one entry whole, in the form that `set --file` takes.

    Exit codes: 0 done, 1 there is no such tenant, 2 wrong usage, 3 not reachable.
    """
    found = session.settings(bootstrap)

    async def main() -> int:
        async with RegistryTopic(found, TENANTS) as topic:
            known, invalid = sort(ENTRIES, await topic.read())
        if id not in known:
            return session.told(invalid.get(id) or _unknown(id, known), session.FAILED)
        entry = known[id].model_dump(mode="json")
        if json:
            session.print_json(entry)
        else:
            say(yaml.safe_dump(entry, sort_keys=False, allow_unicode=True), nl=False)
        return 0

    session.run(main())


# Changing


def set_(
    id: Id,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="The whole entry, YAML or JSON.")] = None,
    weight: Annotated[float | None, typer.Option(help="Share of the engine.")] = None,
    tier: Annotated[str | None, typer.Option(help=f"{', '.join(TIERS)}: where its jobs go by default.")] = None,
    limit: Annotated[list[str] | None, typer.Option(help="NAME=NUMBER, or NAME=none; more than once.")] = None,
    model: Annotated[list[str] | None, typer.Option(help="A model it may use; more than once. `all`: any.")] = None,
    order: Annotated[str | None, typer.Option(help=", ".join(ORDERS))] = None,
    spread: Annotated[int | None, typer.Option(min=1, max=1024, help="Record keys its jobs are spread over.")] = None,
    reply_topic: Annotated[str | None, typer.Option(help="Where events go when a job names no topic.")] = None,
    reply_pattern: Annotated[
        list[str] | None, typer.Option(help="Topics it may name, `*` and `{id}` in them; more than once.")
    ] = None,
    yes: Yes = False,
    dry_run: DryRun = False,
    json: Json = False,
    bootstrap: Bootstrap = None,
) -> None:
    """Changes a tenant's entry, or makes one; shows what differs and asks first. In force within a second.

    Exit codes: 0 done, or nothing to do; 1 not done (declined, changed by somebody else, jobs in order not finished),
    2 wrong usage or an entry that is not valid, 3 not reachable.
    """
    if tier is not None and tier not in TIERS:
        raise typer.BadParameter(f"must be one of {', '.join(TIERS)}", param_hint="--tier")
    if order is not None and order not in ORDERS:
        raise typer.BadParameter(f"must be one of {', '.join(ORDERS)}", param_hint="--order")
    limits = dict(map(_limit, limit or ()))
    asked = {"weight": weight, "tier": tier, "order": order, "spread": spread, "reply_topic": reply_topic}
    fields: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    if reply_pattern:
        fields["reply_topics"] = reply_pattern
    if model:
        fields["models"] = None if model == ["all"] else model
    if file is not None and (fields or limits):
        raise typer.BadParameter("give a file or single fields, not both", param_hint="--file")
    if file is None and not fields and not limits:
        raise typer.BadParameter("says nothing to change: give --weight, --limit …, or a --file")
    entry = _entry_of(file, id) if file is not None else None

    def wanted(known: Mapping[str, Tenant]) -> Sequence[Tenant]:
        return [entry if entry is not None else edited(id, known.get(id), fields, limits)]

    change(bootstrap, wanted, yes=yes, dry_run=dry_run, json=json)


def disable(id: Id, yes: Yes = False, dry_run: DryRun = False, json: Json = False, bootstrap: Bootstrap = None) -> None:
    """From now on a tenant's jobs fail with `not_authorized`; what is queued or runs goes on (`headrace cancel --all`).

    Exit codes: 0 done, or nothing to do; 1 not done, 2 wrong usage, 3 not reachable.
    """
    _switch(id, False, yes=yes, dry_run=dry_run, json=json, bootstrap=bootstrap)


def enable(id: Id, yes: Yes = False, dry_run: DryRun = False, json: Json = False, bootstrap: Bootstrap = None) -> None:
    """Takes `disable` back.

    Exit codes: 0 done, or nothing to do; 1 not done, 2 wrong usage, 3 not reachable.
    """
    _switch(id, True, yes=yes, dry_run=dry_run, json=json, bootstrap=bootstrap)


def apply(
    file: Annotated[Path, typer.Argument(help="The tenants, YAML or JSON, as HEADRACE_TENANTS_FILE has them.")],
    prune: Annotated[bool, typer.Option("--prune", help="Also remove the tenants that are not in the file.")] = False,
    yes: Yes = False,
    dry_run: DryRun = False,
    json: Json = False,
    bootstrap: Bootstrap = None,
) -> None:
    """Makes the registry topic say what a file says; shows what differs and asks first.

    Exit codes: 0 done, or nothing to do; 1 not done (declined, changed by somebody else, jobs in order not finished),
    2 wrong usage or an entry that is not valid, 3 not reachable.
    """
    try:
        tenants = [_own(tenant) for tenant in load(file).values()]
    except RegistryError as error:
        refuse(error)
    change(bootstrap, lambda known: tenants, prune=prune, yes=yes, dry_run=dry_run, json=json)


def _switch(id: str, enabled: bool, *, yes: bool, dry_run: bool, json: bool, bootstrap: str | None) -> None:
    def wanted(known: Mapping[str, Tenant]) -> Sequence[Tenant]:
        if id not in known:
            raise RegistryError(_unknown(id, known))
        return [edited(id, known[id], {"enabled": enabled}, {})]

    change(bootstrap, wanted, yes=yes, dry_run=dry_run, json=json)


# Reading


def _entry_of(file: Path, id: str) -> Tenant:
    try:
        document = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise typer.BadParameter(f"{file}: cannot be read ({type(error).__name__})", param_hint="--file") from None
    if not isinstance(document, dict) or document.get("id", id) != id:
        raise typer.BadParameter(f"{file}: must be the entry of tenant {id}", param_hint="--file")
    try:
        return edited(id, None, {name: value for name, value in document.items() if name not in KEPT}, {})
    except RegistryError as error:
        refuse(error)


def _own(tenant: Tenant) -> Tenant:
    return tenant.model_copy(update=dict.fromkeys(KEPT))


def _limit(text: str) -> tuple[str, int | None]:
    name, _, value = text.partition("=")
    if name not in TenantLimits.model_fields:
        near = get_close_matches(name, TenantLimits.model_fields, 1)
        hint = f"did you mean {near[0]}?" if near else f"it is one of {', '.join(TenantLimits.model_fields)}"
        raise typer.BadParameter(f"{name!r} is no limit; {hint}", param_hint="--limit")
    if value == NONE:
        return name, None
    if not value.isdecimal():
        raise typer.BadParameter(f"{text!r}: write {name}=NUMBER, or {name}={NONE}", param_hint="--limit")
    return name, int(value)


def _unknown(id: str, known: Mapping[str, Tenant]) -> str:
    near = get_close_matches(id, known, 1)
    return f"there is no tenant {id} on {TENANTS}; " + (f"did you mean {near[0]}?" if near else "headrace tenants list")


# Showing


def _table(tenants: Sequence[Tenant]) -> Table:
    made = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("tenant", "tier", "weight", "order", "spread", "models", "limits"):
        made.add_column(title, overflow="fold", no_wrap=title not in ("models", "limits"))
    for tenant in tenants:
        ordinary = TenantLimits()
        bounds = [f"{n}={v}" for n, v in tenant.limits.model_dump().items() if v != getattr(ordinary, n)]
        name = escape(tenant.id) if tenant.enabled else f"[dim]{escape(tenant.id)} (disabled)[/dim]"
        row = (tenant.tier, f"{tenant.weight:g}", tenant.order, str(tenant.spread))
        models = "all" if tenant.models is None else ", ".join(tenant.models)
        made.add_row(name, *row, escape(models), " ".join(bounds))
    return made
