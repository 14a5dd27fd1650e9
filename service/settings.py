"""All settings of the worker, from `HEADRACE_…` variables (nested by `__`); each with its unit and reason."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from schemas.security import KafkaSecurity, SaslMechanism, SecurityProtocol


class KafkaSettings(BaseModel):
    bootstrap: str = "127.0.0.1:9092"
    session_timeout_ms: int = 10_000  # R18; the lease is 3 s shorter
    heartbeat_interval_ms: int = 1_000  # what a rebalance waits for (research: 1 s is the lever)
    rebalance_timeout_ms: int = 30_000
    request_timeout_ms: int = 15_000
    max_partition_fetch_bytes: int = 262_144
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
    def _secured(self) -> Self:
        _ = self.security
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

    endpoint: str = "127.0.0.1:8333"
    secure: bool = False
    access_key: str = "headrace"
    secret_key: str = "headrace-secret"
    region: str = "us-east-1"
    bucket: str = "outputs"
    prefix: str = "v1"  # keys: <prefix>/<tenant>/<yyyy>/<mm>/<dd>/<job>/<attempt>/output.json
    ttl_days: int = 7  # stated as expires_at; the bucket's lifecycle rule deletes
    input_buckets: tuple[str, ...] = ()  # further buckets claim-checked inputs may come from
    max_input_bytes: int = 16 * 1024 * 1024
    deadline_s: float = 180.0  # one upload or download, retries included: an outage of minutes costs no job


class EngineSettings(BaseModel):
    kind: Literal["vllm", "simulated"] = "vllm"
    model: str = ""  # a folder in Hugging Face layout
    served_name: str = "smollm2-135m-instruct"
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = 2048
    kv_cache_gib: int = 1  # CPU only
    gpu_memory_utilization: float = 0.9
    dtype: str = "auto"  # auto = by the processor's flags on a CPU, the model's own on a GPU
    enforce_eager: bool | None = None  # None = eager on a CPU
    tensor_parallel_size: int = 1
    stream_interval: int = 1
    tool_parser: str | None = "hermes"
    reasoning_parser: str | None = None
    # The engine gets max_num_seqs x overfill slots, and the reserve on top (service/engine/bounds.py).
    overfill: float = Field(default=1.15, ge=1.0, le=4.0)  # so that slots between two jobs leave none idle
    reserve: float = Field(default=0.06, ge=0.0, le=0.5)  # share of slots and KV kept for the urgent; at least one slot
    stall_s: float = 60.0  # running > 0 and no step for so long = hang
    max_prompt_chars: int = 4_000_000  # refused before rendering
    start_attempts: int = 5  # rebuilds in a row before the worker gives up
    # simulated engine: a machine whose measured times it keeps to, or the numbers below
    sim_profile: Literal["custom", "h200-8b"] = "custom"
    # seconds per step = base + per_seq x running + per_prefill_token x tokens + per_kv_token x context read
    sim_step_base_s: float = 0.008
    sim_step_per_seq_s: float = 0.00002
    sim_step_per_prefill_token_s: float = 0.00002
    sim_step_per_kv_token_s: float = 0.0
    sim_kv_tokens: int = 1_000_000
    sim_start_s: float = 0.2


class SchedulerSettings(BaseModel):
    policy: Literal["fair", "fifo"] = "fair"  # fifo: for measurements; no shares, no limits that make jobs wait
    prompt_cost: float = Field(default=1.0, ge=0.0)  # cost tokens of an uncached prompt token
    output_cost: float = Field(default=8.0, gt=0.0)  # cost tokens of an output token
    max_wait_s: float = Field(default=120.0, gt=0.0)  # for a tenant's next turn, whatever its share
    bulk_wait_s: float = Field(default=30.0, gt=0.0)  # for the next turn of the tier `bulk`


class DeliverySettings(BaseModel):
    mode: Literal["process", "inline"] = "process"
    handover_ms: float = 10.0  # the engine loop hands its list over so often
    flush_ms: float = 50.0
    flush_tokens: int = 64
    flush_bytes: int = 4096
    max_unacknowledged_bytes: int = (
        256 * 1024 * 1024
    )  # R10: above it admission stops, above twice it running jobs are aborted
    max_event_bytes: int = 256 * 1024
    linger_ms: int = 5


class LedgerSettings(BaseModel):
    commit_interval_s: float = 1.0
    max_span: int = 32_768  # records between watermark and the newest, per partition (R3)
    max_unfinished: int = 900  # upper bound of HIGH per partition (R3)


class DuplicatesSettings(BaseModel):
    """How far back a further copy of a job is recognised (R7)."""

    window_s: float = 3600.0  # after the end of the first; later ones run again
    window_jobs: int = 200_000  # ended jobs remembered, 30 bytes each


class TelemetrySettings(BaseModel):
    otlp_endpoint: str = ""  # e.g. http://127.0.0.1:4318; empty = no export
    service_name: str = "headrace-worker"
    sample: float = 1.0  # share of the spans of ordinary jobs; failed, slow and sampled ones always
    slow_s: float = 30.0
    tenant_labels: tuple[str, ...] = ()  # tenants that may appear as a metric label; others are "other"
    baggage_keys: tuple[str, ...] = ()  # W3C baggage that is copied to process spans; never trusted


class Settings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="HEADRACE_", env_nested_delimiter="__", extra="ignore")

    pool: str = "default"
    partitions: int = 48
    worker: str = Field(default_factory=lambda: f"{socket.gethostname()}-{os.getpid()}")
    http_host: str = "127.0.0.1"
    http_port: int = 0  # 0 = any free port, printed at start
    state_dir: Path = Path(".headrace")
    tenants_file: Path | None = None  # YAML or JSON; a change is in force within 2 s
    tenants_source: Literal["auto", "file", "topic"] = "auto"  # auto = the file if one is named, else the topic
    cache_secret: str = "development-only"  # HMAC key of the prefix-cache salts
    identity: Literal["trusted", "topic", "signed"] = "trusted"  # who says whose a job is; docs/tenancy.md
    service_secret: str = Field(default="", repr=False)  # seals what workers publish again; needed unless trusted
    service_secret_former: str = Field(default="", repr=False)  # still accepted, while the secret changes
    drain_s: float = 20.0
    replication_factor: int = 1
    log_level: str = "INFO"
    log_format: Literal["logfmt", "json"] = "logfmt"

    kafka: KafkaSettings = Field(default_factory=KafkaSettings)
    store: StoreSettings = Field(default_factory=StoreSettings)
    engine: EngineSettings = Field(default_factory=EngineSettings)
    scheduler: SchedulerSettings = Field(default_factory=SchedulerSettings)
    delivery: DeliverySettings = Field(default_factory=DeliverySettings)
    ledger: LedgerSettings = Field(default_factory=LedgerSettings)
    duplicates: DuplicatesSettings = Field(default_factory=DuplicatesSettings)
    telemetry: TelemetrySettings = Field(default_factory=TelemetrySettings)
