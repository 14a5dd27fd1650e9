"""Errors as every command tells them: one line on standard error, and with --json one object on standard output.

The object is `{"error": "failed" | "wrong_usage" | "not_reachable", "message": "…"}`; exit codes are the same either
way. Whatever a command did not expect ends here too, in a line and not in a traceback.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import orjson
import typer
from typer.core import TyperGroup

from service.cli import terminal

FAILED, USAGE, UNREACHABLE, INTERRUPTED = 1, 2, 3, 130
LONGEST = 300  # characters of an error's own words that nobody foresaw: some quote what they choke on
KINDS = {FAILED: "failed", USAGE: "wrong_usage", UNREACHABLE: "not_reachable"}


# Whether the command that runs was given --json.
_json: ContextVar[bool] = ContextVar("json", default=False)


def told(message: str, code: int) -> int:
    """Says what went wrong, wherever that can still be read; returns the exit code."""
    if _json.get():
        try:
            _print(message, code)
        except OSError:
            terminal.silence(sys.stdout)
    try:
        terminal.say(f"headrace: {message}", err=True)
    except OSError:
        terminal.silence(sys.stderr)
    return code


def _print(message: str, code: int) -> None:
    typer.echo(orjson.dumps({"error": KINDS.get(code, "failed"), "message": message}).decode())


def ended_by(error: BaseException) -> int:
    """The exit code of a command that `error` ended, which is told. With PYTHONDEVMODE=1 raises it instead."""
    match error:
        case KeyboardInterrupt():
            return told("left by Ctrl-C", INTERRUPTED)
        case BrokenPipeError():  # whoever read our output has had enough
            terminal.silence(sys.stdout)
            return 0
        case OSError():
            where = f"{error.filename}: " if error.filename else ""
            return told(f"{where}{error.strerror or terminal.one_line(error) or type(error).__name__}", FAILED)
    if sys.flags.dev_mode:
        raise error
    what = f"{type(error).__name__}: {terminal.one_line(error)[:LONGEST]}".rstrip(": ")
    return told(f"{what} (not expected, please report it; PYTHONDEVMODE=1 shows where)", FAILED)


def guarded(work: Callable[[], None]) -> int:
    """Runs the whole command line to its exit code, with what comes before and after a command."""
    _json.set(_asks_for_json(sys.argv[1:]))
    code = 0
    try:
        terminal.open_streams()
        for place, argument in enumerate(sys.argv[1:], 1):
            if not _is_text(argument):
                return told(f"argument {place} is not UTF-8", USAGE)
        try:
            work()
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else int(left.code is not None)
        sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as error:
        code = code or ended_by(error)
        _flush_or_silence()
    return code


def _flush_or_silence() -> None:
    """Else the interpreter's own last try fails, and is told in several lines."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            terminal.silence(stream)


def _is_text(argument: str) -> bool:
    try:
        argument.encode()
    except UnicodeEncodeError:  # bytes that the interpreter could only smuggle in
        return False
    return True


class Commands(TyperGroup):
    """All commands; wrong usage is told to programs too."""

    def invoke(self, ctx: Any) -> Any:
        asked = _asks_for_json([*getattr(ctx, "_protected_args", ()), *ctx.args])
        former = _json.set(asked)
        try:
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort):
            raise
        except (Exception, KeyboardInterrupt) as error:
            tell = getattr(error, "format_message", None)  # an error of the command line's, of whatever kind
            if tell is None:
                raise typer.Exit(ended_by(error)) from None
            if asked:
                _print(" ".join(str(tell()).split()), getattr(error, "exit_code", USAGE))
            raise
        finally:
            _json.reset(former)


def _asks_for_json(arguments: Sequence[str]) -> bool:
    before = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return "--json" in before
