"""`headrace dead-letters list|show|replay`: what could not be answered, and how it gets another chance (R15)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from aiokafka import TopicPartition
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from client import Unreachable
from consumers import lenient
from schemas.errors import ErrorCode
from schemas.names import DEAD_LETTERS
from service.cli import session
from service.cli.dead_letter_topic import SLACK_S, Survey, look_up, notes_on, survey
from service.cli.options import Bootstrap, Json
from service.cli.terminal import Screen, say, write
from service.cli.topic_log import TopicLog
from service.credentials import Sealer
from service.dead_letters import Filter, Letter, Note, NotReplayable, Replay, Spot, as_json, replay, text_of
from service.replay import Replayer
from service.settings import Settings
from service.topics import BrokerUnreachable

# Replays on their way at a time: each holds its record, 1 MiB at most.
AT_ONCE = 64
# Characters a terminal needs for a list with origins.
WIDE = 130

Tenant = Annotated[str | None, typer.Option(help="Only this tenant's.")]
Code = Annotated[str | None, typer.Option(help="Only letters with this error code.")]
Topic = Annotated[str | None, typer.Option(help="Only records that came from this topic.")]
Since = Annotated[str, typer.Option(help="How far to look back: 15m, 2h, 1d.")]
Timeout = Annotated[str, typer.Option(help="How long to read.")]


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="Records that could not be answered: list, show, replay.", no_args_is_help=True)
    group.command("list")(list_)
    group.command("show")(show)
    group.command("replay")(replay_)
    app.add_typer(group, name="dead-letters")


def list_(
    tenant: Tenant = None,
    code: Code = None,
    topic: Topic = None,
    since: Since = "30d",
    open_only: Annotated[bool, typer.Option("--open", help="Only letters that were not replayed.")] = False,
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="At most so many, the newest.")] = 100,
    timeout: Timeout = "60s",
    json: Json = False,
    bootstrap: Bootstrap = None,
) -> None:
    """Lists dead letters, newest last.

    Exit codes: 0 done (also if there are none), 2 wrong usage, 3 not reachable.
    """
    found = session.settings(bootstrap)
    wanted, since_s, limit_s = _filter(tenant, code, topic), session.seconds(since), session.seconds(timeout)

    async def main() -> int:
        lenient.install()
        async with TopicLog(found.kafka.bootstrap, found.kafka.security) as log:
            seen = await survey(log, wanted, since_s, limit_s, None if open_only else limit)
        if open_only:  # the note lies behind its letter, so all must have been read before the newest are chosen
            seen.keep_open(limit)
        if json:
            session.print_json(
                {
                    "letters": [as_json(letter, seen.notes.get(letter.spot)) for letter in seen.letters],
                    "matched": seen.matched,
                    "whole": seen.whole,
                }
            )
            return 0
        console = Screen(highlight=False)
        if seen.letters:
            console.print(table(seen.letters, seen.notes, console.width))
        else:
            every = wanted.empty and not open_only
            console.print(f"no dead letter in the last {since}" if every else "no dead letter matches")
        if seen.matched > len(seen.letters):
            console.print(f"(the newest {len(seen.letters)} of {seen.matched}: --limit)")
        _say_if_cut(seen.whole, timeout)
        return 0

    session.run(main())


def show(
    letter: Annotated[str, typer.Argument(help="Its place, partition/offset, as `list` shows it.")],
    value: Annotated[bool, typer.Option("--value", help="Also its content, which may hold prompts.")] = False,
    json: Json = False,
    bootstrap: Bootstrap = None,
) -> None:
    """Shows one dead letter: why it is here, where it came from, its headers; its content only with --value.

    Exit codes: 0 done, 1 there is no such letter, 2 wrong usage, 3 not reachable.
    """
    found = session.settings(bootstrap)
    spot = _spot(letter)

    async def main() -> int:
        lenient.install()
        async with TopicLog(found.kafka.bootstrap, found.kafka.security) as log:
            one = await look_up(log, spot)
            notes = await notes_on(log, [one]) if one is not None else {}
        if one is None:
            message = f"there is no dead letter at {spot} (any more): headrace dead-letters list"
            return session.told(message, session.FAILED)
        if json:
            session.print_json(as_json(one, notes.get(spot), whole=True, content=value))
        else:
            Screen(highlight=False).print(picture(one, notes.get(spot), content=value))
            if value:
                write((text_of(one.value) or "") + "\n")
        return 0

    session.run(main())


def replay_(
    letters: Annotated[list[str] | None, typer.Argument(help="Places, partition/offset; or filters, or --all.")] = None,
    every: Annotated[bool, typer.Option("--all", help="All letters of the time given by --since.")] = False,
    tenant: Tenant = None,
    code: Code = None,
    topic: Topic = None,
    since: Since = "30d",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be published, publish nothing.")] = False,
    again: Annotated[bool, typer.Option("--again", help="Also letters that were replayed before.")] = False,
    timeout: Timeout = "60s",
    json: Json = False,
    bootstrap: Bootstrap = None,
) -> None:
    """Publishes the jobs of dead letters again, to the topic they came from, with run + 1 and in the same trace.

    A letter that was replayed is not replayed twice, unless --again is given: then under a further run.
    Exit codes: 0 done, 1 a letter is missing or was refused, 2 wrong usage, 3 not reachable.
    """
    found = session.settings(bootstrap)
    wanted, since_s, limit_s = _filter(tenant, code, topic), session.seconds(since), session.seconds(timeout)
    spots = [_spot(text) for text in letters or ()]
    if spots and (every or not wanted.empty):
        raise typer.BadParameter("name letters, or choose them by filters, not both")
    if not spots and not every and wanted.empty:
        raise typer.BadParameter(
            "name letters (partition/offset), or choose them by --tenant, --code, --topic or --all"
        )

    async def main() -> int:
        lenient.install()
        done = Outcome(dry_run)
        async with TopicLog(found.kafka.bootstrap, found.kafka.security) as log:
            if spots:
                await _replay_named(log, found, spots, done, again=again)
            else:
                seen = await survey(log, wanted, since_s, limit_s, None)
                if not seen.whole:
                    message = f"the dead letters could not be read whole in {timeout}, nothing was replayed: --timeout"
                    return session.told(f"{message}, or a shorter --since", session.FAILED)
                await _replay_chosen(log, found, seen, done, since_s, again=again)
        if json:
            session.print_json(done.as_json())
        else:
            done.show(Screen(highlight=False, soft_wrap=True))
        return session.FAILED if done.refused or done.missing else 0

    session.run(main(), left=lambda: "left; what was published stays published: headrace dead-letters list")


# Replaying


@dataclass
class Outcome:
    """What became of each letter."""

    dry_run: bool
    replayed: list[tuple[Replay, Note | None]] = field(default_factory=list)
    refused: list[tuple[Spot, str]] = field(default_factory=list)
    skipped: list[Note] = field(default_factory=list)  # replayed before, and not named one by one
    missing: list[Spot] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return {
            "dry_run": self.dry_run,
            "replayed": [
                {
                    "letter": str(record.letter),
                    "tenant": record.tenant,
                    "job_id": record.job_id,
                    "run": record.run,
                    "topic": record.topic,
                    "place": str(note.place) if note is not None else None,
                    "trace_id": record.trace_id,
                }
                for record, note in self.replayed
            ],
            "refused": [{"letter": str(spot), "why": why} for spot, why in self.refused],
            "skipped": [
                {"letter": str(note.letter), "run": note.run, "place": str(note.place)} for note in self.skipped
            ],
            "missing": [str(spot) for spot in self.missing],
        }

    def show(self, console: Console) -> None:
        verb = "would replay" if self.dry_run else "replayed"
        for record, note in self.replayed:
            to = str(note.place) if note is not None else f"{record.topic}/{record.partition}"
            identity = f"{record.tenant}/{record.job_id} run {record.run}"
            console.print(f"{verb} {record.letter}: {escape(identity)} → {escape(to)}")
        for spot in self.missing:
            typer.echo(f"headrace: there is no dead letter at {spot}: headrace dead-letters list", err=True)
        for spot, why in self.refused:
            say(f"headrace: letter {spot} {why}", err=True)
        if self.skipped:
            console.print(f"{len(self.skipped)} left out: replayed before (--again replays them under a further run)")
        if not (self.replayed or self.missing or self.refused or self.skipped):
            console.print("no dead letter matches")


async def _replay_named(log: TopicLog, found: Settings, spots: Sequence[Spot], done: Outcome, *, again: bool) -> None:
    letters = []
    for spot in dict.fromkeys(spots):
        letter = await look_up(log, spot)
        if letter is None:
            done.missing.append(spot)
        else:
            letters.append(letter)
    notes = await notes_on(log, letters)
    fresh = []
    for letter in letters:
        note = notes.get(letter.spot)
        if note is not None and not again:
            why = f"was replayed before, as run {note.run} at {note.place}; --again replays it under a further run"
            done.refused.append((letter.spot, why))
        else:
            fresh.append(letter)
    await _publish(found, fresh, notes, done)


async def _replay_chosen(
    log: TopicLog, found: Settings, seen: Survey, done: Outcome, since_s: float, *, again: bool
) -> None:
    """Reads the topic a second time, for the contents, so that no more than a few letters are held at once."""
    chosen: set[Spot] = set()
    for letter in seen.letters:
        note = seen.notes.get(letter.spot)
        if note is not None and not again:
            done.skipped.append(note)
        else:
            chosen.add(letter.spot)
    batch: list[Letter] = []
    if chosen:
        places = [TopicPartition(DEAD_LETTERS, number) for number in sorted({spot.partition for spot in chosen})]
        async for record in log.read(places, since_s=since_s + SLACK_S):
            spot = Spot(record.partition, record.offset)
            if spot not in chosen:
                continue
            chosen.discard(spot)
            batch.append(Letter.of(record))
            if len(batch) >= AT_ONCE:
                await _publish(found, batch, seen.notes, done)
                batch = []
            if not chosen:
                break
        await _publish(found, batch, seen.notes, done)
    done.missing += sorted(chosen, key=lambda spot: (spot.partition, spot.offset))  # retention took them meanwhile


async def _publish(found: Settings, letters: Sequence[Letter], notes: Mapping[Spot, Note], done: Outcome) -> None:
    ready: list[tuple[Letter, Replay]] = []
    sealer = _sealer(found)
    for letter in letters:
        note = notes.get(letter.spot)
        try:
            ready.append(
                (letter, replay(letter, note.run if note is not None else None, sealer=sealer, now=time.time()))
            )
        except NotReplayable as why:
            done.refused.append((letter.spot, str(why)))
    if done.dry_run:
        done.replayed += [(record, None) for _, record in ready]
        return
    if not ready:
        return
    try:
        async with Replayer(found.kafka.bootstrap, found.kafka.security) as replayer:
            sent = await asyncio.gather(
                *(replayer.send(record, letter.key) for letter, record in ready), return_exceptions=True
            )
    except BrokerUnreachable as problem:
        raise Unreachable(str(problem)) from None
    for (letter, record), result in zip(ready, sent, strict=True):
        if isinstance(result, Note):
            done.replayed.append((record, result))
        elif isinstance(result, NotReplayable):
            done.refused.append((letter.spot, str(result)))
        elif isinstance(result, BrokerUnreachable):
            done.refused.append((letter.spot, f"may or may not have been replayed: {result}"))
        else:
            raise result


def _sealer(found: Settings) -> Sealer | None:
    """What vouches for replays; None where nobody needs to."""
    if found.identity != "signed":
        return None
    try:
        return Sealer(found.service_secret, found.service_secret_former)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


# Showing


def table(letters: Sequence[Letter], notes: Mapping[Spot, Note], width: int) -> Table:
    """One line a letter; origins only where there is room for them."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    titles = ["letter", "when", "code", "job", "run", "replayed", *(["origin"] if width >= WIDE else [])]
    for title in titles:
        made.add_column(title, overflow="fold", no_wrap=title != "job")
    for letter in letters:
        note = notes.get(letter.spot)
        row: list[Text | str] = [
            str(letter.spot),
            f"{datetime.fromtimestamp(letter.at_ms / 1000, UTC).astimezone():%m-%d %H:%M:%S}",
            Text(letter.code or "?"),
            Text(f"{letter.tenant or '-'}/{letter.job_id or '-'}"),
            str(letter.run),
            f"run {note.run}" if note is not None else "",
            Text(str(letter.origin) if letter.origin is not None else "?"),
        ]
        made.add_row(*row[: len(titles)])
    return made


def picture(letter: Letter, note: Note | None, *, content: bool) -> Table:
    """One letter as people read it."""
    told = as_json(letter, note, whole=True, content=content)
    made = Table.grid(padding=(0, 2))
    identity = f"{letter.tenant}/{letter.job_id} run {letter.run}" if letter.job_id else "not readable"
    made.add_row("letter", str(letter.spot))
    made.add_row("job", Text(identity))
    made.add_row("reason", Text(f"{letter.code}: {letter.message}", style="bold red"))
    made.add_row("attempts", str(letter.attempts))
    made.add_row("failed at", Text(letter.failed_at or "?"))
    made.add_row("origin", Text(str(letter.origin) if letter.origin is not None else "?"))
    if note is not None:
        made.add_row("replayed", Text(f"as run {note.run}, at {note.place}"))
    made.add_row("key", Text(text_of(letter.key) or "-"))
    for name, value in told["headers"]:
        made.add_row("header", Text(f"{name}: {value}"))
    made.add_row("value", f"{letter.size} bytes" + ("" if content else " (--value shows them)"))
    return made


def _filter(tenant: str | None, code: str | None, topic: str | None) -> Filter:
    """Raises typer.BadParameter for a code that there is not: it would match nothing, in silence."""
    codes = [str(one) for one in ErrorCode]
    if code is not None and code not in codes:
        raise typer.BadParameter(f"{code!r} is none of {', '.join(codes)}", param_hint="--code")
    return Filter(tenant, code, topic)


def _spot(text: str) -> Spot:
    try:
        return Spot.parse(text)
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is no place of a dead letter: write partition/offset, such as 3/17"
        ) from None


def _say_if_cut(whole: bool, timeout: str) -> None:
    if not whole:
        typer.echo(f"(stopped reading after {timeout}: there may be more, --timeout)", err=True)
