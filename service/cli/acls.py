"""`headrace topics acls`: the rights on Kafka that workers and tenants need, printed or given."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer

from client import Unreachable
from service import acls as rights
from service.acls import Acl
from service.cli import session
from service.cli.known_tenants import known_tenants
from service.settings import Settings
from service.tenants import RegistryError
from service.topics import BrokerUnreachable


def acls(
    tenant: Annotated[list[str] | None, typer.Option(help="Only this tenant's; more than once.")] = None,
    worker: Annotated[str, typer.Option(help="The workers' user; empty: without theirs.")] = "worker",
    apply: Annotated[bool, typer.Option("--apply", help="Give them. Nothing is taken away.")] = False,
    pool: Annotated[str | None, typer.Option(help="The pool whose topics are meant.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
    bootstrap: Annotated[str | None, typer.Option(help="Kafka address; the local stack's by default.")] = None,
) -> None:
    """The access lists for the identity mode in HEADRACE_IDENTITY, as options of kafka-acls.sh --add.

    A tenant's user is named after it. Exit codes: 0 done, 1 refused by the cluster, 2 wrong usage, 3 not reachable.
    """
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)  # the command says it in one line
    found = session.settings(bootstrap, pool)

    async def main() -> tuple[list[Acl], int]:
        wanted = await _wanted(found, tenant or [], worker)
        return wanted, await rights.apply(found.kafka, wanted) if apply else 0

    try:
        wanted, given = asyncio.run(main())
    except (BrokerUnreachable, Unreachable) as error:
        raise typer.Exit(session.told(str(error), session.UNREACHABLE)) from None
    except (rights.AclsRefused, RegistryError) as error:
        raise typer.Exit(session.told(str(error), session.FAILED)) from None
    if json:
        said = {"identity": found.identity, "given": given, "acls": [asdict(acl) for acl in wanted]}
        session.print_json(said)
        return
    for acl in wanted:
        typer.echo(acl.command())
    if apply:
        typer.echo(f"given: {given} rights", err=True)


async def _wanted(found: Settings, chosen: Sequence[str], worker: str) -> list[Acl]:
    """Raises RegistryError, Unreachable, BadParameter."""
    tenants = await known_tenants(found)
    if unknown := [id for id in chosen if id not in tenants]:
        raise RegistryError(f"there is no tenant {', '.join(unknown)}: headrace tenants list")
    wanted = rights.worker(found, f"User:{worker}", tenants.values()) if worker and not chosen else []
    for entry in tenants.values():
        if not chosen or entry.id in chosen:
            wanted += rights.tenant(found, entry, f"User:{entry.id}")
    return wanted
