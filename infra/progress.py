"""What a person sees while something slow is made or started: a live display on a terminal, plain lines elsewhere.

Always on standard error, so that standard output stays free for a command's own result.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from infra.errors import StackError

if TYPE_CHECKING:
    from rich.progress import TaskID

# Seconds between "still at it" lines without a terminal: often enough that nobody thinks it hangs.
HEARTBEAT_S = 20.0


class Progress(Protocol):
    """Used from several threads at once."""

    def step(self, part: str, what: str) -> AbstractContextManager[None]:
        """Shows `part: what` while the block runs, and how long it took or that it failed."""
        ...

    def say(self, part: str, line: str) -> None:
        """A line that stays."""
        ...


class Quiet:
    """Shows nothing: for `--json` and for tests."""

    @contextmanager
    def step(self, part: str, what: str) -> Iterator[None]:
        yield

    def say(self, part: str, line: str) -> None:
        pass


class Plain:
    """Lines for a log or a pipe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    @contextmanager
    def step(self, part: str, what: str) -> Iterator[None]:
        self.say(part, f"{what} …")
        began = time.monotonic()
        over = threading.Event()
        beat = threading.Thread(target=self._beat, args=(part, what, began, over), daemon=True)
        beat.start()
        try:
            yield
        except BaseException as error:
            self.say(part, _failure(what, error))
            raise
        finally:
            over.set()
            beat.join()
        self.say(part, f"{_short(what)}: done in {time.monotonic() - began:.1f} s")

    def say(self, part: str, line: str) -> None:
        with self._lock:
            print(f"{part:>9}  {line}", file=sys.stderr, flush=True)

    def _beat(self, part: str, what: str, began: float, over: threading.Event) -> None:
        while not over.wait(HEARTBEAT_S):
            self.say(part, f"{_short(what)}: {time.monotonic() - began:.0f} s so far")


class Live:
    """Spinners on a terminal; each step leaves one line when it ends."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import Progress as Bars
        from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

        self._console = Console(stderr=True, highlight=False)
        self._bars: Any = Bars(
            SpinnerColumn(),
            TextColumn("[bold]{task.fields[part]:>9}[/]  {task.description}"),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
        )
        self._lock = threading.Lock()
        self._open = 0

    @contextmanager
    def step(self, part: str, what: str) -> Iterator[None]:
        task = self._begin(part, what)
        began = time.monotonic()
        try:
            yield
        except BaseException as error:
            self._end(task)
            self._line(part, _failure(what, error), "red")
            raise
        self._end(task)
        self._line(part, f"{_short(what)}: done in {time.monotonic() - began:.1f} s", "green")

    def say(self, part: str, line: str) -> None:
        self._line(part, line, "yellow")

    def _begin(self, part: str, what: str) -> TaskID:
        with self._lock:
            self._open += 1
            if self._open == 1:
                self._bars.start()
            task: TaskID = self._bars.add_task(what, part=part, total=None)
            return task

    def _end(self, task: TaskID) -> None:
        with self._lock:
            self._bars.remove_task(task)
            self._open -= 1
            if self._open == 0:
                self._bars.stop()

    def _line(self, part: str, line: str, style: str) -> None:
        from rich.text import Text

        self._console.print(Text.assemble((f"{part:>9}", style), f"  {line}"))


def for_terminal() -> Progress:
    """Live on a terminal that has Rich installed, plain otherwise."""
    if sys.stderr.isatty():
        try:
            return Live()
        except ImportError:  # the system's own Python, before the environment is there
            return Plain()
    return Plain()


def _short(what: str) -> str:
    """Without what to expect, which stands in brackets at the end."""
    return what.partition(" (")[0]


def _failure(what: str, error: BaseException) -> str:
    return f"{_short(what)}: FAILED{'' if isinstance(error, StackError) else f' ({type(error).__name__})'}"
