"""The command line, `headrace`. Exit codes: 0 done, 1 failed, 2 wrong usage, 3 not reachable, 130 left by Ctrl-C."""

# What is imported here is imported before `main` can catch anything: a Ctrl-C meanwhile would end in a traceback.
import sys
from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING:
    import typer

# One module a command (or group); each has `register(app)`. Imported when the command line is built.
COMMANDS = (
    *("demo", "stack", "topics", "worker", "submit", "tail", "job", "cancel", "dead_letters", "reconcile"),
    *("tenants", "models", "usage", "capacity", "selftest"),
    *("schema", "bench"),
)


def build() -> "typer.Typer":
    """The command line with every command on it."""
    import importlib
    import importlib.metadata

    import typer

    from service.cli.errors import Commands

    def version(asked: bool) -> None:
        if asked:
            typer.echo(f"headrace {importlib.metadata.version('headrace')}")
            raise typer.Exit

    def whole(
        version: Annotated[
            bool, typer.Option("--version", callback=version, is_eager=True, help="Print the version and leave.")
        ] = False,
    ) -> None:
        pass

    app = typer.Typer(
        name="headrace",
        cls=Commands,
        help="Event-driven batch inference: jobs on Kafka, vLLM in the worker, token streams back, outputs in S3.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(whole)
    for name in COMMANDS:
        importlib.import_module(f"service.cli.{name}").register(app)
    return app


def main() -> None:
    try:
        from service.cli.errors import guarded

        code = guarded(lambda: build()())
    except KeyboardInterrupt:
        print("headrace: left by Ctrl-C", file=sys.stderr)
        code = 130
    sys.exit(code)
