"""`headrace reconcile`: whether every job ended exactly once, from the logs alone (R17)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from client import UnknownTopic, Unreachable
from schemas.fields import at
from service import topics
from service.audit import Account, Audit
from service.cli import session
from service.cli.terminal import Screen, say
from service.verdicts import FAILURES, Verdict

SAYS = {
    Verdict.OK: "answered once, where their status records say",
    Verdict.RUNNING: "not ended yet",
    Verdict.LOST: "neither answered nor in the dead letters",
    Verdict.DOUBLED: "a reader following the rules would deliver two answers",
    Verdict.SUPPRESSED: "answered, with further terminals that no reader delivers",
    Verdict.DEAD_LETTERED: "nobody could be told: headrace dead-letters list",
    Verdict.UNVERIFIABLE: "what would tell has expired, or may not be read",
}
# Findings shown to people; --json has all that were listed.
SHOWN = 50


def register(app: typer.Typer) -> None:
    app.command("reconcile")(reconcile)


def reconcile(
    pool: Annotated[str | None, typer.Option(help="The pool whose jobs are checked.")] = None,
    since: Annotated[
        str | None, typer.Option(help="Only jobs not older: 15m, 2h; at most the shortest retention.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
    bootstrap: Annotated[str | None, typer.Option(help="Kafka address; the local stack's by default.")] = None,
) -> None:
    """Checks on the logs that every job was answered exactly once.

    Reads jobs, status, dead letters and reply topics; changes nothing, and may run while workers do.
    Exit codes: 0 none lost and none doubled, 1 some are, 2 wrong usage, 3 not reachable.
    """
    found = session.settings(bootstrap, pool)
    since_s = session.seconds(since) if since is not None else None

    async def main() -> int:
        errors = Screen(stderr=True)
        columns = (TextColumn("reading the logs"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=errors, transient=True, disable=json or not errors.is_terminal) as bar:
            task = bar.add_task("read", total=None)
            audit = Audit(found, since_s, show=lambda done, total: bar.update(task, completed=done, total=total))
            try:
                account = await audit.run()
            except topics.BrokerUnreachable as problem:
                raise Unreachable(str(problem)) from None
            except topics.TopicsRefused as problem:
                raise UnknownTopic(str(problem)) from None
        if json:
            session.print_json(as_json(account))
        else:
            show(account, Screen(highlight=False))
        return 0 if account.report.good else session.FAILED

    session.run(main())


def as_json(account: Account) -> Mapping[str, Any]:
    report = account.report
    return {
        "ok": report.good,
        "pool": account.pool,
        "since": at(account.since),
        "until": at(account.until),
        "jobs": report.jobs,
        **{verdict.value.replace("-", "_"): report.counts[verdict] for verdict in Verdict},
        "unread_topics": account.unread,
        "findings": [
            {
                "verdict": named.finding.verdict,
                "origin": str(named.finding.origin),
                "tenant": named.tenant,
                "job_id": named.job_id,
                "run": named.run,
                "why": named.finding.why,
                "terminals": [str(place) for place in named.finding.places],
            }
            for named in account.named
        ],
    }


def show(account: Account, console: Console) -> None:
    report = account.report
    console.print(f"{report.jobs} jobs of pool {escape(account.pool)} since {at(account.since)}")
    table = Table.grid(padding=(0, 2))
    for verdict in Verdict:
        count = report.counts[verdict]
        if count or verdict in FAILURES:
            style = "bold red" if verdict in FAILURES and count else "green" if verdict is Verdict.OK else ""
            table.add_row(verdict.value, f"{count:>8}", SAYS[verdict], style=style)
    console.print(table)
    for named in account.named[:SHOWN]:
        finding = named.finding
        identity = f"{named.tenant}/{named.job_id}" + (f" run {named.run}" if named.run else "")
        where = f" [{', '.join(map(str, finding.places))}]" if len(finding.places) > 1 else ""
        line = f"{finding.verdict.value} {finding.origin} {identity if named.job_id else ''}: {finding.why}{where}"
        console.print(escape(line), soft_wrap=True)
    if (more := sum(map(len, report.findings.values())) - SHOWN) > 0:
        console.print(f"… and {more} more: --json")
    for topic in account.unread:
        say(f"headrace: {topic} may not be read with these rights", err=True)
