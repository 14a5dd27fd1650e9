"""`headrace bench …`: what is promised, measured on this machine. The last line of `--json` is one JSON object."""

from __future__ import annotations

import asyncio
import logging
from typing import Annotated, Any

import orjson
import typer
from rich.console import Console
from rich.table import Table

from infra.errors import StackError
from infra.stack import Stack
from service.cli.worker import load
from service.topics import BrokerUnreachable, TopicsRefused

bench = typer.Typer(help="Measures what is promised, on this machine.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    app.add_typer(bench, name="bench")


@bench.callback()
def group() -> None:
    """Keeps `bench` a group while it has one command."""


@bench.command("engine-overhead")
def engine_overhead(
    json: Annotated[bool, typer.Option("--json", help="End with one JSON object on the last line.")] = False,
    pairs: Annotated[int, typer.Option(min=2, help="Pairs of rounds, bare engine and service.")] = 5,
    jobs: Annotated[int, typer.Option(min=0, help="Jobs a round; 0 = as many as the machine does in 15 s.")] = 0,
    output_tokens: Annotated[int, typer.Option(min=1, help="Output tokens a job.")] = 32,
    seqs: Annotated[int, typer.Option(min=1, help="Sequences the engine runs at once.")] = 32,
) -> None:
    """The whole service beside `AsyncLLM` and `LLM.generate` on the same prompts, in ABBA pairs with an interval."""
    from load import engine_overhead
    from load.engine_overhead import BenchFailed
    from service.engine.protocol import StartFailure

    console = Console(stderr=json, highlight=False)
    stack = Stack()
    was_up = stack.running
    try:
        stack.up()
        settings = load(worker="bench")
        settings.engine.max_num_seqs = seqs
        settings.engine.stream_interval = 1
        logging.basicConfig(level=logging.WARNING)
        measured = asyncio.run(
            engine_overhead.run(settings, pairs=pairs, jobs=jobs, output_tokens=output_tokens, say=console.print)
        )
    except (StackError, TopicsRefused, BrokerUnreachable, BenchFailed, StartFailure) as problem:
        console.print(f"[red]headrace bench:[/] {problem}")
        raise typer.Exit(1) from None
    finally:
        if not was_up:
            stack.down()
    _show(console, measured)
    if json:
        typer.echo(orjson.dumps(measured).decode())
    raise typer.Exit(0 if measured["verdict"] == "pass" else 1)


def _show(console: Console, measured: dict[str, Any]) -> None:
    table = Table(title="engine overhead")
    table.add_column("measure")
    table.add_column("value", justify="right")
    low, high = measured["ratio_ci95"]
    table.add_row("service ÷ AsyncLLM, tokens/s", f"{measured['ratio_vs_async_llm']} (95 % {low} to {high})")
    table.add_row("service ÷ LLM.generate, tokens/s", f"{measured['ratio_vs_llm_generate']}")
    table.add_row("added CPU, µs a token", f"{measured['added_cpu_us_per_token']}")
    table.add_row("added first-token delay, ms p50", f"{measured['added_first_token_ms_p50']}")
    table.add_row("bare Kafka echo, there and back, ms p50", f"{measured['echo_hops_ms_p50']}")
    console.print(table)
    console.print(f"verdict: {measured['verdict']} (upper end of the interval ≥ {measured['threshold']})")
