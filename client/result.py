"""What a caller holds in the end, and on the way there: `Result`, `Chunk`, `Started`, `Waiting`, `ResultOnly`,
`BlobRef`, `ResumeToken`.

Plain values made from events. No I/O.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeGuard

import orjson

from client.errors import ClientError, ResultTimeout, StoreError, object_or_empty


@dataclass(frozen=True, slots=True)
class ResumeToken:
    """Enough to find a job's events again, from any process: keep `str(token)` where a restart cannot reach it.

    `offset` is the end of the reply partition before the job was published: every event of the job lies at or after it.
    """

    topic: str
    partition: int
    offset: int
    tenant: str
    id: str
    run: int = 0

    def __str__(self) -> str:
        return orjson.dumps(asdict(self)).decode()

    @classmethod
    def parse(cls, text: str | bytes) -> ResumeToken:
        """Raises ClientError when `text` is not a token."""
        try:
            token = cls(**orjson.loads(text))
        except (TypeError, ValueError) as error:
            raise ClientError(f"not a resume token: {error}") from None
        if not all(isinstance(n, int) and n >= 0 for n in (token.partition, token.offset, token.run)):
            raise ClientError("not a resume token: partition, offset and run are numbers from 0")
        if not all(isinstance(text, str) and text.isascii() for text in (token.topic, token.tenant, token.id)):
            raise ClientError("not a resume token: topic, tenant and id are text")
        return token


@dataclass(frozen=True, slots=True)
class BlobRef:
    """Where a stored output or input lies, and how to tell that it is whole."""

    bucket: str
    key: str
    size: int
    sha256: str
    content_type: str = "application/json"
    etag: str | None = None
    version_id: str | None = None
    expires_at: str | None = None

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> BlobRef:
        """From a reference on the wire; fields of later versions are ignored. Raises StoreError if it is not one."""
        try:
            return cls(**{name: fields[name] for name in cls.__dataclass_fields__ if name in fields})
        except TypeError as error:
            raise StoreError(f"not a blob reference: {error}") from None

    def wire(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of the attempt that counts, as the response states them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    @classmethod
    def of(cls, usage: Mapping[str, Any] | None) -> Usage:
        usage = object_or_empty(usage)
        return cls(
            prompt_tokens=usage.get("prompt_tokens") or 0,
            completion_tokens=usage.get("completion_tokens") or 0,
            cached_tokens=object_or_empty(usage.get("prompt_tokens_details")).get("cached_tokens") or 0,
            reasoning_tokens=object_or_empty(usage.get("completion_tokens_details")).get("reasoning_tokens") or 0,
        )


def choice_text(choice: Mapping[str, Any]) -> str:
    """The text in a choice of a chunk or of a response, chat or plain completion."""
    part = choice.get("delta") or choice.get("message")
    text = part.get("content") if isinstance(part, dict) else choice.get("text")
    return text if isinstance(text, str) else ""


def is_chunk_object(data: object) -> TypeGuard[Mapping[str, Any]]:
    """Whether this is built as OpenAI's chunks are, so that whoever shows it need not look again."""
    if not isinstance(data, dict):
        return False
    choices = data.get("choices", ())
    return isinstance(choices, list | tuple) and all(isinstance(choice, dict) for choice in choices)


@dataclass(frozen=True, slots=True)
class Waiting:
    """The job does not run yet. `reason`: quota, capacity, order, not_before or engine."""

    reason: str
    since: Any


@dataclass(frozen=True, slots=True)
class Started:
    """An attempt began. Whatever was shown before it is void."""

    attempt: str
    model: str | None = None
    worker: str | None = None
    trace_id: str | None = None
    prompt_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ResultOnly:
    """No more chunks of this attempt will be shown; `result()` has the whole output. `reason` says why."""

    reason: str


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next piece of the current attempt. `first` marks an attempt's first: drop what an earlier one showed."""

    attempt: str
    seq: int
    offset: int  # tokens before it, all choices together
    tokens: int
    data: Mapping[str, Any]  # the OpenAI chunk object
    first: bool

    @property
    def text(self) -> str:
        """What it adds to the first choice."""
        return self.text_of(0)

    def text_of(self, index: int) -> str:
        return "".join(choice_text(choice) for choice in self.data.get("choices", ()) if choice.get("index") == index)


Event = Waiting | Started | Chunk | ResultOnly


@dataclass(slots=True)
class Result:
    """A completed job. `response` is the whole OpenAI response object, inline or fetched from the store."""

    job_id: str
    run: int
    tenant: str
    attempt: str
    at: Any
    finish_reasons: list[str]
    usage: Usage
    timings: Mapping[str, Any]
    text_sha256: list[str]
    metadata: Mapping[str, str]
    output: BlobRef | None  # set when the response lies in the store
    place: tuple[str, int, int]  # topic, partition and offset of the terminal event
    event: Mapping[str, Any] = field(repr=False)
    _response: Mapping[str, Any] | None = field(repr=False, default=None)
    _fetch: Callable[[BlobRef], Awaitable[bytes]] | None = field(repr=False, default=None)

    @classmethod
    def of(
        cls,
        event: Mapping[str, Any],
        place: tuple[str, int, int],
        fetch: Callable[[BlobRef], Awaitable[bytes]] | None = None,
    ) -> Result:
        """From a `completed` event; `fetch` gets a stored response's bytes, None without a store.

        Raises StoreError, KeyError or TypeError for one that lacks what the contract says it has.
        """
        if not isinstance(event.get("response"), dict | None):
            raise TypeError("response is no object")
        return cls(
            job_id=event["job_id"],
            run=event["run"],
            tenant=event["tenant"],
            attempt=event.get("attempt", ""),
            at=event.get("at"),
            finish_reasons=list(event.get("finish_reasons") or ()),
            usage=Usage.of(event.get("usage")),
            timings=event.get("timings") or {},
            text_sha256=list(event.get("text_sha256") or ()),
            metadata=event.get("metadata") or {},
            output=BlobRef.of(event["output"]) if event.get("output") else None,
            place=place,
            event=event,
            _response=event.get("response"),
            _fetch=fetch,
        )

    @property
    def response(self) -> Mapping[str, Any]:
        """Raises StoreError when the response lies in the store and was not fetched."""
        if self._response is None:
            where = f"{self.output.bucket}/{self.output.key}" if self.output else "nowhere"
            raise StoreError(
                f"the response of {self.job_id} lies in the store ({where}): await result.download() first"
            )
        return self._response

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return choice_text(self.response["choices"][0])

    @property
    def texts(self) -> list[str]:
        return [choice_text(choice) for choice in self.response["choices"]]

    async def download(self, timeout_s: float | None = None) -> Mapping[str, Any]:
        """The response, fetched from the store (size and SHA-256 checked) if it is not here yet.

        Raises ResultTimeout after `timeout_s` seconds (without it the store's own limit holds), StoreError without
        store access or when the object is gone, DigestMismatch when it is not what was written.
        """
        if self._response is None:
            if self.output is None:
                raise StoreError(f"{self.job_id} has neither a response nor a reference to one")
            if self._fetch is None:
                raise StoreError(
                    f"the response of {self.job_id} lies in the store: give the client access to it, Client(…, "
                    "store=StoreAccess(…))"
                )
            try:
                async with asyncio.timeout(timeout_s):
                    body = await self._fetch(self.output)
            except TimeoutError:
                raise ResultTimeout(
                    f"the response of {self.job_id} was not fetched in the time left; ask again"
                ) from None
            self._response = orjson.loads(body)
        return self._response
