"""`headrace topics apply|check|acls`. Exit codes: 0 as they must be, 1 not, 2 wrong usage, 3 Kafka not reachable."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import asdict
from typing import Annotated, Any, TypeVar

import typer

from client import Unreachable
from service import topics
from service.cli import session
from service.cli.acls import acls
from service.cli.known_tenants import known_tenants
from service.cli.options import Bootstrap, Json
from service.cli.terminal import say
from service.own_topics import own_topics
from service.settings import Settings
from service.tenants import RegistryError

T = TypeVar("T")

Pool = Annotated[str | None, typer.Option(help="The pool whose topics are meant.")]
Partitions = Annotated[int | None, typer.Option(min=1, max=1000, help="Partitions of the pool's own topics.")]


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="The topics of a pool: make them, or say what is wrong with them.", no_args_is_help=True)
    group.command("apply")(apply)
    group.command("check")(check)
    group.command("acls")(acls)
    app.add_typer(group, name="topics")


def apply(bootstrap: Bootstrap = None, pool: Pool = None, partitions: Partitions = None, json: Json = False) -> None:
    """Creates missing topics and sets what differs. Never changes a partition count, never deletes."""
    done = _run(_apply(_settings(bootstrap, pool, partitions)))
    good = _good(done.findings)
    if json:
        session.print_json({"ok": good, **asdict(done)})
    else:
        for name in done.created:
            say(f"created  {name}")
        for name in done.changed:
            say(f"changed  {name}")
        if good and not done.created and not done.changed:
            typer.echo("nothing to do: all topics are as they must be")
        _report(done.findings)
    raise typer.Exit(0 if good else 1)


def check(bootstrap: Bootstrap = None, pool: Pool = None, partitions: Partitions = None, json: Json = False) -> None:
    """Says what a worker would refuse to start with, and warns of what it would not; changes nothing."""
    findings = _run(_check(_settings(bootstrap, pool, partitions)))
    good = _good(findings)
    if json:
        session.print_json({"ok": good, "findings": [asdict(finding) for finding in findings]})
    else:
        _report(findings)
        if good:
            typer.echo("all topics are as they must be")
    raise typer.Exit(0 if good else 1)


async def _apply(found: Settings) -> topics.Applied:
    """The pool's first, since the registry is one of them; then those that it asks for."""
    done = await topics.apply(found)
    if found.identity != "trusted":
        more = await topics.apply(found, own_topics(found, (await known_tenants(found)).values()))
        done = topics.Applied(done.created + more.created, done.changed + more.changed, more.findings)
    return done


async def _check(found: Settings) -> list[topics.Finding]:
    own = own_topics(found, (await known_tenants(found)).values()) if found.identity != "trusted" else ()
    return await topics.check(found, own)


def _good(findings: list[topics.Finding]) -> bool:
    return all(finding.warning for finding in findings)


def _settings(bootstrap: str | None, pool: str | None, partitions: int | None) -> Settings:
    found = session.settings(bootstrap, pool)
    if partitions is not None:
        found.partitions = partitions
    return found


def _run(work: Coroutine[Any, Any, T]) -> T:
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)  # the command says it in one line
    try:
        return asyncio.run(work)
    except (topics.BrokerUnreachable, Unreachable) as error:
        raise typer.Exit(session.told(str(error), session.UNREACHABLE)) from None
    except (RegistryError, topics.TopicsRefused) as error:
        raise typer.Exit(session.told(str(error), session.FAILED)) from None


def _report(findings: list[topics.Finding]) -> None:
    for finding in findings:
        say(f"headrace: {'warning: ' if finding.warning else ''}{finding}", err=True)
