"""`headrace job`: how one job stands and where its time went, from its events and its status record."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Annotated, Any

import orjson
import typer
from aiokafka import TopicPartition
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from client import Reader, Step
from client.replies import parse
from schemas.names import status_topic
from service.cli import session
from service.cli.tail import MALFORMED
from service.cli.terminal import Screen, one_line
from service.cli.topic_log import Record, TopicLog, refuses_another

BAR = 40  # characters of the whole time
STAGE_STYLE = {"kafka": "blue", "queue": "yellow", "admission": "yellow", "engine queue": "yellow", "prefill": "cyan"}


@dataclass
class Attempt:
    """What is known of one attempt."""

    attempt: str
    run: int
    started: str | None = None
    model: str | None = None
    worker: str | None = None
    trace_id: str | None = None
    chunks: int = 0
    tokens: int = 0
    end: str | None = None  # type of its last event, if that ended or abandoned it


@dataclass
class Account:
    """Everything the log tells about one job of one tenant, read in offset order."""

    tenant: str
    job_id: str
    reader: Reader = field(default_factory=Reader)
    attempts: dict[str, Attempt] = field(default_factory=dict)
    waiting: Mapping[str, Any] | None = None
    ignored_ends: int = 0  # further raw terminal events, which no reader delivers
    place: tuple[str, int, int] | None = None  # of the terminal event that counts
    status: Mapping[str, Any] | None = None
    published_ms: int | None = None  # broker time of the job's record

    def take(self, event: Mapping[str, Any], record: Record) -> None:
        """Accounts for the next event. Events that lack what the contract promises are passed over."""
        with contextlib.suppress(*MALFORMED):
            step = Step.IGNORED if refuses_another(self.reader, event) else self.reader.feed(event)
            self._enter(event, record, step)

    def _enter(self, event: Mapping[str, Any], record: Record, step: Step) -> None:
        kind = event["type"]
        if step is Step.END:
            self.place = (record.topic, record.partition, record.offset)
        elif step is Step.WAITING:
            self.waiting = event
        if kind == "waiting":
            return
        name = event.get("attempt", "")
        one = self.attempts.setdefault(name, Attempt(name, event["run"]))
        if kind == "started":
            one.started = event.get("at")
            one.model, one.worker, one.trace_id = event.get("model"), event.get("worker"), event.get("trace_id")
        elif kind == "chunk":
            one.chunks += 1
            one.tokens += event.get("tokens", 0)
        else:
            one.end = kind
            self.ignored_ends += kind != "abandoned" and step is Step.IGNORED

    @property
    def state(self) -> str:
        if self.reader.ended is not None:
            return str(self.reader.ended["type"])
        if self.status is not None:
            return str(self.status.get("kind"))
        if self.reader.attempt is not None:
            return "running" if self.attempts[self.reader.attempt].end is None else "interrupted, will run again"
        return "waiting" if self.waiting is not None else "queued or unknown"

    @property
    def end(self) -> Mapping[str, Any]:
        return self.reader.ended or {}

    @property
    def ended_well(self) -> bool:
        """Completed, or still on its way."""
        return self.state not in ("failed", "cancelled", "expired", "dead", "undeliverable", "queued or unknown")

    @property
    def kafka_ms(self) -> float | None:
        """From the record's broker time until the worker had it: the end less the time the worker accounts for."""
        total = (self.end.get("timings") or {}).get("total_ms")
        if self.published_ms is None or total is None or not isinstance(self.end.get("at"), str):
            return None
        received_ms = datetime.fromisoformat(self.end["at"]).timestamp() * 1000 - total
        return max(0.0, received_ms - self.published_ms)


def stages(timings: Mapping[str, Any], kafka_ms: float | None = None) -> list[tuple[str, float]]:
    """Where the time went, in milliseconds, in order; what the timings leave open between stages gets its own name."""
    known = {name: timings.get(f"{name}_ms") for name in ("queue", "admission", "prefill", "first_token", "total")}
    found: list[tuple[str, float]] = []
    if kafka_ms is not None:
        found.append(("kafka", kafka_ms))
    found += [(name, ms) for name in ("queue", "admission") if (ms := known[name]) is not None]
    total, first, prefill = known["total"], known["first_token"], known["prefill"]
    if first is not None and prefill is not None:
        before = (known["queue"] or 0.0) + (known["admission"] or 0.0)
        found += [("engine queue", max(0.0, first - prefill - before)), ("prefill", prefill)]
        if total is not None:
            found.append(("decode", max(0.0, total - first)))
    return found


def register(app: typer.Typer) -> None:
    app.command("job")(job)


def job(
    id: Annotated[str, typer.Argument(help="The job's id.")],
    tenant: Annotated[str | None, typer.Option(help="Its tenant, if several have a job of this id.")] = None,
    topic: Annotated[str | None, typer.Option(help="Reply topic; the tenant's default one by default.")] = None,
    since: Annotated[str, typer.Option(help="How far to look back: 15m, 2h, 1d.")] = "1d",
    timeout: Annotated[str, typer.Option(help="How long to look.")] = "30s",
    pool: Annotated[str | None, typer.Option(help="Pool whose status topic is read.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    bootstrap: Annotated[str | None, typer.Option(help="Kafka address; the local stack's by default.")] = None,
) -> None:
    """Shows how a job stands and where its time went.

    Exit codes: 0 completed or on its way, 1 failed, cancelled, expired or not found, 2 wrong usage, 3 not reachable.
    """
    found = session.settings(bootstrap, pool)
    replies = topic or session.reply_topic(found, tenant)
    since_s, limit_s = session.seconds(since), session.seconds(timeout)

    async def main() -> int:
        async with TopicLog(found.kafka.bootstrap, found.kafka.security) as log:
            accounts, whole = await look_up(log, id, replies, status_topic(found.pool), since_s, limit_s)
        if tenant is not None:
            accounts = {name: one for name, one in accounts.items() if name == tenant}
        if not accounts:
            scope = f"in the last {since}" if whole else f"in what {timeout} were enough to read (--timeout)"
            message = f"no event of job {id} on {replies} {scope}: it is queued, unknown, or older (--since)"
            return session.told(message, session.FAILED)
        if len(accounts) > 1:
            names = ", ".join(sorted(accounts))
            return session.told(f"job {id} exists for tenants {names}: name one, --tenant", session.USAGE)
        (account,) = accounts.values()
        try:
            told = as_json(account, whole=whole)
            pictures = picture(account)
        except MALFORMED as error:
            message = f"what ended job {id} is no event of the contract ({one_line(error)}): headrace tail {id} --json"
            return session.told(message, session.FAILED)
        if json:
            session.print_json(told)
        else:
            screen = Screen(highlight=False)
            for one in pictures:
                screen.print(one)
            if not whole:
                typer.echo(f"(stopped reading after {timeout}: there may be more, --timeout)", err=True)
        return 0 if account.ended_well else session.FAILED

    session.run(main())


async def look_up(
    log: TopicLog, id: str, topic: str, status: str, since_s: float, limit_s: float
) -> tuple[dict[str, Account], bool]:
    """Accounts by tenant, and whether everything was read. The status record, if there is one, tells which partition
    to read.
    """
    until = time.monotonic() + limit_s
    accounts: dict[str, Account] = {}
    whole = True
    statuses: list[Mapping[str, Any]] = []
    if log.has(status):
        middle = f"|{id}|".encode()
        async for record in log.read(await log.partitions(status), since_s=since_s, limit_s=limit_s):
            if record.key and middle in record.key and record.value:
                with contextlib.suppress(orjson.JSONDecodeError):
                    found = orjson.loads(record.value)
                    if isinstance(found, dict) and found.get("job_id") == id:
                        statuses.append(found)
        whole = log.whole
    for found in statuses:
        account = accounts.setdefault(found["tenant"], Account(found["tenant"], id))
        if account.status is None or found.get("run", 0) >= account.status.get("run", 0):
            account.status = found
    places = await log.partitions(topic)
    terminals = [one["terminal"] for one in statuses if one.get("terminal")]
    if terminals and all(one["topic"] == topic for one in terminals):
        places = sorted({TopicPartition(one["topic"], one["partition"]) for one in terminals})
    for record in await log.job(id, places, since_s=since_s, limit_s=max(0.0, until - time.monotonic())):
        if record.value and (event := parse(record.value)) is not None:
            accounts.setdefault(event["tenant"], Account(event["tenant"], id)).take(event, record)
    whole = whole and log.whole
    for account in accounts.values():
        origin = (account.status or {}).get("origin", "")
        if origin:
            name, partition, offset = origin.rsplit("/", 2)
            first = await log.record_at(name, int(partition), int(offset)) if log.has(name) else None
            account.published_ms = first.timestamp if first is not None else None
    return accounts, whole


def as_json(account: Account, *, whole: bool) -> dict[str, Any]:
    end = account.end
    status = account.status or {}
    return {
        "id": account.job_id,
        "tenant": account.tenant,
        "run": account.reader.run,
        "state": account.state,
        "attempts": [asdict(one) for one in account.attempts.values()],
        "error": end.get("error") or ({"code": status["code"]} if status.get("code") else None),
        "usage": end.get("usage") or status.get("usage"),
        "timings": end.get("timings"),
        "stages_ms": {name: round(ms, 3) for name, ms in stages(end.get("timings") or {}, account.kafka_ms)},
        "finish_reasons": end.get("finish_reasons"),
        "output": end.get("output") or status.get("output"),
        "terminal": dict(zip(("topic", "partition", "offset"), account.place, strict=True)) if account.place else None,
        "suppressed": account.ignored_ends,
        "metadata": end.get("metadata"),
        "whole": whole,
    }


def picture(account: Account) -> list[RenderableType]:
    """The account as people read it."""
    end, status = account.end, account.status or {}
    facts = Table.grid(padding=(0, 2))
    state = Text(
        account.state, style="green" if account.state == "completed" else "bold" if account.ended_well else "bold red"
    )
    facts.add_row(
        "job", Text(f"{account.tenant}/{account.job_id}" + (f" run {account.reader.run}" if account.reader.run else ""))
    )
    facts.add_row("state", state)
    if account.waiting is not None and not end:
        facts.add_row("waiting", Text(f"{account.waiting.get('reason')} since {account.waiting.get('since')}"))
    error = end.get("error") or {}
    if error or status.get("code"):
        facts.add_row(
            "error", Text(f"{error.get('code') or status.get('code')}: {error.get('message', 'see the dead letters')}")
        )
    for number, one in enumerate(account.attempts.values(), 1):
        told = f"{one.attempt} on {one.worker}, {one.chunks} chunks, {one.tokens} tokens, {one.end or 'running'}"
        facts.add_row(f"attempt {number}", Text(told))
        if one.trace_id and one.trace_id not in (
            other.trace_id for other in list(account.attempts.values())[: number - 1]
        ):
            facts.add_row("trace", Text(session.viewer(one.trace_id) or one.trace_id))
    usage = end.get("usage") or status.get("usage")
    if usage:
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        told = f"{usage.get('prompt_tokens')} prompt ({cached} cached) + {usage.get('completion_tokens')} output tokens"
        facts.add_row("usage", Text(told))
    output = end.get("output") or status.get("output")
    if output:
        facts.add_row("output", Text(f"{output['bucket']}/{output['key']}, {output['size']:,} bytes"))
    if account.place is not None:
        facts.add_row("terminal", Text("{}/{}/{}".format(*account.place)))
    if account.ignored_ends:
        facts.add_row("suppressed", Text(f"{account.ignored_ends} further terminal event(s), which no reader delivers"))
    spent = stages(end.get("timings") or {}, account.kafka_ms)
    return [facts, "", bars(spent)] if spent else [facts]


def bars(spent: list[tuple[str, float]]) -> Table:
    """Each stage where it lay in the whole time."""
    total = sum(ms for _, ms in spent) or 1.0
    table = Table.grid(padding=(0, 2))
    passed = 0.0
    for name, ms in spent:
        left = round(passed / total * BAR)
        passed += ms
        width = max(round(passed / total * BAR) - left, 1 if ms > 0 else 0)
        bar = Text(" " * min(left, BAR - 1))
        bar.append("█" * width, style=STAGE_STYLE.get(name, "green"))
        table.add_row(name, Text(f"{ms:,.1f} ms", justify="right"), bar)
    table.add_row("total", Text(f"{total:,.1f} ms", justify="right"), "")
    return table
