"""The command line, `headrace`. Exit codes: 0 done, 1 failed, 2 wrong usage, 3 not reachable."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from typing import Annotated

import typer

from service.cli.errors import Commands

# One module a command (or group); each has `register(app)`. Imported when the command line is built.
COMMANDS = (
    *("demo", "stack", "topics", "worker", "submit", "tail", "job", "cancel", "dead_letters", "reconcile"),
    *("tenants", "models", "usage", "capacity", "selftest"),
    *("schema", "bench"),
)


def build() -> typer.Typer:
    """The command line with every command on it."""
    app = typer.Typer(
        name="headrace",
        cls=Commands,
        help="Event-driven batch inference: jobs on Kafka, vLLM in the worker, token streams back, outputs in S3.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_whole)
    for name in COMMANDS:
        importlib.import_module(f"service.cli.{name}").register(app)
    return app


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"headrace {importlib.metadata.version('headrace')}")
        raise typer.Exit


def _whole(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass


def main() -> None:
    try:
        build()()
    except KeyboardInterrupt:
        sys.exit(130)
