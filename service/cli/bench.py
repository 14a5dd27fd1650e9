"""`headrace bench …`: what is promised, measured on this machine. The last line of `--json` is one JSON object."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Coroutine
from enum import Enum
from typing import Annotated, Any, TypeVar

import typer
from aiokafka.errors import KafkaError
from rich.console import Console
from rich.table import Table

from infra.errors import StackError
from infra.progress import Quiet
from infra.stack import Stack
from load.arena import ArenaFailed
from service.cli import session
from service.cli.process import WorkerProcess, WorkerStopped
from service.cli.terminal import Screen
from service.cli.worker import load
from service.topics import BrokerUnreachable, TopicsRefused

T = TypeVar("T")


class EngineName(Enum):
    simulated = "simulated"
    vllm = "vllm"


# Two cores carry one real engine.
DEFAULT_WORKERS = {EngineName.simulated: 3, EngineName.vllm: 1}

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
    output_tokens: Annotated[int, typer.Option(min=1, help="Output tokens a job.")] = 24,
    seqs: Annotated[int, typer.Option(min=1, help="Sequences the engine runs at once.")] = 32,
) -> None:
    """The whole service beside `AsyncLLM` and `LLM.generate` on the same prompts, in ABBA pairs with an interval."""
    from load import engine_overhead
    from load.engine_overhead import BenchFailed
    from service.engine.protocol import StartFailure

    console = Screen(stderr=json, highlight=False)
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
        session.print_json(measured)
    raise typer.Exit(0 if measured["verdict"] == "pass" else 1)


@bench.command("faults")
def faults(
    json: Annotated[bool, typer.Option("--json", help="End with one JSON object on the last line.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; each breaks something under load.")] = 20,
    seed: Annotated[int, typer.Option(min=0, help="Of the first round; the next ones count on.")] = 1,
    only: Annotated[str, typer.Option(help="These faults in every round, joined by +; else all in turn.")] = "",
    engine: Annotated[EngineName, typer.Option(help="Whose engine the workers have.")] = EngineName.simulated,
    workers: Annotated[int, typer.Option(min=0, help="Worker processes; 0 = 3, of the real engine 1.")] = 0,
) -> None:
    """Kills, freezes and cuts off real worker processes, and counts what their readers see. On a stack of its own."""
    from load.faults import rounds as kit
    from load.faults.breaks import FAULTS
    from load.faults.table import show

    known = FAULTS[engine.value]
    chosen = tuple(only.split("+")) if only else ()
    if unknown := set(chosen) - set(known):
        raise typer.BadParameter(f"{', '.join(unknown)}: there are {', '.join(known)}", param_hint="--only")
    options = kit.Options(rounds, seed, workers or DEFAULT_WORKERS[engine], engine.value, chosen)
    console = Screen(stderr=json, highlight=False)
    began = time.monotonic()
    report = _alone(console, lambda: kit.run(WorkerProcess, options, _sayer(console), Quiet()))
    show(console, report)
    if json:
        session.print_json(report.line(options, time.monotonic() - began))
    raise typer.Exit(0 if report.good else 1)


@bench.command("backlog")
def backlog(
    json: Annotated[bool, typer.Option("--json", help="End with one JSON object on the last line.")] = False,
    jobs: Annotated[int, typer.Option(min=1000, help="Jobs on the topic before the worker starts.")] = 1_000_000,
) -> None:
    """A backlog through one worker with the simulated engine: jobs a second, and whether memory stays flat."""
    from load import backlog

    console = Screen(stderr=json, highlight=False)
    measured = _alone(console, lambda: backlog.run(WorkerProcess, jobs, _sayer(console), Quiet()))
    _told(console, measured, json)


@bench.command("fairness")
def fairness(
    json: Annotated[bool, typer.Option("--json", help="End with one JSON object on the last line.")] = False,
    engine: Annotated[EngineName, typer.Option(help="Whose engine the workers have.")] = EngineName.simulated,
) -> None:
    """Whether one tenant can hurt another: first tokens beside a flood, shares by weight, waits, the scheduler's cost.

    Exit code 1 if a bound is broken; with the real engine on a small machine the figures are only shown.
    """
    from load.fairness import bench as kit
    from load.fairness.table import show

    console = Screen(stderr=json, highlight=False)
    result = _alone(console, lambda: kit.run(WorkerProcess, engine.value, _sayer(console), Quiet()))
    show(console, result)
    if json:
        session.print_json(result.line())
    raise typer.Exit(0 if result.good else 1)


@bench.command("fuzz")
def fuzz(
    json: Annotated[bool, typer.Option("--json", help="End with one JSON object on the last line.")] = False,
    records: Annotated[int, typer.Option(min=100, help="Hostile records.")] = 200_000,
    seed: Annotated[int, typer.Option(min=0, help="Of the records.")] = 1,
) -> None:
    """Hostile records through a real worker: none crashes it, each is answered or among the dead letters."""
    from load import fuzz

    console = Screen(stderr=json, highlight=False)
    measured = _alone(console, lambda: fuzz.run(WorkerProcess, records, seed, _sayer(console), Quiet()))
    _told(console, measured, json)


def _told(console: Console, measured: dict[str, Any], json: bool) -> None:
    """Ends the command with what was measured and its verdict."""
    if json:
        session.print_json(measured)
    else:
        for name, value in measured.items():
            console.print(f"{name}: {value}", markup=False, soft_wrap=True)
    raise typer.Exit(0 if measured["verdict"] == "pass" else 1)


def _sayer(console: Console) -> Callable[[str], None]:
    return lambda line: console.print(line, markup=False, soft_wrap=True)


def _alone(console: Console, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Runs a benchmark that has a stack of its own; what keeps it from running at all is one line and exit code 1."""
    logging.basicConfig(level=logging.ERROR)
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)  # hundreds of lines while a broker is away

    async def main() -> T:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)  # it leaves nothing running behind
        return await work()

    try:
        return asyncio.run(main())
    except asyncio.CancelledError:
        raise typer.Exit(128 + signal.SIGTERM) from None
    except (StackError, TopicsRefused, BrokerUnreachable, ArenaFailed, WorkerStopped, KafkaError) as problem:
        console.print(f"[red]headrace bench:[/] {problem}")
        raise typer.Exit(1) from None


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
