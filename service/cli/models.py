"""`headrace models list|set|remove`: which pool serves which model, and what other names models have."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from schemas.names import MODELS
from schemas.tenants import ModelEntry
from service.cli import session
from service.cli.options import Bootstrap, DryRun, Json, Yes
from service.cli.registry_topic import RegistryTopic, sort
from service.cli.terminal import Screen, say
from service.models import ENTRIES, ModelRefused, valid, write_entry

Name = Annotated[str, typer.Argument(help="The model's name, or an alias, as jobs say it.")]


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="Which pool serves which model, and aliases.", no_args_is_help=True)
    group.command("list")(list_)
    group.command("set")(set_)
    group.command("remove")(remove)
    app.add_typer(group, name="models")


def list_(json: Json = False, bootstrap: Bootstrap = None) -> None:
    """Lists the registry of models. A model that is not in it is found by publishing to its pool.

    Exit codes: 0 done (also if there are none), 2 wrong usage, 3 not reachable.
    """
    found = session.settings(bootstrap)

    async def main() -> int:
        async with RegistryTopic(found, MODELS) as topic:
            known, invalid = sort(ENTRIES, await topic.read())
        entries = sorted(known.values(), key=lambda entry: entry.name)
        if json:
            session.print_json({"models": [entry.model_dump(mode="json") for entry in entries], "invalid": invalid})
        elif entries:
            made = Table(box=None, pad_edge=False, header_style="bold")
            for title in ("model", "pool", "alias of", "kind", "context"):
                made.add_column(title, overflow="fold")
            for entry in entries:
                context = str(entry.max_model_len or "")
                made.add_row(*map(Text, (entry.name, entry.pool, entry.alias_of or "", entry.kind, context)))
            Screen(highlight=False).print(made)
        else:
            typer.echo("the registry of models is empty: headrace models set NAME --pool POOL")
        for why in invalid.values():
            say(f"headrace: {why}", err=True)
        return 0

    session.run(main())


def set_(
    name: Name,
    pool: Annotated[str, typer.Option(help="The pool whose workers serve it.")],
    alias_of: Annotated[str | None, typer.Option(help="The served name that this one stands for.")] = None,
    kind: Annotated[str, typer.Option(help="generate, or embed.")] = "generate",
    max_model_len: Annotated[int | None, typer.Option(min=1, help="Tokens, prompt and output together.")] = None,
    yes: Yes = False,
    dry_run: DryRun = False,
    json: Json = False,
    bootstrap: Bootstrap = None,
) -> None:
    """Says where a model is served; shows what differs and asks first. In force within a second.

    Exit codes: 0 done, or nothing to do; 1 not done (declined, changed by somebody else), 2 wrong usage,
    3 not reachable.
    """
    entry = {"name": name, "pool": pool, "alias_of": alias_of, "kind": kind, "max_model_len": max_model_len}
    try:
        wanted = valid(entry, f"model {name}")
    except ModelRefused as error:
        raise typer.Exit(session.told(f"{error}; nothing was changed", session.USAGE)) from None
    _change(name, wanted, bootstrap, yes=yes, dry_run=dry_run, json=json)


def remove(
    name: Name, yes: Yes = False, dry_run: DryRun = False, json: Json = False, bootstrap: Bootstrap = None
) -> None:
    """Takes an entry out; jobs that name it are then refused where nobody serves it.

    Exit codes: 0 done, or nothing to do; 1 not done (declined, changed by somebody else), 2 wrong usage,
    3 not reachable.
    """
    _change(name, None, bootstrap, yes=yes, dry_run=dry_run, json=json)


def _change(
    name: str, wanted: ModelEntry | None, bootstrap: str | None, *, yes: bool, dry_run: bool, json: bool
) -> None:
    found = session.settings(bootstrap)
    session.answerable(yes=yes, dry_run=dry_run, json=json)

    async def main() -> int:
        async with RegistryTopic(found, MODELS) as topic:
            seen = await topic.read()
            before = sort(ENTRIES, seen)[0].get(name)
            same = before == wanted
            if not json:
                was, becomes = _told(before), _told(wanted)
                say("nothing to do: the registry says so already" if same else f"{name}: {was} → {becomes}")
            applied = False
            if not same and not dry_run:
                if not yes and not session.agreed():
                    return session.FAILED
                await topic.write({name: None if wanted is None else write_entry(wanted)}, seen)
                applied = True
        if json:
            session.print_json(
                {
                    "applied": applied,
                    "before": before.model_dump(mode="json") if before is not None else None,
                    "after": wanted.model_dump(mode="json") if wanted is not None else None,
                }
            )
        elif applied:
            typer.echo("applied: workers and clients have it within a second")
        return 0

    session.run(main())


def _told(entry: ModelEntry | None) -> str:
    if entry is None:
        return "-"
    alias = f", alias of {entry.alias_of}" if entry.alias_of is not None else ""
    context = f", {entry.max_model_len} tokens" if entry.max_model_len is not None else ""
    return f"pool {entry.pool}{alias}, {entry.kind}{context}"
