"""`headrace usage`: what was used, by whom, and what it cost, from `inference.usage`."""

from __future__ import annotations

import csv
import sys
import time
from datetime import datetime
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from schemas.fields import at, parse_time
from schemas.names import USAGE
from service.cli import session
from service.cli.terminal import Screen
from service.cli.topic_log import TopicLog
from service.usage import BUCKETS, FIELDS, Machines, Price, Prices, Usage, Window, row_of

# Read before the window, so that an attempt or job that it shares with the window counts only there, seconds.
LOOK_BACK_S = 3600.0
# Records carry the broker's or the producer's time, windows go by the time that the worker wrote, seconds.
SLACK_S = 300.0


def register(app: typer.Typer) -> None:
    app.command("usage")(usage)


def usage(
    by: Annotated[
        str, typer.Option(help=f"Rows: {', '.join(FIELDS)}, and one of {', '.join(BUCKETS)}; with commas.")
    ] = "tenant,model",
    since: Annotated[str, typer.Option(help="From: 24h, 30d ago, or a time, 2030-01-31T00:00:00Z.")] = "30d",
    until: Annotated[str, typer.Option(help="Up to, and without; as --since.")] = "0s",
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's.")] = None,
    model: Annotated[str | None, typer.Option(help="Only this model's.")] = None,
    price_prompt: Annotated[float | None, typer.Option(min=0, help="Per million prompt tokens not cached.")] = None,
    price_cached: Annotated[float | None, typer.Option(min=0, help="Cached ones; as others by default.")] = None,
    price_output: Annotated[float | None, typer.Option(min=0, help="Per million output tokens.")] = None,
    machine_hour: Annotated[float | None, typer.Option(min=0, help="Cost of one machine for an hour.")] = None,
    workers: Annotated[float, typer.Option(min=0, help="Machines that were paid for in the window.")] = 1,
    timeout: Annotated[str, typer.Option(help="How long to read.")] = "10m",
    as_csv: Annotated[bool, typer.Option("--csv", help="Comma-separated rows on standard output.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
    bootstrap: Annotated[str | None, typer.Option(help="Kafka address; the local stack's by default.")] = None,
) -> None:
    """Sums tokens and jobs, every attempt exactly once, and with a price or the machines' cost says what they cost.

    With --machine-hour the whole window is paid for: idle, failed and repeated work included, and completed output
    bears it. Exit codes: 0 done, 1 not all could be read, 2 wrong usage, 3 not reachable.
    """
    found = session.settings(bootstrap)
    names = fields_of(by)
    now = time.time()
    window = Window(moment(since, now, "--since"), moment(until, now, "--until"))
    if window.since >= window.until:
        raise typer.BadParameter("lies after --until", param_hint="--since")
    priced = [value for value in (price_prompt, price_cached, price_output) if value is not None]
    if priced and machine_hour is not None:
        raise typer.BadParameter("give prices or the machines' cost, not both", param_hint="--machine-hour")
    if json and as_csv:
        raise typer.BadParameter("give --json or --csv, not both", param_hint="--csv")
    limit_s = session.seconds(timeout)

    async def main() -> int:
        sums = Usage(names, window, tenant=tenant, model=model)
        whole = await read(found.kafka.bootstrap, sums, window, limit_s, security=found.kafka.security)
        price: Price | None = None
        if machine_hour is not None:
            hours = (min(window.until, now) - window.since) / 3600
            price = Machines(machine_hour * workers * hours, sums.total().completed_output)
        elif priced:
            prompt = price_prompt or 0.0
            price = Prices(prompt, prompt if price_cached is None else price_cached, price_output or 0.0)
        rows = [{**labels, **row_of(row, price)} for labels, row in sums.rows()]
        total = row_of(sums.total(), price)
        if isinstance(price, Machines):
            total["cost"] = round(price.total, 6)  # also where nothing was completed that could bear it
        if json:
            document = {
                "ok": whole,
                "since": at(window.since),
                "until": at(window.until),
                "by": names,
                "rows": rows,
                "total": total,
                "records": sums.records,
                "doubled": sums.doubled,
                "unreadable": sums.unreadable,
            }
            session.print_json(document)
        elif as_csv:
            writer = csv.DictWriter(sys.stdout, [*names, *total], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
            sys.stdout.flush()
        else:
            show(names, rows, total, sums, window, Screen(highlight=False))
        if not whole:
            typer.echo(f"headrace: {USAGE} was not read to its end within {timeout}: --timeout, or --since", err=True)
        return 0 if whole else session.FAILED

    session.run(main())


async def read(bootstrap: str, sums: Usage, window: Window, limit_s: float, **connection: Any) -> bool:
    """Partition by partition, as `Usage` wants it; whether all was read. Raises Unreachable, UnknownTopic."""
    now = time.monotonic()
    ends = now + limit_s
    async with TopicLog(bootstrap, **connection) as log:
        for place in await log.partitions(USAGE):
            sums.partition()
            clock = time.time()
            records = log.read(
                [place],
                since_s=max(0.0, clock - window.since) + LOOK_BACK_S + SLACK_S,
                until_s=max(0.0, clock - window.until - SLACK_S),
                limit_s=max(0.0, ends - time.monotonic()),
            )
            async for record in records:
                sums.take(record.value)
            if not log.whole:
                return False
    return True


def fields_of(by: str) -> list[str]:
    names = [name.strip() for name in by.split(",") if name.strip()]
    for name in names:
        if name not in FIELDS and name not in BUCKETS:
            raise typer.BadParameter(f"{name!r} is none of {', '.join((*FIELDS, *BUCKETS))}", param_hint="--by")
    if len(set(names)) < len(names) or sum(name in BUCKETS for name in names) > 1:
        raise typer.BadParameter("name each field once, and one length of time", param_hint="--by")
    return names


def moment(text: str, now: float, option: str) -> float:
    """`24h` ago, or an RFC 3339 time, as wall-clock seconds."""
    if "T" not in text.upper():
        return now - session.seconds(text)
    try:
        found: datetime = parse_time(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} {error}", param_hint=option) from None
    return found.timestamp()


# Columns of the table for people; --json and --csv have all.
COLUMNS = {
    "completed": "completed",
    "failed": "failed",
    "cancelled": "cancelled",
    "expired": "expired",
    "prompt_tokens": "prompt",
    "cached_tokens": "cached",
    "completion_tokens": "output",
    "other_completion_tokens": "run again",
    "cost": "cost",
    "cost_per_completed_job": "per job",
    "cost_per_million_output_tokens": "per M output",
}


def show(
    names: list[str], rows: list[dict[str, Any]], total: dict[str, Any], sums: Usage, window: Window, console: Console
) -> None:
    console.print(f"{total['jobs']:,} jobs from {at(window.since)[:19]}Z to {at(window.until)[:19]}Z", soft_wrap=True)
    if not total["jobs"] and not total["other_attempts"]:
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in names:
        table.add_column(name)
    shown = [name for name in COLUMNS if name in total]
    for name in shown:
        table.add_column(COLUMNS[name], justify="right")
    for row in rows:
        table.add_row(*(Text(str(row[name])) for name in names), *(_text(row[name]) for name in shown))
    if len(rows) != 1:
        table.add_section()
        table.add_row(*(["all"] + [""] * (len(names) - 1) if names else ()), *(_text(total[name]) for name in shown))
    console.print(table)
    if sums.doubled:
        console.print(f"({sums.doubled:,} doubled records were left out)")
    if sums.unreadable:
        console.print(f"({sums.unreadable:,} records were not readable)")


def _text(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.6f}".rstrip("0").rstrip(".")
