"""The command line, `headrace`. Exit codes: 0 done, 1 failed, 2 wrong usage, 3 not reachable."""

from __future__ import annotations

import importlib
import sys

import typer

# One module a command (or group); each has `register(app)`. Imported when the command line is built.
COMMANDS = (
    *("demo", "stack", "topics", "worker", "submit", "tail", "job", "cancel", "dead_letters", "reconcile"),
    *("schema", "bench"),
)


def build() -> typer.Typer:
    """The command line with every command on it."""
    app = typer.Typer(
        name="headrace",
        help="Event-driven batch inference: jobs on Kafka, vLLM in the worker, token streams back, outputs in S3.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    for name in COMMANDS:
        importlib.import_module(f"service.cli.{name}").register(app)
    return app


def main() -> None:
    try:
        build()()
    except KeyboardInterrupt:
        sys.exit(130)
