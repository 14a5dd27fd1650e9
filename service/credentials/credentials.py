"""The identity modes: who is believed about whose record this is (HEADRACE_IDENTITY, tenancy.md §2).

    trusted   the record's own word
    topic     the topic it lies on, to which only one tenant may write
    signed    its token

In `topic` and `signed` mode a record on a topic of the service's own needs the service's mark. No I/O; what takes long
is done in a thread (`later`).
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Protocol

from schemas.names import (
    CANCEL,
    H_AUTHORIZATION,
    H_ORIGIN,
    H_SEAL,
    deferred_topic,
    overflow_topic,
    parse_jobs_topic,
)
from schemas.verification import JOB
from service.credentials.doubt import Doubt, Proof, Reason
from service.credentials.keyring import Keyring, Registry
from service.credentials.seal import Seal, Sealer, seal_in, without_seal
from service.credentials.token import verify
from service.credentials.verifier import Verifier
from service.job import Record
from service.settings import Settings

# Values over so many bytes are hashed in the thread: 64 KiB take about 40 µs.
LARGE = 64 * 1024

_ANYBODY = Proof()
_TAKEN_FROM = len(CANCEL) + 1


class Credentials(Protocol):
    # Whether each tenant has a reply topic of its own, and the common one is the operators'.
    own_replies: bool
    # Whether a record's headers may say where its events go: nobody signs them.
    believes_headers: bool

    @property
    def marks(self) -> bool:
        """Whether a copy must bear the service's mark: then nothing is copied before it is believed."""

    def at_once(self, record: Record) -> Proof | Doubt | None:
        """A job's record, or a cancel's; None: ask `later`."""

    async def later(self, record: Record) -> Proof | Doubt: ...

    def marked(self, record: Record, proof: Proof) -> Record:
        """The believed record as it is kept and copied from here on."""

    def close(self) -> None: ...


def build(settings: Settings, registry: Registry) -> Credentials:
    """Raises ValueError if the mode lacks what it needs."""
    sealer = None
    if settings.service_secret or settings.identity != "trusted":
        sealer = Sealer(settings.service_secret, settings.service_secret_former)
    if settings.identity == "trusted":
        return Trusted(sealer)
    assert sealer is not None
    copied = frozenset({deferred_topic(settings.pool), overflow_topic(settings.pool)})
    if settings.identity == "topic":
        return ByTopic(sealer, copied)
    return Signed(sealer, copied, settings.pool, Keyring(registry))


class Trusted:
    """Everybody who may write is believed. With a secret it marks records too, for when the mode changes."""

    own_replies = False
    believes_headers = True

    def __init__(self, sealer: Sealer | None) -> None:
        self._sealer = sealer

    @property
    def marks(self) -> bool:
        return self._sealer is not None

    def at_once(self, record: Record) -> Proof | Doubt | None:
        if self._sealer is None or seal_in(record.headers) is None:
            return _ANYBODY
        return None if len(record.value or b"") > LARGE else self._sealed(self._sealer, record)

    async def later(self, record: Record) -> Proof | Doubt:
        assert self._sealer is not None
        return await asyncio.to_thread(self._sealed, self._sealer, record)

    @staticmethod
    def _sealed(sealer: Sealer, record: Record) -> Proof:
        return Proof(sealed=_good_copy(sealer.check(seal_in(record.headers) or b"", record.value), record))

    def marked(self, record: Record, proof: Proof) -> Record:
        return record if self._sealer is None else _marked(self._sealer, record, proof)

    def close(self) -> None: ...


class ByTopic:
    own_replies = True
    believes_headers = True
    marks = True

    def __init__(self, sealer: Sealer, copied: frozenset[str]) -> None:
        self._sealer = sealer
        self._copied = copied

    def at_once(self, record: Record) -> Proof | Doubt | None:
        topic = record.place.topic
        if topic in self._copied:
            return None if len(record.value or b"") > LARGE else _copy(self._sealer, record)
        if topic == CANCEL:  # to which only operators may write
            return _ANYBODY
        if topic.startswith(CANCEL):
            return Proof(topic[_TAKEN_FROM:], by_topic=True)
        found = parse_jobs_topic(topic)
        if found is None or found.tenant is None:
            return Doubt(
                Reason.TOPIC, "this topic is not a tenant's own; publish to inference.<pool>.jobs.<tier>.<tenant>"
            )
        return Proof(found.tenant, by_topic=True)

    async def later(self, record: Record) -> Proof | Doubt:
        return await asyncio.to_thread(_copy, self._sealer, record)

    def marked(self, record: Record, proof: Proof) -> Record:
        return _marked(self._sealer, record, proof)

    def close(self) -> None: ...


class Signed:
    own_replies = True
    believes_headers = False
    marks = True

    def __init__(self, sealer: Sealer, copied: frozenset[str], pool: str, keyring: Keyring) -> None:
        self._sealer = sealer
        self._copied = copied
        self._pool = pool
        self._keyring = keyring
        self._verifier: Verifier[Record, Proof | Doubt] = Verifier(self._check)

    def at_once(self, record: Record) -> Proof | Doubt | None:
        sealed = seal_in(record.headers) is not None
        if (sealed or record.place.topic in self._copied) and len(record.value or b"") <= LARGE:
            return self._vouched(record)
        if not sealed and _token(record) is None:
            return _no_token()
        return None

    async def later(self, record: Record) -> Proof | Doubt:
        return await self._verifier.ask(record)

    def marked(self, record: Record, proof: Proof) -> Record:
        return _marked(self._sealer, record, proof)

    def close(self) -> None:
        self._verifier.close()

    def _vouched(self, record: Record) -> Proof | Doubt:
        return _copy(self._sealer, record) if record.place.topic in self._copied else _replay(self._sealer, record)

    def _check(self, record: Record) -> Proof | Doubt:
        """In the thread."""
        if record.place.topic in self._copied or seal_in(record.headers) is not None:
            return self._vouched(record)
        raw = _token(record)
        if raw is None:
            return _no_token()
        audience = CANCEL if record.place.topic == CANCEL else self._pool
        try:
            proof = verify(raw, record.value, record.timestamp_ms, audience, self._keyring.of)
        except Doubt as doubt:
            return doubt
        if proof.job_id is None and audience != CANCEL:
            return Doubt(Reason.BAD_TOKEN, f"the token has no claim {JOB}, the job's id; see the contract, signed jobs")
        return proof


def _token(record: Record) -> bytes | None:
    for name, value in record.headers:
        if name == H_AUTHORIZATION and value:
            return value
    return None


def _no_token() -> Doubt:
    return Doubt(Reason.NO_TOKEN, "the record has no token in its header authorization; sign it with the tenant's key")


def _copy(sealer: Sealer, record: Record) -> Proof | Doubt:
    """A record on a topic to which only the service writes."""
    seal = sealer.check(seal_in(record.headers) or b"", record.value)
    if not _good_copy(seal, record):
        return Doubt(
            Reason.SEAL, "only the service writes to this topic, and the record does not bear its mark; publish the job"
        )
    return Proof(sealed=True)


def _replay(sealer: Sealer, record: Record) -> Proof | Doubt:
    """A record on a jobs topic that says that the service vouches for it."""
    seal = sealer.check(seal_in(record.headers) or b"", record.value)
    if seal is None or seal.kind != "replay" or record.place.topic == CANCEL:
        return Doubt(Reason.SEAL, "the service's mark on this record is not the service's; publish the job signed")
    if not seal.fresh(record.timestamp_ms):
        return Doubt(Reason.EXPIRED, "the replay's mark had expired when the record was written; replay it again")
    return Proof()


def _good_copy(seal: Seal | None, record: Record) -> bool:
    """Whether the mark is of a copy, and says the same as the headers that are believed then (R7, R13)."""
    if seal is None or seal.kind != "copy" or seal.at_ms != record.timestamp_ms:
        return False
    origins = [value for name, value in record.headers if name == H_ORIGIN]
    return origins == [seal.place.encode()]


def _marked(sealer: Sealer, record: Record, proof: Proof) -> Record:
    if proof.sealed:
        return record
    seal = Seal("copy", max(0, record.timestamp_ms), str(record.place))
    headers = (*without_seal(record.headers), (H_SEAL, sealer.mark(seal, record.value)))
    return replace(record, headers=headers)
