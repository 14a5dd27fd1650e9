"""What the stack remembers between commands: `stack.json` in its folder. Owns the file; never looks at processes."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

FILE = "stack.json"


@dataclass
class State:
    # Kept over stop and start, so that addresses in shells and browsers stay good.
    ports: dict[str, int] = field(default_factory=dict)
    pool: str = "default"
    partitions: int = 0  # of the pool's topics; 0 = not applied yet
    traces: bool = False  # Collector and Zipkin belong to this stack
    model: str = ""  # folder in Hugging Face layout; empty = none prepared
    # Part → address, for other programs to read; written when all parts are ready, emptied by `down`.
    addresses: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> State:
        """The remembered state; a fresh one if there is none, or if it cannot be read."""
        try:
            known = json.loads((folder / FILE).read_text())
            return cls(**{name: value for name, value in known.items() if name in cls.__dataclass_fields__})
        except (OSError, ValueError, TypeError, AttributeError):
            return cls()

    def write(self, folder: Path) -> None:
        """Replaces the file at once, and only if something changed."""
        text = json.dumps(asdict(self), indent=2) + "\n"
        path = folder / FILE
        if path.exists() and path.read_text() == text:
            return
        partial = path.with_name(f"{FILE}.{os.getpid()}")
        partial.write_text(text)
        partial.replace(path)


def project() -> Path:
    """The checkout that this package belongs to."""
    return Path(__file__).resolve().parent.parent


def default_folder() -> Path:
    """`$HEADRACE_STATE_DIR`, else `.headrace` in the checkout, wherever the command is called."""
    given = os.environ.get("HEADRACE_STATE_DIR")
    if given:
        return Path(given).absolute()
    checkout = project()
    return (checkout if (checkout / "pyproject.toml").exists() else Path.cwd()) / ".headrace"
