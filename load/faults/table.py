"""A report for people: one row a fault."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from load.faults.judgement import Numbers
from load.faults.rounds import Report

COLUMNS = ("rounds", "jobs", "lost", "doubled", "suppressed", "interrupted", "reruns")
# Each of them is wrong; the JSON object tells them apart.
WRONG = ("unexplained", "late", "torn", "failed", "crashes", "orphans", "strays", "unsettled")

SHORT = {"suppressed": "suppr", "interrupted": "interr", "rounds": "rnds", "doubled": "doubl"}  # 80 columns


def show(console: Console, report: Report) -> None:
    table = Table(title="faults", box=None, padding=(0, 1, 0, 0))
    table.add_column("fault", no_wrap=True)
    for name in (*map(SHORT.get, COLUMNS, COLUMNS), "gaps", "wrong", "rest s"):
        table.add_column(name, justify="right", no_wrap=True)
    for fault, numbers in report.by_fault.items():
        table.add_row(fault, *_cells(numbers))
    table.add_section()
    table.add_row("all", *_cells(report.total))
    console.print(table)
    if report.rebuilt_s:
        console.print(
            f"engine rebuilt after {', '.join(f'{one:.1f}' for one in report.rebuilt_s)} s; "
            f"a worker's whole start took {report.start_s:.1f} s"
        )
    for failure in report.failures:
        console.print(f"[red]failed:[/] {failure['replay']}")


def _cells(numbers: Numbers) -> list[str]:
    wrong = sum(int(getattr(numbers, name)) for name in WRONG)
    counts = (*(getattr(numbers, name) for name in COLUMNS), numbers.numbering_gaps, wrong)
    return [*map(str, counts), f"{numbers.settled_s:.1f}"]
