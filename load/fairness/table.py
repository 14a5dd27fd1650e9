"""The report for people."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from load.fairness import measures
from load.fairness.bench import NOTE, Result
from load.fairness.measures import Check
from load.overhead import Interval


def show(console: Console, result: Result) -> None:
    line = result.line()
    console.print(_delays(result))
    shares = Table(title="shares, all backlogged")
    for name in ("tenant", "weight", "cost tokens", "output tokens", "share ÷ weight, best = 1"):
        shares.add_column(name, justify="left" if name == "tenant" else "right")
    told = result.shares.line()
    for name, one in told["tenants"].items():
        cells = (one["weight"], one["cost_tokens"], one["output_tokens"], one["weighted"])
        shares.add_row(name, *(f"{cell:g}" for cell in cells))
    console.print(shares)
    bounds = Table(title="promises")
    for name in ("figure", "value", "95 %", "bound", "verdict"):
        bounds.add_column(name, justify="left" if name == "figure" else "right")
    for check in result.checks:
        bounds.add_row(check.name, f"{check.value:.4g}", _interval(check.interval), _bound(check), check.verdict)
    bounds.add_row(
        "… on partitions of their own", f"{line['ttft_p95_ratio_apart']:.4g}", _interval(result.apart), "", ""
    )
    bounds.add_row("ttft_p95_ratio_idle", f"{line['ttft_p95_ratio_idle']:.4g}", "", "not promised", "")
    console.print(bounds)
    for problem in result.invalid:
        console.print(f"[red]not comparable:[/] {problem}")
    for spent in result.costs:
        lost = measures.cost(spent.rounds)
        console.print(
            f"cost, {spent.regime}: {lost.point:.1%} of throughput ({lost.low:.1%} to {lost.high:.1%}); a job takes "
            f"{spent.cpu_us('A'):.0f} µs of the worker's CPU under FIFO, {spent.cpu_us('B'):.0f} µs fair, of it the "
            f"scheduler's decisions {spent.scheduler_us('A'):.1f} and {spent.scheduler_us('B'):.1f} µs",
            soft_wrap=True,
        )
    console.print(f"{result.beside} lies on the flood's partition. {NOTE}.", soft_wrap=True)


def _delays(result: Result) -> Table:
    table = Table(title="first token, p95 in ms")
    table.add_column("neighbour")
    kinds = ("idle", "baseline", "flood")
    for name in (*kinds, "flood ÷ baseline", "95 %"):
        table.add_column(name, justify="right")
    for name, interval in result.ratios.items():
        cells = []
        for kind in kinds:
            found = [w.line()["tenants"][name]["ttft_p95_ms"] for w in result.windows if w.kind == kind]
            cells.append(" / ".join(f"{one:.0f}" for one in found))
        table.add_row(name, *cells, f"{interval.point:.2f}", _interval(interval))
    return table


def _interval(interval: Interval | None) -> str:
    return f"{interval.low:.3g} to {interval.high:.3g}" if interval is not None else ""


def _bound(check: Check) -> str:
    return f"{'≥' if check.at_least else '≤'} {check.bound:g}"
