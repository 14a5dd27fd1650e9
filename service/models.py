"""The registry of models as a worker knows it: model or alias → pool, from the topic `inference.models`.

What is not valid never replaces what is. An empty registry is none: each pool then knows its own model and no other.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import orjson
from pydantic import ValidationError

from schemas.names import MODELS
from schemas.problems import named, problem
from schemas.tenants import ModelEntry

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
            name = (key or b"").decode("utf-8", "replace")
            if value is None:
                self._entries.pop(name, None)
                continue
            try:
                self._entries[name] = read_entry(name, value)
            except ModelRefused as error:
                self.refused += 1
                log.error("model entry refused, the former one stays in force: %s", error)


def read_entry(name: str, value: bytes) -> ModelEntry:
    """The entry that a record of the topic holds; `name` is its key. Raises ModelRefused."""
    where = f"{MODELS}: model {named(name)}"
    try:
        document = orjson.loads(value)
    except orjson.JSONDecodeError:
        raise ModelRefused(f"{where}: not JSON") from None
    entry = valid(document, where)
    if entry.name != name:
        raise ModelRefused(f"{where}: name must be the record's key")
    return entry


def write_entry(entry: ModelEntry) -> bytes:
    return orjson.dumps(entry.model_dump(mode="json", exclude_defaults=True))


def valid(document: Any, where: str) -> ModelEntry:
    """Raises ModelRefused, which begins with `where`."""
    try:
        return ModelEntry.model_validate(document)
    except ValidationError as error:
        raise ModelRefused(f"{where}: {problem(error, '', ModelEntry.model_fields)}") from None
