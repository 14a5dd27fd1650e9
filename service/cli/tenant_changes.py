"""A change of the registry of tenants, for all commands that make one: read, shown, agreed to, written."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NoReturn

import orjson
import typer
from rich.markup import escape

from schemas.names import TENANTS
from schemas.tenants import Tenant
from service.cli import session
from service.cli.registry_topic import RegistryTopic, sort
from service.cli.tenant_lag import ENOUGH, unfinished
from service.cli.terminal import Screen, say
from service.registry import Change, changes
from service.settings import Settings
from service.tenants import ENTRIES, RegistryError, write_entry


def change(
    bootstrap: str | None,
    wanted: Callable[[Mapping[str, Tenant]], Sequence[Tenant]],
    *,
    yes: bool,
    dry_run: bool,
    json: bool,
    prune: bool = False,
) -> None:
    """Reads, shows what differs, asks, writes what nobody changed meanwhile."""
    found = session.settings(bootstrap)
    session.answerable(yes=yes, dry_run=dry_run, json=json)

    async def main() -> int:
        async with RegistryTopic(found, TENANTS) as topic:
            seen = await topic.read()
            known, _ = sort(ENTRIES, seen)
            window_s = found.duplicates.window_s
            try:
                due = changes(known, wanted(known), prune=prune, now=time.time(), window_s=window_s)
            except RegistryError as error:
                refuse(error)
            if not json:
                _show(due)
            applied, why = False, ""
            if due:
                why = await _hindered(found, due)
                if not why and not dry_run:
                    if not yes and not session.agreed():
                        return session.FAILED
                    await topic.write({c.id: None if c.after is None else write_entry(c.after) for c in due}, seen)
                    applied = True
        if json:
            session.print_json(
                {"applied": applied, "refused": why or None, "changes": [_as_json(change) for change in due]}
            )
        elif applied:
            typer.echo("applied: workers have it within a second")
        if why:
            say(f"headrace: {why}", err=True)
        if applied and not known:
            typer.echo(
                "headrace: the registry topic was empty: workers that start from now on know the tenants on it and no"
                " others; headrace tenants apply FILE adds more",
                err=True,
            )
        if applied:
            say_who_reads_it(found)
        return session.FAILED if why else 0

    session.run(main())


def refuse(error: RegistryError) -> NoReturn:
    raise typer.Exit(session.told(f"{error}; nothing was changed", session.USAGE))


async def _hindered(found: Settings, due: Sequence[Change]) -> str:
    """Why the changes must wait: jobs in order would go past those that lie where they were published before."""
    ordered = [c.id for c in due if c.moves and any(t is not None and t.order != "none" for t in (c.before, c.after))]
    if not ordered:
        return ""
    for tenant, pools in (await unfinished(found.kafka, ordered)).items():
        there = ", ".join(f"{'at least ' if n >= ENOUGH else ''}{n} in pool {pool}" for pool, n in pools.items())
        return (
            f"the spread of {tenant} cannot change while it has jobs in order that are not finished ({there}): stop its"
            " publishers, wait, and run the command again"
        )
    return ""


def _show(due: Sequence[Change]) -> None:
    console = Screen(highlight=False, soft_wrap=True)
    if not due:
        console.print("nothing to do: the registry says so already")
    for change in due:
        mark = {"added": "[green]+[/green]", "removed": "[red]-[/red]"}.get(change.kind, "~")
        console.print(f"{mark} tenant {escape(change.id)}{'' if change.kind == 'changed' else f' ({change.kind})'}")
        for line in change.lines() if change.after is not None else ():
            console.print(f"    {line.field}: {escape(_text(line.before))} → [bold]{escape(_text(line.after))}[/bold]")


def _text(value: Any) -> str:
    return "-" if value is None else value if isinstance(value, str) else orjson.dumps(value).decode()


def _as_json(change: Change) -> dict[str, Any]:
    fields = [asdict(line) for line in change.lines()] if change.after is not None else []
    return {"id": change.id, "kind": change.kind, "fields": fields}


def say_who_reads_it(found: Settings) -> None:
    if found.tenants_file is not None and found.tenants_source != "topic":
        typer.echo(
            f"headrace: HEADRACE_TENANTS_FILE is set here ({found.tenants_file}): workers with this setting read the"
            " file and not the topic",
            err=True,
        )
