"""What may go wrong with the local stack. Every message names the log to read and the command that mends it.

StackError
├── Missing        a prerequisite is not installed; `remedy` is the command that installs it
├── BuildFailed    an artefact could not be made
├── PartFailed     a part did not start, or does not answer
├── Busy           another run holds the lock for longer than one may wait
└── Cancelled      this run was interrupted while it waited
"""

from __future__ import annotations

from pathlib import Path

# Lines of a log that are worth showing beside the error: enough for a stack trace's head, less than a screen.
LOG_LINES = 12


class StackError(Exception):
    """`str()` is one line: what is wrong, where its log lies, what mends it. `detail` is the end of that log."""

    def __init__(self, what: str, *, remedy: str, log: Path | None = None) -> None:
        self.what = what
        self.remedy = remedy
        self.log = log
        self.detail = tail(log) if log else ""
        super().__init__(f"{what}{f'; its log: {log}' if log else ''}; to mend it: {remedy}")


class Missing(StackError):
    pass


class BuildFailed(StackError):
    pass


class PartFailed(StackError):
    pass


class Busy(StackError):
    pass


class Cancelled(StackError):
    def __init__(self) -> None:
        super().__init__("interrupted", remedy="run the same command again")


def tail(path: Path, lines: int = LOG_LINES) -> str:
    """The last lines of a log, read from its last 8 KiB; empty when there is none."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - 8192))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])
