"""Options that many commands have, in the same words."""

from __future__ import annotations

from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Apply without asking.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the change, apply nothing.")]
Bootstrap = Annotated[str | None, typer.Option(help="Kafka address; the local stack's by default.")]
