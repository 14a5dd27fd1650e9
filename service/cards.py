"""The workers of one machine, as they say themselves: `worker-<name>.json` in the state directory while one runs.

For people (`headrace status`), never for decisions: a card whose process is gone says nothing.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from service.settings import Settings


@dataclass(frozen=True, slots=True)
class Card:
    name: str
    pool: str
    model: str  # the name that jobs use
    engine: str
    bootstrap: str
    http: str  # address of /readyz and the rest
    pid: int
    started: int  # clock ticks since boot: with it a pid that was given again is told apart

    @classmethod
    def of(cls, settings: Settings, http: str) -> Card:
        """This process's own."""
        return cls(
            name=settings.worker,
            pool=settings.pool,
            model=settings.engine.served_name,
            engine=settings.engine.kind,
            bootstrap=settings.kafka.bootstrap,
            http=http,
            pid=os.getpid(),
            started=_started(os.getpid()) or 0,
        )

    @property
    def alive(self) -> bool:
        return _started(self.pid) == self.started


def write(folder: Path, card: Card) -> Path:
    """Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    path = _path(folder, card.name)
    partial = path.with_name(f"{path.name}.{card.pid}")
    partial.write_text(json.dumps(asdict(card)) + "\n")
    partial.replace(path)
    return path


def remove(folder: Path, name: str, pid: int) -> None:
    """Only this process's own: a successor of the same name may have written its own by now."""
    path = _path(folder, name)
    card = _read(path)
    if card is not None and card.pid == pid:
        path.unlink(missing_ok=True)


def alive(folder: Path) -> list[Card]:
    """Of the workers that run, by name."""
    cards = [card for path in sorted(folder.glob("worker-*.json")) if (card := _read(path)) is not None]
    return [card for card in cards if card.alive]


def sweep(folder: Path) -> None:
    """Removes the cards of workers that ended without a word."""
    for path in folder.glob("worker-*.json"):
        if (card := _read(path)) is not None and not card.alive:
            path.unlink(missing_ok=True)


def _path(folder: Path, name: str) -> Path:
    return folder / f"worker-{re.sub(r'[^A-Za-z0-9._-]', '_', name)}.json"


def _read(path: Path) -> Card | None:
    try:
        return Card(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _started(pid: int) -> int | None:
    """None: there is no such process (a zombie is none)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])
