"""The registries: who may use the service and how much of it, and which model is served where (tenancy.md §1)."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from schemas.blob import Bucket
from schemas.fields import Asked, Count, TenantId, Time, TopicName
from schemas.names import REPLIES, TIERS, reply_topic_of
from schemas.verification import PublicKey

# A topic name in which `*` stands for any characters and `{id}` for the tenant's id.
TopicPattern = Annotated[str, Field(pattern=r"^[A-Za-z0-9._*{}-]{1,249}$")]
Positive = Annotated[int, Field(ge=1, le=2**53)]


class TenantLimits(Asked):
    """Hard bounds of one tenant; null = only the service's own. Over a rate a job waits, over a bound it fails."""

    running_jobs: Positive | None = Field(default=None, description="jobs in the engine at the same time")
    tokens_in_engine: Positive | None = Field(default=None, description="prompt and predicted output of running jobs")
    tokens_per_minute: Positive | None = None
    prompt_tokens: Positive | None = Field(default=None, description="per job")
    output_tokens: Positive | None = Field(default=None, description="per choice; also the default of max_tokens")
    queued_jobs: Positive | None = None
    n: Annotated[int, Field(ge=1, le=128)] = Field(default=8, description="choices of one job")
    schema_bytes: Annotated[int, Field(ge=1, le=1024 * 1024)] = Field(
        default=64 * 1024, description="of one JSON schema or grammar, in bytes of JSON"
    )


class Tenant(Asked):
    id: TenantId
    enabled: bool = True
    weight: Annotated[float, Field(gt=0, le=1000)] = Field(default=1.0, description="share of the engine")
    tier: Literal["interactive", "standard", "bulk"] = Field(
        default="standard", description="where clients publish this tenant's jobs unless told otherwise"
    )
    limits: TenantLimits = Field(default_factory=TenantLimits)
    models: list[str] | None = Field(default=None, description="models it may use; null = all that are served")
    reply_topic: TopicName = Field(default=REPLIES, description="where events go when a job names no topic")
    reply_topics: list[TopicPattern] = Field(
        default_factory=lambda: [REPLIES, "{id}.*"],
        description="topics it may name; `*` stands for any characters, `{id}` for the tenant's id",
    )
    blob_buckets: list[Bucket] = Field(
        default_factory=list, description="buckets its inputs may come from, beside the service's own"
    )
    blob_prefix: str = Field(
        default="", max_length=512, description="keys its inputs begin with; empty = <the service's prefix>/<id>/"
    )
    cache_domain: Annotated[str, Field(min_length=1, max_length=128)] | None = Field(
        default=None, description="tenants of one domain share the prefix cache; null = the tenant's id"
    )
    order: Literal["none", "conversation", "tenant"] = "none"
    spread: Annotated[int, Field(ge=1, le=1024)] = Field(
        default=1, description="record keys this tenant is spread over"
    )
    former_spread: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        default=None, description="the spread before the last change, so that jobs of that time are recognised"
    )
    spread_since: Time | None = Field(
        default=None, description="from when on publishers use `spread`; before it they use `former_spread`"
    )
    chat_template_kwargs: bool = Field(default=False, description="may pass arguments to the chat template")
    media_domains: list[str] = Field(
        default_factory=list, description="host names from which images and other media may be given by https URL"
    )
    verification_keys: list[str] = Field(
        default_factory=list, description="public Ed25519 keys, PEM or JWK (signed mode)"
    )

    @property
    def domain(self) -> str:
        """The cache domain; tenants with different ones never hit each other's prefixes."""
        return self.cache_domain if self.cache_domain is not None else self.id

    def spread_at(self, now: float) -> int:
        """Over how many keys publishers spread this tenant's jobs at that moment (wall clock)."""
        if self.former_spread is None or self.spread_since is None or self.spread_since.timestamp() <= now:
            return self.spread
        return self.former_spread

    @property
    def own_reply_topic(self) -> str:
        """Where events go by default in the identity modes that give each tenant a topic of its own."""
        return self.reply_topic if self.reply_topic != REPLIES else reply_topic_of(self.id)

    def may_reply_to(self, topic: str) -> bool:
        """Whether a job of this tenant may name `topic` for its events."""
        if topic == self.reply_topic:
            return True
        return any(fnmatchcase(topic, pattern.replace("{id}", self.id)) for pattern in self.reply_topics)

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        for pattern in self.reply_topics:
            if not set(pattern.replace("{id}", "")).isdisjoint("{}"):
                raise ValueError("has a reply topic pattern with braces other than {id}")
        kids = set()
        for number, text in enumerate(self.verification_keys, 1):
            try:
                kids.add(PublicKey.parse(text).kid)
            except ValueError as error:
                raise ValueError(f"has verification key {number} that {error}") from None
        if len(kids) != len(self.verification_keys):
            raise ValueError("has two verification keys with the same kid: name them by different ones")
        if (self.former_spread is None) != (self.spread_since is None):
            raise ValueError("has one of former_spread and spread_since without the other")
        if self.order == "tenant" and self.spread != 1:
            raise ValueError("order 'tenant' needs spread 1: its jobs must lie on one partition")
        return self


class ModelEntry(Asked):
    """A model or an alias, and the pool whose workers serve it."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    pool: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    alias_of: str | None = None
    kind: Literal["generate", "embed"] = "generate"
    max_model_len: Count | None = Field(default=None, description="tokens, prompt and output together")


assert TIERS == ("interactive", "standard", "bulk"), "Tenant.tier repeats names.TIERS"
