"""What a reader gets on the reply topic: the events of a job, in the order of contract.md §2.

Every event carries identity (`tenant`, `job_id`, `run`) and time; all but `waiting` carry `attempt` and `seq` too.
Delivery writes these records as plain dicts for speed; the models here are what its tests and every reader validate.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, TypeAdapter, model_validator

from schemas.blob import BlobRef
from schemas.errors import ErrorCode
from schemas.fields import Count, Metadata, Place, Run, Sha256, Time, Written, exactly_one

TERMINAL = frozenset({"completed", "failed", "cancelled", "expired"})

Ulid = Annotated[str, Field(pattern=r"^[0-9A-HJKMNP-TV-Z]{26}$")]
TraceId = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Milliseconds = Annotated[float, Field(ge=0)]


class PromptTokensDetails(Written):
    cached_tokens: Count = Field(description="prompt tokens read from the prefix cache; always there")


class CompletionTokensDetails(Written):
    reasoning_tokens: Count = 0


class Usage(Written):
    """OpenAI's usage object; `completion_tokens` counts all choices, special and held-back tokens included."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        if self.prompt_tokens + self.completion_tokens != self.total_tokens:
            raise ValueError("total_tokens is not prompt_tokens + completion_tokens")
        return self


class Timings(Written):
    """Where an attempt's time went, in milliseconds; null = it never got there."""

    queue_ms: Milliseconds | None = Field(default=None, description="received by the worker → picked by the scheduler")
    admission_ms: Milliseconds | None = Field(default=None, description="picked → accepted by the engine")
    prefill_ms: Milliseconds | None = Field(default=None, description="first scheduled by the engine → first token")
    first_token_ms: Milliseconds | None = Field(default=None, description="received → first token")
    per_token_ms: Milliseconds | None = Field(
        default=None, description="mean distance of output tokens after the first"
    )
    total_ms: Milliseconds = Field(description="received → ended")


class ErrorInfo(Written):
    code: ErrorCode | str = Field(description="stable; readers treat codes they do not know as `internal`")
    message: str = Field(description="one line: what is wrong and what to do; never echoes input")
    retriable: bool = Field(description="publishing the job again with run + 1 may succeed")
    dead_letter: Place | None = Field(default=None, description="where the original record was kept")


class ToolFunction(Written):
    name: str
    arguments: str


class ToolCall(Written):
    id: str | None = None
    type: Literal["function"] = "function"
    function: ToolFunction


class PartialChoice(Written):
    index: Count
    text: str = ""
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None


class Partial(Written):
    """What had been generated when the job was stopped."""

    choices: list[PartialChoice] = Field(default_factory=list)


class _Event(Written):
    schema_version: Literal[1]
    job_id: Annotated[str, Field(min_length=1, max_length=128)]
    run: Run
    tenant: Annotated[str, Field(max_length=128)] = Field(description="empty only in the refusal of a job without one")
    at: Time


class _Numbered(_Event):
    attempt: Ulid
    seq: Count = Field(description="from 0, +1 within an attempt")


class _Terminal(_Numbered):
    metadata: Metadata | None = None
    duplicate: bool = Field(default=False, description="answered again for a second copy of a job that had ended")


class Waiting(_Event):
    """The job is accepted and has not started. Outside the numbering; only with `reply.progress`."""

    type: Literal["waiting"]
    reason: Literal["quota", "capacity", "order", "not_before", "engine"]
    since: Time
    metadata: Metadata | None = None


class Started(_Numbered):
    """An attempt begins; what was shown of former attempts is void."""

    type: Literal["started"]
    model: str
    worker: str
    trace_id: TraceId | None = None
    prompt_tokens: Count
    metadata: Metadata | None = None


class Chunk(_Numbered):
    """New tokens. `chunk` is OpenAI's `chat.completion.chunk` or `text_completion` object."""

    type: Literal["chunk"]
    offset: Count = Field(description="tokens of the attempt before this chunk, all choices together")
    tokens: Count = Field(description="tokens in it, special and held-back ones included")
    chunk: dict[str, Any]


class Completed(_Terminal):
    """The result: `response` = OpenAI's whole response object, or `output` = where it is stored. Exactly one."""

    model_config = ConfigDict(json_schema_extra=exactly_one("response", "output"))

    type: Literal["completed"]
    response: dict[str, Any] | None = None
    output: BlobRef | None = None
    finish_reasons: list[str] = Field(description="per choice, by index")
    usage: Usage
    timings: Timings
    text_sha256: list[Sha256] = Field(description="of each choice's text in UTF-8, by index")

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        if (self.response is None) == (self.output is None):
            raise ValueError("completed needs exactly one of response and output")
        return self


class Failed(_Terminal):
    type: Literal["failed"]
    error: ErrorInfo
    usage: Usage | None = None
    timings: Timings | None = None


class Cancelled(_Terminal):
    type: Literal["cancelled"]
    partial: Partial = Field(default_factory=Partial)
    usage: Usage | None = None
    timings: Timings | None = None


class Expired(_Terminal):
    """The deadline passed, before the job began or while it ran."""

    type: Literal["expired"]
    partial: Partial = Field(default_factory=Partial)
    usage: Usage | None = None
    timings: Timings | None = None


class Abandoned(_Numbered):
    """This attempt stops here and the job will run again. Not a terminal."""

    type: Literal["abandoned"]
    reason: str | None = None


Event = Annotated[
    Waiting | Started | Chunk | Completed | Failed | Cancelled | Expired | Abandoned, Field(discriminator="type")
]
EVENT: TypeAdapter[Event] = TypeAdapter(Event)


def read_event(value: bytes) -> Event:
    """A reply record's value as an event. Raises pydantic.ValidationError (a ValueError), its message without input."""
    return EVENT.validate_json(value)
