"""`headrace cancel`: asks the service to stop a job, or all jobs of a tenant that were published so far."""

from __future__ import annotations

from typing import Annotated

import typer

from client import Client
from service.cli import session


def register(app: typer.Typer) -> None:
    app.command("cancel")(cancel)


def cancel(
    job_id: Annotated[str | None, typer.Argument(help="The job's id.")] = None,
    tenant: Annotated[str | None, typer.Option(help="The job's tenant; acme, as in submit, for one job.")] = None,
    run: Annotated[int | None, typer.Option(min=0, help="Only this run; all runs published so far by default.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All jobs of the tenant instead of one.")] = False,
    reason: Annotated[str | None, typer.Option(help="Kept with the wish, for operators.")] = None,
    sign: session.Sign = None,
    kid: session.Kid = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    bootstrap: Annotated[str | None, typer.Option(help="Kafka address; the local stack's by default.")] = None,
) -> None:
    """Stops jobs, queued or running; one that has ended already stays as it is. What is published later is not hit.

    Returns once the wish is acknowledged by the broker. Each job's terminal event, as a rule `cancelled` with what had
    been generated, goes where the job asked: headrace tail JOB_ID.
    Exit codes: 0 the wish is written, 1 it is not, 2 wrong usage, 3 not reachable.
    """
    if everything and tenant is None:
        raise typer.BadParameter("name the tenant whose jobs are meant", param_hint="--tenant")
    tenant = tenant or session.TENANT
    if everything == (job_id is not None):
        raise typer.BadParameter("give the id of one job, or --all for all of the tenant", param_hint="JOB_ID")
    if everything and run is not None:
        raise typer.BadParameter("goes with the id of one job", param_hint="--run")
    found = session.settings(bootstrap)

    async def main() -> int:
        async with Client(found.kafka.bootstrap, **session.client_options(found, tenant, sign, kid)) as client:
            if job_id is None:
                place = await client.cancel_all(reason=reason)
            else:
                place = await client.cancel(job_id, run=run, reason=reason)
        if json:
            wish = {"tenant": tenant, "job_id": job_id, "run": run, "reason": reason, "place": place._asdict()}
            session.print_json(wish)
        else:
            what = "all jobs" if job_id is None else f"job {job_id}" if run is None else f"run {run} of job {job_id}"
            typer.echo(f"asked to stop {what} of {tenant}, published until now")
        return 0

    session.run(main())
