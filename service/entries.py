"""Entries of a registry's compacted topic: key = name, value = the entry as JSON. Pure; keeps nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, Generic, TypeVar

import orjson
from pydantic import BaseModel, ValidationError

from schemas.problems import named, problem

T = TypeVar("T", bound=BaseModel)


class Entries(Generic[T]):
    """How one registry's entries are read and written.

    `noun` names an entry in messages, `key` is the field that repeats the record's key, `known` are the names for
    suggestions, `refused` is what is raised, in one line, for an entry that is not valid.
    """

    def __init__(
        self, topic: str, noun: str, model: type[T], key: str, known: Collection[str], refused: type[Exception]
    ) -> None:
        self._topic = topic
        self._noun = noun
        self._model = model
        self._key = key
        self._known = known
        self._refused = refused

    def valid(self, document: Any, where: str) -> T:
        """Raises `refused`, which begins with `where`."""
        try:
            return self._model.model_validate(document)
        except ValidationError as error:
            raise self._refused(f"{where}: {problem(error, '', self._known)}") from None

    def read(self, name: str, value: bytes) -> T:
        """The entry that a record of the topic holds; `name` is its key. Raises `refused`."""
        where = f"{self._topic}: {self._noun} {named(name)}"
        try:
            document = orjson.loads(value)
        except orjson.JSONDecodeError:
            raise self._refused(f"{where}: not JSON") from None
        entry = self.valid(document, where)
        if getattr(entry, self._key) != name:
            raise self._refused(f"{where}: {self._key} must be the record's key")
        return entry

    def write(self, entry: T) -> bytes:
        """What `read` reads: only what differs from the defaults, so that a new default reaches old entries."""
        return orjson.dumps(entry.model_dump(mode="json", exclude_defaults=True))

    def sort(self, values: Iterable[tuple[str, bytes | None]]) -> tuple[dict[str, T], dict[str, str]]:
        """The entries by name, and for those that are not valid why; workers keep the former entry of these."""
        known: dict[str, T] = {}
        invalid: dict[str, str] = {}
        for name, value in values:
            if value is not None:
                try:
                    known[name] = self.read(name, value)
                except self._refused as error:
                    invalid[name] = str(error)
        return known, invalid
