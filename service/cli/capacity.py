"""`headrace capacity`: what fits, by the formula and by the running engine's own report, and where the two differ."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from service.capacity import memory, report
from service.capacity.memory import GIB, Machine, Plan
from service.capacity.report import Difference, NoReport, Report
from service.capacity.shape import Shape, Unreadable, shape_of
from service.capacity.weights import Weights, read_config, weights_of
from service.cli import session
from service.cli.terminal import Screen, say
from service.engine import bounds
from service.engine.vllm import arguments
from service.settings import EngineSettings

# Seconds for the driver's tool to say how much memory the first GPU has.
GPU_ANSWER_S = 10.0

Gib = Annotated[float | None, typer.Option(min=0.001, help="Memory of one GPU, GiB; by default what is found here.")]


def register(app: typer.Typer) -> None:
    app.command("capacity")(capacity)


def capacity(
    model: Annotated[Path | None, typer.Option(help="Model folder; HEADRACE_ENGINE__MODEL by default.")] = None,
    gpu_memory: Gib = None,
    kv_cache: Annotated[float | None, typer.Option(min=0.001, help="Memory of the KV cache itself, GiB.")] = None,
    max_model_len: Annotated[int | None, typer.Option(min=1, help="Context: prompt and output, tokens.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(min=1, help="As HEADRACE_ENGINE__MAX_NUM_SEQS.")] = None,
    mean_length: Annotated[int | None, typer.Option(min=1, help="Tokens of a usual job, prompt and output.")] = None,
    worker: Annotated[str | None, typer.Option(help="A running worker's HTTP address: its report.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Prints what fits: weights, KV cache, and how many sequences at once; beside it what the running engine reports.

    Everything that no option gives comes from the worker's settings. A difference of more than 10 % is warned of.
    Exit codes: 0 done, 1 not even one sequence of the whole context fits, 2 wrong usage, 3 the worker is not reachable.
    """
    settings = session.settings()
    engine = settings.engine
    if gpu_memory is not None and kv_cache is not None:
        raise typer.BadParameter("give the GPU's memory or the KV cache's, not both", param_hint="--kv-cache")
    if worker is None and settings.http_port:
        worker = f"http://{settings.http_host}:{settings.http_port}"
    try:
        told = report.fetch(worker) if worker is not None else None
    except NoReport as problem:
        raise typer.Exit(session.told(str(problem), session.UNREACHABLE)) from None
    folder = model or (Path(engine.model) if engine.model else None)
    if folder is None:
        raise typer.BadParameter("no model: name its folder, here or in HEADRACE_ENGINE__MODEL", param_hint="--model")
    try:
        config = read_config(folder)
        shape, weights = shape_of(config), weights_of(folder, config)
        machine = machine_of(engine, shape, told, gpu_memory, kv_cache, max_model_len, max_num_seqs)
        fits = memory.plan(shape, weights, machine)
    except Unreadable as problem:
        raise typer.BadParameter(str(problem), param_hint="--model") from None
    differences = report.compare(fits, told) if told is not None and not told.simulated else []
    warnings = warnings_of(fits, differences, told, shape, machine)
    length = mean_length or max(1, machine.max_model_len // 4)
    found = document(folder, shape, weights, machine, fits, told, differences, warnings, length)
    if json:
        session.print_json(found)
    else:
        show(found, Screen(highlight=False))
        for warning in warnings:
            say(f"headrace: {warning}", err=True)
    raise typer.Exit(0 if fits.fits else session.FAILED)


def machine_of(
    engine: EngineSettings,
    shape: Shape,
    told: Report | None,
    gpu_memory: float | None,
    kv_cache: float | None,
    max_model_len: int | None,
    max_num_seqs: int | None,
) -> Machine:
    """What the engine is, or would be, given. Raises Unreadable if no context is known, typer.BadParameter."""
    real = told if told is not None and not told.simulated else None
    gpu = gpu_memory
    if gpu is None and not (real is not None and real.on_cpu):
        gpu = gpu_gib()
    on_cpu = real.on_cpu if real is not None else gpu is None
    if kv_cache is None and not on_cpu and gpu is None:
        raise typer.BadParameter("the worker's engine runs on a GPU: say how large it is", param_hint="--gpu-memory")
    kv_gib = float(engine.kv_cache_gib) if kv_cache is None and on_cpu else kv_cache
    dtype = arguments.dtype(engine, on_cpu, arguments.cpu_flags() if on_cpu else frozenset())
    context = max_model_len or engine.max_model_len or shape.context
    if context is None:
        raise Unreadable("config.json states no context: give --max-model-len")
    block = real.block if real is not None else 0
    asked = engine.model_copy(update={"max_num_seqs": max_num_seqs or engine.max_num_seqs})
    return Machine(
        max_model_len=context,
        max_num_seqs=bounds.slots(asked),
        max_num_batched_tokens=engine.max_num_batched_tokens,
        dtype=shape.dtype if dtype == "auto" else dtype,
        block=block or (memory.CPU_BLOCK if on_cpu else memory.GPU_BLOCK),
        tensor_parallel=engine.tensor_parallel_size,
        kv_bytes=None if kv_gib is None else int(kv_gib * GIB),
        gpu_bytes=None if kv_gib is not None or gpu is None else int(gpu * GIB),
        utilization=engine.gpu_memory_utilization,
    )


def gpu_gib() -> float | None:
    """Memory of this machine's first GPU; None if there is none, or nothing that tells."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    asked = [tool, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(asked, capture_output=True, text=True, timeout=GPU_ANSWER_S, check=True).stdout
        return float(told.split()[0]) / 1024
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def warnings_of(
    fits: Plan, differences: list[Difference], told: Report | None, shape: Shape, machine: Machine
) -> list[str]:
    found = []
    if not fits.fits:
        found.append(
            f"not one sequence of {fits.context:,} tokens fits: the engine would not start; "
            f"give it more memory, or a smaller --max-model-len ({int(fits.full * fits.context):,} would fit)"
        )
    if shape.context is not None and machine.max_model_len > shape.context:
        found.append(f"the context of {machine.max_model_len:,} tokens is over the model's own {shape.context:,}")
    found += [
        f"{one.what}: the formula says {one.formula:,g}, the engine {one.engine:,g} ({one.share:+.0%}): "
        "do the settings here (memory, dtype, context, max_num_seqs) differ from the worker's?"
        for one in differences
        if one.large
    ]
    if told is not None and told.simulated:
        found.append("the worker's engine is simulated: its figures are settings, and nothing to compare with")
    return found


def document(
    folder: Path,
    shape: Shape,
    weights: Weights,
    machine: Machine,
    fits: Plan,
    told: Report | None,
    differences: list[Difference],
    warnings: list[str],
    length: int,
) -> dict[str, Any]:
    usual = memory.at_once(shape, machine, fits.kv_bytes, length)
    return {
        "ok": fits.fits,
        "agree": not any(one.large for one in differences) if differences else None,
        "model": str(folder),
        "parameters": weights.parameters,
        "parameters_from": weights.source,
        "dtype": machine.dtype,
        "attention": [asdict(group) for group in shape.attention],
        "tensor_parallel": machine.tensor_parallel,
        "memory_of": "gpu" if machine.kv_bytes is None else "kv_cache",
        "formula": {
            **asdict(fits),
            "full": round(fits.full, 2),
            "mean_length": length,
            "at_mean_length": int(min(usual, fits.slots)),
            "kv_would_hold_at_mean_length": int(min(usual, 2**53)),
        },
        "engine": None if told is None else {**asdict(told), "full": round(told.full, 2)},
        "differences": [{**asdict(one), "share": round(one.share, 4)} for one in differences],
        "warnings": warnings,
        "notes": list(shape.notes),
    }


def show(found: dict[str, Any], console: Console) -> None:
    plan, engine = found["formula"], found["engine"]
    shares = {one["what"]: one["share"] for one in found["differences"]}
    console.print(escape(found["model"]), soft_wrap=True)
    console.print(
        f"{found['parameters']:,} parameters ({found['parameters_from']}), {found['dtype']}; "
        f"KV cache {plan['per_token']:,} bytes a token: {' + '.join(map(_layers, found['attention']))}"
        + (f", over {found['tensor_parallel']} GPUs" if found["tensor_parallel"] > 1 else ""),
        soft_wrap=True,
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("", "formula", *(("engine", "differs") if engine else ())):
        table.add_column(name, justify="left" if not name else "right")

    def row(label: str, formula: str, said: str = "", what: str = "") -> None:
        differs = f"{shares[what]:+.1%}" if what in shares else ""
        table.add_row(label, formula, *((said, differs) if engine else ()))

    row("weights", _gib(plan["weights"]))
    if plan["working"]:
        row("working memory, estimated", _gib(plan["working"]))
    row("KV cache", _gib(plan["kv_bytes"]))
    told = engine or dict.fromkeys(("kv_tokens", "block", "context", "slots", "full"), 0)
    row("KV cache, tokens", f"{plan['kv_tokens']:,}", f"{told['kv_tokens']:,}", "KV tokens")
    row("tokens a block", f"{plan['block']}", f"{told['block']}")
    row("context, tokens", f"{plan['context']:,}", f"{told['context']:,}", "context")
    row("sequences a batch, at most", f"{plan['slots']:,}", f"{told['slots']:,}", "sequences")
    row("of the whole context at once", f"{plan['full']:,.2f}", f"{told['full']:,.2f}", "full contexts")
    row(f"of {plan['mean_length']:,} tokens at once", f"{plan['at_mean_length']:,}")
    console.print(table)
    if engine:
        console.print(
            f"engine: {escape(engine['model'])}, {escape(engine['version'])}, "
            f"{engine['preemptions']:,} preemptions so far",
            soft_wrap=True,
        )
    if plan["kv_would_hold_at_mean_length"] > plan["slots"]:
        console.print(
            f"the KV cache would hold {plan['kv_would_hold_at_mean_length']:,} of them: "
            "the limit is HEADRACE_ENGINE__MAX_NUM_SEQS",
            soft_wrap=True,
        )
    for note in found["notes"]:
        console.print(f"note: {note}", soft_wrap=True)


def _layers(group: dict[str, Any]) -> str:
    kept = f"a latent of {group['width']}" if group["latent"] else f"{group['heads']} heads × 2 × {group['width'] // 2}"
    window = f", window of {group['window']:,}" if group["window"] else ""
    return f"{group['layers']} layers × {kept}{window}"


def _gib(count: int) -> str:
    return f"{count / GIB:,.2f} GiB"
