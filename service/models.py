"""The registry of models as a worker knows it: model or alias → pool, from the topic `inference.models`.

What is not valid never replaces what is. An empty registry is none: each pool then knows its own model and no other.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from schemas.keys import entry_name
from schemas.names import MODELS
from schemas.tenants import ModelEntry
from service.entries import Entries

log = logging.getLogger(__name__)


class ModelRefused(ValueError):
    """An entry that is not valid. One line: what is wrong and where."""


class Models:
    def __init__(self) -> None:
        self.refused = 0  # entries that were not valid
        self._entries: dict[str, ModelEntry] = {}

    def get(self, name: str) -> ModelEntry | None:
        return self._entries.get(name)

    def take(self, records: Iterable[tuple[bytes | None, bytes | None]]) -> None:
        """The next records of the topic, key and value. One that is not valid leaves the entry as it was."""
        for key, value in records:
            name = entry_name(key)
            if value is None:
                self._entries.pop(name, None)
                continue
            try:
                self._entries[name] = read_entry(name, value)
            except ModelRefused as error:
                self.refused += 1
                log.error("model entry refused, the former one stays in force: %s", error)


ENTRIES = Entries(MODELS, "model", ModelEntry, "name", ModelEntry.model_fields, ModelRefused)
valid, read_entry, write_entry = ENTRIES.valid, ENTRIES.read, ENTRIES.write
