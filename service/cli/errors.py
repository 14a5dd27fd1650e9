"""Errors as every command tells them: one line on standard error, and with --json one object on standard output.

The object is `{"error": "failed" | "wrong_usage" | "not_reachable", "message": "…"}`; exit codes are the same either
way.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import orjson
import typer
from typer.core import TyperGroup

FAILED, USAGE, UNREACHABLE, INTERRUPTED = 1, 2, 3, 130
KINDS = {FAILED: "failed", USAGE: "wrong_usage", UNREACHABLE: "not_reachable"}


# Whether the command that runs was given --json.
_json: ContextVar[bool] = ContextVar("json", default=False)


def told(message: str, code: int) -> int:
    """Says what went wrong; returns the exit code."""
    if _json.get():
        _print(message, code)
    typer.echo(f"headrace: {message}", err=True)
    return code


def _print(message: str, code: int) -> None:
    typer.echo(orjson.dumps({"error": KINDS.get(code, "failed"), "message": message}).decode())


class Commands(TyperGroup):
    """All commands; wrong usage is told to programs too."""

    def invoke(self, ctx: Any) -> Any:
        asked = _asks_for_json([*getattr(ctx, "_protected_args", ()), *ctx.args])
        former = _json.set(asked)
        try:
            return super().invoke(ctx)
        except Exception as error:
            tell = getattr(error, "format_message", None)  # an error of the command line's, of whatever kind
            if tell is not None and asked:
                _print(" ".join(str(tell()).split()), getattr(error, "exit_code", USAGE))
            raise
        finally:
            _json.reset(former)


def _asks_for_json(arguments: Sequence[str]) -> bool:
    before = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return "--json" in before
