"""Reads cancels: once to their end, before the worker joins its group, and from then on as they come (R13).

Every worker reads every cancel, since any of them may hold the job, or be given it later. Decides nothing but whether a
cancel is one, and of whom it says that it is: cancels go, in the order of the log, to whoever was named.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence

from aiokafka.structs import ConsumerRecord
from pydantic import ValidationError

from consumers.follower import READ_S, Follower
from schemas.names import CANCEL
from schemas.records import CancelRecord
from service.cancels import Wish
from service.credentials import Credentials, Doubt, Proof
from service.job import Place, Record
from service.settings import KafkaSettings
from service.topics import CANCEL_RETENTION_MS

log = logging.getLogger(__name__)


class CancelReader:
    """`take(wishes)` gets each batch, on the event loop.

    `credentials`: who is believed; None: everybody. `doubted(record, wish, doubt)`: a cancel that is not heeded.
    `more()`: the topics that tenants have for their cancels, and how many partitions each has.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        take: Callable[[Sequence[Wish]], None],
        *,
        credentials: Credentials | None = None,
        doubted: Callable[[Record, Wish, Doubt], None] = lambda record, wish, doubt: None,
        more: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        self._take = take
        self._credentials = credentials
        self._doubted = doubted
        self._follower = Follower(settings, CANCEL, self._records, more)
        self.refused = 0  # records that are no cancels

    async def start(self, timeout_s: float = READ_S) -> None:
        """Returns when every cancel is known that was acknowledged before the call. Raises TopicUnread."""
        await self._follower.start(timeout_s)

    async def stop(self) -> None:
        await self._follower.stop()

    async def _records(self, records: Sequence[ConsumerRecord]) -> None:
        found = [(_record(raw), wish) for raw in records if (wish := self._wish(raw))]
        proofs = await asyncio.gather(*(self._proof(record) for record, _ in found))
        wishes = []
        for (record, wish), proof in zip(found, proofs, strict=True):
            doubt = proof if isinstance(proof, Doubt) else proof.doubt(wish.tenant, wish.job_id or "")
            if doubt is None:
                wishes.append(wish)
            else:
                log.warning("cancel not heeded place=%s reason=%s", record.place, doubt.reason)
                self._doubted(record, wish, doubt)
        if wishes:
            self._take(wishes)

    async def _proof(self, record: Record) -> Proof | Doubt:
        if self._credentials is None:
            return Proof()
        proof = self._credentials.at_once(record)
        return await self._credentials.later(record) if proof is None else proof

    def _wish(self, record: ConsumerRecord) -> Wish | None:
        if not record.value or record.timestamp < time.time() * 1000 - CANCEL_RETENTION_MS:
            return None
        try:
            cancel = CancelRecord.model_validate_json(record.value)
        except ValidationError as error:
            self.refused += 1
            first = error.errors(include_input=False, include_url=False)[0]
            log.warning("no cancel partition=%d offset=%d: %s", record.partition, record.offset, first["msg"])
            return None
        return Wish(cancel.tenant, cancel.job_id, cancel.run, record.timestamp)


def _record(raw: ConsumerRecord) -> Record:
    place = Place(raw.topic, raw.partition, raw.offset)
    return Record(place, raw.key, raw.value, tuple(raw.headers), raw.timestamp)
