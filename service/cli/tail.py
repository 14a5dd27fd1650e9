"""`headrace tail`: follows the reply events of a topic or of one job, as they lie on the log."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.text import Text

from client import Reader, Step
from client.replies import parse
from client.result import choice_text
from service.cli import session
from service.cli.terminal import Screen, one_line, say
from service.cli.topic_log import Record, TopicLog, refuses_another

# What an event makes of whoever takes it at its word, if it lacks what the contract says it has.
MALFORMED = (KeyError, TypeError, ValueError, AttributeError)
STYLE = {
    "waiting": "yellow",
    "started": "cyan",
    "chunk": "",
    "completed": "green",
    "failed": "bold red",
    "cancelled": "magenta",
    "expired": "magenta",
    "abandoned": "yellow",
}


def register(app: typer.Typer) -> None:
    app.command("tail")(tail)


def tail(
    job: Annotated[str | None, typer.Argument(help="Only this job's events; ends with the job.")] = None,
    topic: Annotated[str | None, typer.Option(help="Reply topic; the tenant's default one by default.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's events.")] = None,
    since: Annotated[str | None, typer.Option(help="Also older events: 90s, 15m, 2h, 1d. For a job 1d.")] = None,
    follow: Annotated[bool, typer.Option("--follow/--no-follow", help="Go on when the end is reached.")] = True,
    json: Annotated[bool, typer.Option("--json", help="One JSON line an event, with its place on the topic.")] = False,
    bootstrap: Annotated[str | None, typer.Option(help="Kafka address; the local stack's by default.")] = None,
) -> None:
    """Shows reply events as they lie on the topic; what a reader ignores (older attempts, late ends) is dimmed.

    Exit codes: 0 done, 1 the job failed or (without --follow) has not ended, 2 wrong usage, 3 not reachable.
    """
    found = session.settings(bootstrap)
    replies = topic or session.reply_topic(found, tenant)
    since_s = session.seconds(since or "1d") if job is not None or since else None

    async def main() -> int:
        console = Screen(highlight=False, soft_wrap=True)
        readers: dict[tuple[str, str], Reader] = {}

        def show(record: Record) -> None:
            if record.value is None or (job is not None and record.key != job.encode()):
                return
            event = parse(record.value)
            if tenant is not None and (event is None or event["tenant"] != tenant):
                return
            place = {"topic": record.topic, "partition": record.partition, "offset": record.offset}
            try:
                if event is None:
                    raise ValueError("not an event")
                step = _judge(readers, event)
                told = line(event, record.timestamp, step)
            except MALFORMED:
                say(f"headrace: {'/'.join(map(str, place.values()))} is no event of the contract", err=True)
                return
            if json:
                session.print_json({**event, "place": place, "step": step.value})
            else:
                console.print(told)

        def code() -> int | None:
            """Of the job that is asked for, once it has ended."""
            ends = [reader.ended for reader in readers.values()]
            if job is None or not ends or None in ends:
                return None
            return 0 if all(end is not None and end["type"] == "completed" for end in ends) else session.FAILED

        async with TopicLog(found.kafka.bootstrap, found.kafka.security) as log:
            places = await log.partitions(replies)
            if job is None:
                async for record in log.read(places, since_s=since_s, follow=follow):
                    show(record)
                return 0
            # What is there already comes in the order of its times, whichever partition answers first.
            for record in await log.job(job, places, since_s=since_s or 0.0):
                show(record)
            if not follow:
                return session.FAILED if (found_code := code()) is None else found_code
            starts = dict(log.reached)
            if (found_code := code()) is None:
                async for record in log.read(places, since_s=None, starts=starts, follow=True):
                    show(record)
                    if (found_code := code()) is not None:
                        break
            return found_code or 0

    session.run(main())


def _judge(readers: dict[tuple[str, str], Reader], event: Mapping[str, Any]) -> Step:
    """What the event means to a reader; an ended job is forgotten once 10,000 are known."""
    key = (event["tenant"], event.get("job_id", ""))
    reader = readers.get(key)
    if reader is None:
        if len(readers) >= 10_000:
            for old in [known for known, one in readers.items() if one.ended] or list(readers):
                del readers[old]
        reader = readers[key] = Reader()
    if refuses_another(reader, event):
        return Step.IGNORED
    try:
        return reader.feed(event)
    except (KeyError, TypeError):
        return Step.IGNORED


def line(event: Mapping[str, Any], timestamp_ms: int, step: Step) -> Text:
    """One event as people read it: time, job, attempt's end, number, type, content."""
    when = datetime.fromtimestamp(timestamp_ms / 1000, UTC).astimezone()
    kind = event["type"]
    run = f"#{event['run']}" if event["run"] else ""
    attempt = (event.get("attempt") or "")[-6:]
    text = Text(f"{when:%H:%M:%S}.{when.microsecond // 1000:03d} ", style="dim")
    text.append(one_line(f"{event['tenant']}/{event.get('job_id', '?')}{run}"), style="bold")
    text.append(f" {attempt}:{one_line(event.get('seq', '-'))}", style="dim")
    text.append(f" {one_line(kind):<9} ", style=STYLE.get(kind, ""))
    text.append(content(event) if kind == "chunk" else one_line(content(event)))
    if step is Step.IGNORED:
        text.append(" (ignored by readers)")
        text.stylize("dim")
    return text


def content(event: Mapping[str, Any]) -> str:
    """What an event says, in a few words."""
    match event["type"]:
        case "chunk":
            choices = (event.get("chunk") or {}).get("choices") or ()
            pieces = [
                f"{'' if n == 0 else f'[{n}] '}{choice_text(c)!r}" for n, c in ((c.get("index", 0), c) for c in choices)
            ]
            return f"+{event.get('tokens', '?')} {' '.join(pieces)}"
        case "started":
            return f"{event.get('model')} on {event.get('worker')}, {event.get('prompt_tokens')} prompt tokens"
        case "completed":
            usage = event.get("usage") or {}
            stored = event.get("output")
            where = f", stored in {stored.get('bucket')}/{stored.get('key')}" if stored else ""
            reasons = ",".join(event.get("finish_reasons") or ())
            return f"{usage.get('prompt_tokens')} + {usage.get('completion_tokens')} tokens, {reasons}{where}"
        case "failed":
            error = event.get("error") or {}
            return f"{error.get('code')}: {error.get('message')}"
        case "waiting":
            return f"{event.get('reason')} since {event.get('since')}"
        case _:
            return str(event.get("reason") or "")
