"""All settings of the worker, from `HEADRACE_…` variables (nested by `__`); each with its unit, bounds and reason."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import orjson
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict, SettingsError

from schemas.security import KafkaSecurity, SaslMechanism, SecurityProtocol

LEASE_MARGIN_S = 3.0  # a lease ends so long before the group could give our partitions away (R5)


def _listed(value: object) -> object:
    """A list from the environment: JSON, or names with commas between them."""
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("["):
        try:
            return orjson.loads(value)
        except orjson.JSONDecodeError:
            raise ValueError('must be a list such as ["one","two"] or one,two') from None
    return [part.strip() for part in value.split(",") if part.strip()]


def _address(text: str) -> str:
    """`host` or `host:port`, without a scheme; an IPv6 address in brackets."""
    found = re.fullmatch(r"(?:\[[0-9A-Fa-f:.]+\]|[^\s/:,\[\]]+)(?::([0-9]{1,5}))?", text)
    if found is None or (found[1] is not None and not 0 < int(found[1]) < 65_536):
        raise ValueError("must be host:port without a scheme, with a port of 1 to 65535")
    return text


def _addresses(text: str) -> str:
    for part in text.split(","):
        _address(part.strip())
    return text


def _collector(text: str) -> str:
    scheme, _, address = text.partition("://")
    if text and (scheme not in ("http", "https") or not address):
        raise ValueError("must be empty or a URL such as http://127.0.0.1:4318")
    return text


Whole = Annotated[int, Field(ge=0, lt=2**53)]
Positive = Annotated[int, Field(ge=1, lt=2**53)]
Milliseconds = Annotated[int, Field(ge=1, le=86_400_000)]
# Finite, and no more than a timer takes: 68 years.
Duration = Annotated[float, Field(ge=0.0, lt=2**31, allow_inf_nan=False)]
PositiveDuration = Annotated[float, Field(gt=0.0, lt=2**31, allow_inf_nan=False)]
Factor = Annotated[float, Field(ge=0.0, lt=1e9, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]  # which NaN is not
Port = Annotated[int, Field(ge=0, le=65_535)]
Listed = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_listed)]
Named = Annotated[str, Field(min_length=1)]
Level = Annotated[
    Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"],
    BeforeValidator(lambda value: value.upper() if isinstance(value, str) else value),
]


class Misconfigured(Exception):
    """Settings that no worker can run with; one line for each."""


class KafkaSettings(BaseModel):
    bootstrap: Annotated[str, AfterValidator(_addresses)] = "127.0.0.1:9092"
    session_timeout_ms: int = Field(default=10_000, ge=6_000, le=1_800_000)  # R18; the lease is 3 s shorter
    heartbeat_interval_ms: Milliseconds = 1_000  # what a rebalance waits for (research: 1 s is the lever)
    rebalance_timeout_ms: Milliseconds = 30_000
    request_timeout_ms: Milliseconds = 15_000
    max_partition_fetch_bytes: int = Field(default=65_536, ge=1, lt=2**31)
    instance: str = ""  # static member id (R18), only where one process at a time has it: a StatefulSet's pod name
    security_protocol: SecurityProtocol = "PLAINTEXT"
    sasl_mechanism: SaslMechanism = "SCRAM-SHA-512"  # PLAIN only over TLS: it sends the password as it is
    username: str = ""
    password: str = Field(default="", repr=False)
    ca_file: Path | None = None  # PEM, of whoever signed the brokers' certificates; empty = the system's
    cert_file: Path | None = None  # PEM, this client's own, where brokers ask for one
    key_file: Path | None = None
    key_password: str = Field(default="", repr=False)
    check_hostname: bool = True  # whether a broker's certificate must name the host that was called

    @model_validator(mode="after")
    def _sound(self) -> Self:
        _ = self.security
        if 2 * self.heartbeat_interval_ms > self.session_timeout_ms:
            raise ValueError("heartbeat_interval_ms must be at most half of session_timeout_ms")
        return self

    @property
    def security(self) -> KafkaSecurity:
        return KafkaSecurity(
            protocol=self.security_protocol,
            mechanism=self.sasl_mechanism,
            username=self.username,
            password=self.password,
            ca_file=self.ca_file,
            cert_file=self.cert_file,
            key_file=self.key_file,
            key_password=self.key_password,
            check_hostname=self.check_hostname,
        )

    def connection(self) -> dict[str, Any]:
        """What every aiokafka client is made with. Raises SecurityError."""
        return {"bootstrap_servers": self.bootstrap, **self.security.arguments()}


class StoreSettings(BaseModel):
    """The S3-compatible store; `endpoint` without a scheme."""

    endpoint: Annotated[str, AfterValidator(_address)] = "127.0.0.1:8333"
    secure: bool = False
    access_key: str = "headrace"
    secret_key: str = "headrace-secret"
    region: str = "us-east-1"
    bucket: Named = "outputs"
    prefix: Named = "v1"  # keys: <prefix>/<tenant>/<yyyy>/<mm>/<dd>/<job>/<attempt>/output.json
    ttl_days: int = Field(default=7, ge=1, le=36_500)  # stated as expires_at; the bucket's lifecycle rule deletes
    input_buckets: Listed = ()  # further buckets claim-checked inputs may come from
    max_input_bytes: Positive = 16 * 1024 * 1024
    deadline_s: PositiveDuration = 180.0  # one upload or download, retries included: an outage of minutes costs no job


class EngineSettings(BaseModel):
    kind: Literal["vllm", "simulated"] = "vllm"
    model: str = ""  # a folder in Hugging Face layout
    served_name: str = "smollm2-135m-instruct"
    max_num_seqs: Positive = 64
    max_num_batched_tokens: Positive = 2048
    max_model_len: Positive | None = 2048
    kv_cache_gib: Positive = 1  # CPU only
    gpu_memory_utilization: float = Field(default=0.9, gt=0.0, le=1.0)
    dtype: str = "auto"  # auto = by the processor's flags on a CPU, the model's own on a GPU
    enforce_eager: bool | None = None  # None = eager on a CPU
    tensor_parallel_size: Positive = 1
    stream_interval: Positive = 1
    tool_parser: str | None = "hermes"
    reasoning_parser: str | None = None
    # The engine gets max_num_seqs x overfill slots, and the reserve on top (service/engine/bounds.py).
    overfill: float = Field(default=1.15, ge=1.0, le=4.0)  # so that slots between two jobs leave none idle
    reserve: float = Field(default=0.06, ge=0.0, le=0.5)  # share of slots and KV kept for the urgent; at least one slot
    stall_s: PositiveDuration = 60.0  # running > 0 and no step for so long = hang
    max_prompt_chars: Positive = 4_000_000  # refused before rendering
    start_attempts: Positive = 5  # rebuilds in a row before the worker gives up
    # simulated engine: a machine whose measured times it keeps to, or the numbers below
    sim_profile: Literal["custom", "h200-8b"] = "custom"
    # seconds per step = base + per_seq x running + per_prefill_token x tokens + per_kv_token x context read
    sim_step_base_s: Duration = 0.008
    sim_step_per_seq_s: Duration = 0.00002
    sim_step_per_prefill_token_s: Duration = 0.00002
    sim_step_per_kv_token_s: Duration = 0.0
    sim_kv_tokens: Positive = 1_000_000
    sim_start_s: Duration = 0.2


class SchedulerSettings(BaseModel):
    policy: Literal["fair", "fifo"] = "fair"  # fifo: for measurements; no shares, no limits that make jobs wait
    prompt_cost: Factor = 1.0  # cost tokens of an uncached prompt token
    output_cost: Factor = Field(default=8.0, gt=0.0)  # cost tokens of an output token
    max_wait_s: PositiveDuration = 120.0  # for a tenant's next turn, whatever its share
    bulk_wait_s: PositiveDuration = 30.0  # for the next turn of the tier `bulk`


class DeliverySettings(BaseModel):
    mode: Literal["process", "inline"] = "process"
    handover_ms: PositiveDuration = 10.0  # the engine loop hands its list over so often
    flush_ms: PositiveDuration = 50.0
    flush_tokens: Positive = 64
    flush_bytes: Positive = 4096
    max_unacknowledged_bytes: Positive = (
        256 * 1024 * 1024
    )  # R10: above it admission stops, above twice it running jobs are aborted
    max_event_bytes: Positive = 256 * 1024
    linger_ms: Whole = 5


class LedgerSettings(BaseModel):
    commit_interval_s: PositiveDuration = 1.0
    max_span: Positive = 131_072  # records between watermark and the newest, per partition (R3): read again at worst
    max_unfinished: Positive = 900  # upper bound of HIGH per partition (R3)


class DuplicatesSettings(BaseModel):
    """How far back a further copy of a job is recognised (R7)."""

    window_s: Duration = 3600.0  # after the end of the first; later ones run again
    window_jobs: Whole = 200_000  # ended jobs remembered, 30 bytes each


class TelemetrySettings(BaseModel):
    otlp_endpoint: Annotated[str, AfterValidator(_collector)] = ""  # e.g. http://127.0.0.1:4318; empty = no export
    service_name: str = "headrace-worker"
    sample: Share = 1.0  # share of the spans of ordinary jobs; failed, slow and sampled ones always
    slow_s: Duration = 30.0
    tenant_labels: Listed = ()  # tenants that may appear as a metric label; others are "other"
    baggage_keys: Listed = ()  # W3C baggage that is copied to process spans; never trusted


class Settings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="HEADRACE_", env_nested_delimiter="__", extra="ignore")

    pool: str = Field(default="default", pattern=r"^[A-Za-z0-9._-]{1,100}$")
    partitions: int = Field(default=48, ge=1, le=65_535)
    worker: Named = Field(default_factory=lambda: f"{socket.gethostname()}-{os.getpid()}")
    http_host: Named = "127.0.0.1"
    http_port: Port = 0  # 0 = any free port, printed at start
    state_dir: Path = Path(".headrace")
    tenants_file: Path | None = None  # YAML or JSON; a change is in force within 2 s
    tenants_source: Literal["auto", "file", "topic"] = "auto"  # auto = the file if one is named, else the topic
    cache_secret: str = "development-only"  # HMAC key of the prefix-cache salts
    identity: Literal["trusted", "topic", "signed"] = "trusted"  # who says whose a job is; docs/tenancy.md
    service_secret: str = Field(default="", repr=False)  # seals what workers publish again; needed unless trusted
    service_secret_former: str = Field(default="", repr=False)  # still accepted, while the secret changes
    drain_s: Duration = 20.0
    replication_factor: int = Field(default=1, ge=1, le=32_767)
    log_level: Level = "INFO"
    log_format: Literal["logfmt", "json"] = "logfmt"

    kafka: KafkaSettings = Field(default_factory=KafkaSettings)
    store: StoreSettings = Field(default_factory=StoreSettings)
    engine: EngineSettings = Field(default_factory=EngineSettings)
    scheduler: SchedulerSettings = Field(default_factory=SchedulerSettings)
    delivery: DeliverySettings = Field(default_factory=DeliverySettings)
    ledger: LedgerSettings = Field(default_factory=LedgerSettings)
    duplicates: DuplicatesSettings = Field(default_factory=DuplicatesSettings)
    telemetry: TelemetrySettings = Field(default_factory=TelemetrySettings)

    @model_validator(mode="after")
    def _leased(self) -> Self:
        lease_s = self.kafka.session_timeout_ms / 1000 - LEASE_MARGIN_S
        if 2 * self.ledger.commit_interval_s > lease_s:
            raise ValueError(
                f"HEADRACE_LEDGER__COMMIT_INTERVAL_S must be at most {lease_s / 2:g}: a commit gives the right to end "
                f"jobs for {lease_s:g} s (HEADRACE_KAFKA__SESSION_TIMEOUT_MS less 3 s)"
            )
        return self

    @classmethod
    def read(cls, **overrides: object) -> Settings:
        """From the environment. Raises Misconfigured: which variable, what is wrong, what to do; never a value."""
        try:
            return cls(**overrides)  # type: ignore[arg-type]
        except ValidationError as error:
            raise Misconfigured("\n".join(_line(dict(fault)) for fault in error.errors(include_url=False))) from None
        except SettingsError as error:
            found = re.search(r'field "(\w+)"', str(error))
            group = found[1].upper() if found else "…"
            raise Misconfigured(
                f"HEADRACE_{group}: must be a JSON object; set its parts by HEADRACE_{group}__… instead"
            ) from None


def _line(fault: dict[str, Any]) -> str:
    says = re.sub(r"^\w+ should ", "must ", str(fault["msg"]).removeprefix("Value error, "))
    if not fault["loc"]:
        return says
    return f"HEADRACE_{'__'.join(str(part) for part in fault['loc']).upper()}: {says}; correct it, or leave it out"
