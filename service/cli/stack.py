"""`headrace up`, `down`, `status`: the local stack. Exit codes: 0 good, 1 a part is not, 2 wrong usage."""

from __future__ import annotations

import shlex
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from types import FrameType
from typing import Annotated, Any

import orjson
import typer
from rich.table import Table

from infra.errors import StackError
from infra.progress import Progress, Quiet
from infra.stack import Stack
from service import cards
from service.cli import session
from service.cli.terminal import Screen
from service.topics import BrokerUnreachable, TopicsRefused

Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output, no progress lines.")]

# Seconds a worker has to say whether it is ready; it answers within one, also when its loop is stuck.
READY_S = 3.0
# Workers are on this machine: a proxy in the environment is for elsewhere.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def register(app: typer.Typer) -> None:
    app.command("up")(up)
    app.command("down")(down)
    app.command("status")(status)


def up(
    secure: Annotated[bool, typer.Option("--secure", help="TLS, logins and access lists on Kafka; for good.")] = False,
    json: Json = False,
) -> None:
    """Starts Kafka, the S3 store, the Collector and the trace viewer, or what of them does not run, and applies topics.

    What is slow to make is made once and kept in ~/.cache/headrace (HEADRACE_CACHE). State and logs: .headrace/.
    """
    stack = Stack(show=_show(json), secure=secure)
    with _failing(json), _terminable():
        stack.up()
    parts = stack.status()
    if json:
        session.print_json({"ok": True, "changed": stack.changed, "notes": stack.notes, **_document(stack)})
        return
    console = Screen(highlight=False)
    console.print("nothing to do: everything runs" if not stack.changed else "the local stack is up")
    for part in parts:
        if part.address and part.state == "running":
            console.print(f"  {part.name:<10} {part.address}{'/zipkin/' if part.name == 'zipkin' else ''}")
    console.print("next: uv run headrace worker   (stop the stack again: uv run headrace down)")


def down(json: Json = False) -> None:
    """Ends every process of the local stack. Data, topics and ports are kept (make clean removes them)."""
    stack = Stack(show=_show(json))
    with _failing(json):
        left = _workers(stack)
        stopped = stack.down()
        cards.sweep(stack.folder)
    if json:
        session.print_json({"ok": True, "stopped": stopped, "workers": [asdict(card) for card in left]})
    else:
        for card in left:
            told = f"worker {card.name} still runs, and its broker is gone now: kill {card.pid}"
            typer.echo(f"headrace: {told}", err=True)
        typer.echo(f"stopped: {', '.join(stopped)}" if stopped else "nothing was running")


def status(
    env: Annotated[bool, typer.Option("--env", help='Only the addresses, for a shell: eval "$(…)".')] = False,
    json: Json = False,
) -> None:
    """Says what runs, where it listens and where its log lies. Exit code 1 unless Kafka and the store answer.

    Workers of this machine are shown with what their /readyz says; they do not change the exit code.
    """
    stack = Stack(show=Quiet())
    if env:
        with _failing(json):
            for name, value in stack.environment().items():
                typer.echo(f"export {name}={shlex.quote(value)}")
        return
    parts = stack.status()
    good = all(part.state == "running" for part in parts if part.name in ("kafka", "store"))
    if json:
        session.print_json({"ok": good, **_document(stack)})
    else:
        table = Table(box=None, pad_edge=False)
        for title in ("part", "state", "pid", "address"):
            table.add_column(title, overflow="fold")
        for part in parts:
            state = f"{part.state} ({part.detail})" if part.detail else part.state
            table.add_row(part.name, state, str(part.pid or ""), part.address)
        console = Screen(highlight=False)
        console.print(table)
        workers = _asked(_workers(stack))
        for card, verdict in workers:
            identity = f"{card.model} ({card.engine}), pool {card.pool}"
            told = f"worker {card.name}: {verdict}, {identity}, {card.http}, pid {card.pid}"
            console.print(told, soft_wrap=True, markup=False)
        if good and not workers:
            console.print("no worker of this stack runs here: headrace worker")
        console.print(f"logs: {stack.folder / 'logs'}", soft_wrap=True)
    raise typer.Exit(0 if good else 1)


def _document(stack: Stack) -> dict[str, Any]:
    running = stack.running
    return {
        "folder": str(stack.folder),
        "parts": [asdict(part) for part in stack.status()],
        "workers": [{**asdict(card), "state": verdict} for card, verdict in _asked(_workers(stack))],
        "environment": stack.environment() if running else {},
    }


def _workers(stack: Stack) -> list[cards.Card]:
    """Of this machine and this stack's broker; when it is down, all that have their state in its folder."""
    found = cards.alive(stack.folder)
    try:
        broker = stack.addresses.bootstrap
    except StackError:
        return found
    return [card for card in found if card.bootstrap == broker]


def _asked(found: list[cards.Card]) -> list[tuple[cards.Card, str]]:
    """Each with what it says of itself: ready, or why not."""
    if not found:
        return []
    with ThreadPoolExecutor(len(found)) as pool:
        return list(zip(found, pool.map(_verdict, found), strict=True))


def _verdict(card: cards.Card) -> str:
    try:
        with _DIRECT.open(f"{card.http}/readyz", timeout=READY_S):
            return "ready"
    except urllib.error.HTTPError as answer:
        try:
            checks = orjson.loads(answer.read())["checks"]
            reasons = [why for why in checks.values() if why != "ok"]
        except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
            reasons = [f"HTTP {answer.code}"]
        return f"not ready ({'; '.join(reasons)})"
    except (OSError, ValueError):
        return "does not answer"


def _show(json: bool) -> Progress | None:
    return Quiet() if json else None


@contextmanager
def _failing(json: bool) -> Iterator[None]:
    """Errors as one line (and the end of the log it names), exit code 1."""
    try:
        yield
    except (StackError, TopicsRefused, BrokerUnreachable) as error:
        code = session.told(str(error), session.FAILED)
        if not json and (detail := getattr(error, "detail", "")):
            typer.echo(detail, err=True)
        raise typer.Exit(code) from None


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends an `up` as Ctrl-C does: what it started is stopped, what it was building too."""

    def end(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    former = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)
