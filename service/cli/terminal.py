"""What reaches the user's terminal, and the three standard streams themselves.

Text that came over the wire may hold escape sequences, and characters that turn the order of what is shown: a terminal
never gets them. JSON lines go out as they are, since JSON escapes what a terminal obeys.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import IO

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

# C0 but tab and newline, DEL, C1, and the embeddings, overrides and isolates of bidirectional text.
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def plain(text: str) -> str:
    """Without anything that a terminal would obey instead of showing it."""
    return _OBEYED.sub("", text)


def one_line(text: object) -> str:
    return " ".join(plain(str(text)).split())


def say(text: str, *, err: bool = False, nl: bool = True) -> None:
    """For people."""
    typer.echo(plain(text), err=err, nl=nl)


def write(text: str) -> None:
    """A model's or a record's own text, at once: plain on a terminal, as it is for a file or a program."""
    sys.stdout.write(plain(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


class Screen(Console):
    """Where tables and lines are printed; what comes out of any renderable is plain."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control or not _OBEYED.search(segment.text):
                yield segment
            else:
                yield Segment(plain(segment.text), segment.style)


def open_streams() -> None:
    """Closed ones lead to nowhere: else the next connection would get their number, and be written to. What a stream's
    encoding has not is written as an escape.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115
        elif mode == "w" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def silence(stream: IO[str]) -> None:
    """Nobody reads it any more, or it is full: what is left in it, and what comes, goes nowhere."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
