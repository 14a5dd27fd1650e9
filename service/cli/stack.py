"""`headrace up`, `down`, `status`: the local stack. Exit codes: 0 good, 1 a part is not, 2 wrong usage."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from types import FrameType
from typing import Annotated, Any

import orjson
import typer
from rich.console import Console
from rich.table import Table

from infra.errors import StackError
from infra.progress import Progress, Quiet
from infra.stack import Stack
from service.topics import BrokerUnreachable, TopicsRefused

Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output, no progress lines.")]


def register(app: typer.Typer) -> None:
    app.command("up")(up)
    app.command("down")(down)
    app.command("status")(status)


def up(json: Json = False) -> None:
    """Starts Kafka, the S3 store, the Collector and the trace viewer, or what of them does not run, and applies topics.

    What is slow to make is made once and kept in ~/.cache/headrace (HEADRACE_CACHE). State and logs: .headrace/.
    """
    stack = Stack(show=_show(json))
    with _failing(json), _terminable():
        stack.up()
    parts = stack.status()
    if json:
        _print({"ok": True, "changed": stack.changed, "notes": stack.notes, **_document(stack)})
        return
    console = Console(highlight=False)
    console.print("nothing to do: everything runs" if not stack.changed else "the local stack is up")
    for part in parts:
        if part.address and part.state == "running":
            console.print(f"  {part.name:<10} {part.address}{'/zipkin/' if part.name == 'zipkin' else ''}")
    console.print("next: uv run headrace worker   (stop the stack again: uv run headrace down)")


def down(json: Json = False) -> None:
    """Ends every process of the local stack. Data, topics and ports are kept (make clean removes them)."""
    stack = Stack(show=_show(json))
    with _failing(json):
        stopped = stack.down()
    if json:
        _print({"ok": True, "stopped": stopped})
    else:
        typer.echo(f"stopped: {', '.join(stopped)}" if stopped else "nothing was running")


def status(json: Json = False) -> None:
    """Says what runs, where it listens and where its log lies. Exit code 1 unless Kafka and the store answer."""
    stack = Stack(show=Quiet())
    parts = stack.status()
    good = all(part.state == "running" for part in parts if part.name in ("kafka", "store"))
    if json:
        _print({"ok": good, **_document(stack)})
    else:
        table = Table(box=None, pad_edge=False)
        for title in ("part", "state", "pid", "address"):
            table.add_column(title, overflow="fold")
        for part in parts:
            state = f"{part.state} ({part.detail})" if part.detail else part.state
            table.add_row(part.name, state, str(part.pid or ""), part.address)
        console = Console(highlight=False)
        console.print(table)
        console.print(f"logs: {stack.folder / 'logs'}", soft_wrap=True)
    raise typer.Exit(0 if good else 1)


def _document(stack: Stack) -> dict[str, Any]:
    running = stack.running
    return {
        "folder": str(stack.folder),
        "parts": [asdict(part) for part in stack.status()],
        "environment": stack.environment() if running else {},
    }


def _show(json: bool) -> Progress | None:
    return Quiet() if json else None


def _print(document: dict[str, Any]) -> None:
    typer.echo(orjson.dumps(document).decode())


@contextmanager
def _failing(json: bool) -> Iterator[None]:
    """Errors as one line (and the end of the log it names), exit code 1."""
    try:
        yield
    except (StackError, TopicsRefused, BrokerUnreachable) as error:
        if json:
            _print({"ok": False, "error": str(error)})
        else:
            typer.echo(f"headrace: {error}", err=True)
            if detail := getattr(error, "detail", ""):
                typer.echo(detail, err=True)
        raise typer.Exit(1) from None


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
