"""Reads a registry's topic whole, and writes entries that nobody changed in the meantime. Shows nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeVar

from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError, TopicAuthorizationFailedError
from pydantic import BaseModel

from client import ClientError, PublishFailed, Unreachable
from schemas.keys import entry_name
from service.cli.topic_log import TopicLog
from service.entries import Entries
from service.settings import Settings

# Seconds the broker has to acknowledge the entries.
WRITE_S = 20.0


T = TypeVar("T", bound=BaseModel)


class ChangedMeanwhile(ClientError):
    """Somebody else changed an entry between the look and the change."""


@dataclass(frozen=True, slots=True)
class Entry:
    """The newest record of a key; `value` None: it was removed."""

    value: bytes | None
    offset: int


def sort(entries: Entries[T], seen: Mapping[str, Entry]) -> tuple[dict[str, T], dict[str, str]]:
    """The entries that are in force by name, and for those that are not valid why."""
    return entries.sort((name, entry.value) for name, entry in seen.items())


class RegistryTopic:
    """An async context manager."""

    def __init__(self, found: Settings, topic: str) -> None:
        self._found = found
        self._topic = topic
        self._log = TopicLog(found.kafka.bootstrap, found.kafka.security)
        self._offsets: dict[str, list[int]] = {}  # of all records of a key that were read last

    async def __aenter__(self) -> Self:
        await self._log.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._log.__aexit__(kind, error, trace)

    async def read(self) -> dict[str, Entry]:
        """Every key that has, or had, an entry. Raises UnknownTopic, Unreachable."""
        found: dict[str, Entry] = {}
        self._offsets = {}
        places = await self._log.partitions(self._topic)
        async for record in self._log.read(places, since_s=time.time()):
            key = entry_name(record.key)
            found[key] = Entry(record.value, record.offset)
            self._offsets.setdefault(key, []).append(record.offset)
        return found

    async def write(self, values: Mapping[str, bytes | None], seen: Mapping[str, Entry]) -> None:
        """Writes entries (None removes one), if each is still as `seen`. Returns when they are acknowledged.

        Raises ChangedMeanwhile, which says what was written; PublishFailed, Unreachable.
        """
        self._compare(values, seen, await self.read())
        producer = AIOKafkaProducer(
            **self._found.kafka.connection(),
            acks="all",
            client_id="headrace-registry",
            request_timeout_ms=int(WRITE_S * 1000),
        )
        try:
            async with asyncio.timeout(WRITE_S):
                await producer.start()
                # At once, so that readers get them in one batch.
                sent = [await producer.send(self._topic, value, key=key.encode()) for key, value in values.items()]
                written = await asyncio.gather(*sent)
        except TopicAuthorizationFailedError:
            raise PublishFailed(f"{self._topic} may not be written with these rights: it is for operators") from None
        except (KafkaError, TimeoutError) as error:
            raise Unreachable(
                f"the broker did not take the change ({type(error).__name__}); look what is in force before it is tried"
                " again"
            ) from None
        finally:
            await producer.stop()
        await self.read()
        for key, record in zip(values, written, strict=True):
            self._alone(key, seen[key].offset if key in seen else -1, record.offset)

    def _compare(self, keys: Iterable[str], seen: Mapping[str, Entry], now: Mapping[str, Entry]) -> None:
        changed = [key for key in keys if now.get(key) != seen.get(key)]
        if changed:
            raise ChangedMeanwhile(
                f"{', '.join(sorted(changed)[:5])} was changed by somebody else in the meantime, nothing was written;"
                " run the command again to see the change against what is there now"
            )

    def _alone(self, key: str, seen: int, ours: int) -> None:
        """A topic knows no condition: who wrote within the same milliseconds shows only afterwards."""
        others = [offset for offset in self._offsets.get(key, ()) if offset > seen and offset != ours]
        if others:
            which = "theirs" if max(others) > ours else "this one"
            raise ChangedMeanwhile(
                f"{key} was changed by somebody else at the same moment, {which} came last and is in force: look at it"
            )
