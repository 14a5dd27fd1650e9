"""The job record: what a caller publishes (contract.md §1). The body has its own models in `schemas/bodies.py`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from schemas.blob import InputRef
from schemas.fields import Asked, JobId, Metadata, Partition, Run, TenantId, Time, TopicName, exactly_one

# Bytes of a response that travel inside the terminal event; larger ones go to the store.
INLINE_DEFAULT = 256 * 1024
# A terminal event is one Kafka record, whose usual limit is 1 MiB; the response is about half of a large one's JSON.
INLINE_MAX = 512 * 1024


class Reply(Asked):
    """Where and how to answer. Without `topic`: the tenant's default reply topic."""

    topic: TopicName | None = None
    partition: Partition | None = Field(default=None, description="left out: by the key, which is the job id")
    stream: bool = Field(default=True, description="send chunks as tokens come")
    progress: bool = Field(default=False, description="send `waiting` events after 5 s and then every 30 s")


class OutputOptions(Asked):
    inline_max_bytes: Annotated[int, Field(ge=0, le=INLINE_MAX)] = Field(
        default=INLINE_DEFAULT, description="responses over this many bytes of JSON are stored"
    )
    store: Literal["auto", "always", "never"] = "auto"
    ttl_days: Annotated[int, Field(ge=1, le=365)] | None = Field(default=None, description="null = the store's default")


# Fields that do not make another job of one identity: who asks again may wait elsewhere and longer.
NOT_CONTENT = frozenset({"run", "reply", "deadline", "not_before"})


class Job(Asked):
    model_config = ConfigDict(json_schema_extra=exactly_one("body", "input"))

    schema_version: Literal[1]
    id: JobId
    run: Run = Field(default=0, description="+1 for each deliberate repetition; identity is (tenant, id, run)")
    tenant: TenantId
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]
    body: dict[str, Any] | None = Field(default=None, description="OpenAI's request body for the endpoint")
    input: InputRef | None = Field(default=None, description="or a reference to it in the object store")
    reply: Reply | None = None
    deadline: Time | None = None
    not_before: Time | None = None
    conversation: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    metadata: Metadata | None = None
    output: OutputOptions | None = None

    @model_validator(mode="after")
    def _one_request(self) -> Self:
        if (self.body is None) == (self.input is None):
            raise ValueError("exactly one of body and input must be given")
        if self.deadline is not None and self.not_before is not None and self.not_before >= self.deadline:
            raise ValueError("not_before must lie before deadline")
        return self
