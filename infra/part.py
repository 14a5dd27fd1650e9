"""What infra/stack.py needs to know of a part: how to start it, where it listens, when it is ready."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from infra.process import Command

DEV = Path(__file__).parent / "dev"  # the parts' configuration files

Ports = Mapping[str, int]


class NotReady(Exception):
    """Not yet; the text says what is still missing."""


class Part(Protocol):
    name: str
    # Names of its ports, each with the distance to a second one that it opens by itself (0 = none).
    ports: Mapping[str, int]
    # Ports of other parts that its configuration names: if one moves, this part is started anew.
    peers: tuple[str, ...]
    start_s: float  # longest time from start to readiness
    stop_s: float  # longest time from SIGTERM to the end

    def command(self, ports: Ports, folder: Path) -> Command:
        """Lays out its folder and says what to run. Raises StackError."""
        ...

    def probe(self, ports: Ports, folder: Path) -> None:
        """One quick question to the running part of the stack in `folder`. Raises NotReady or OSError."""
        ...

    def address(self, ports: Ports) -> str: ...
