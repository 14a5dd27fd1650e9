"""All settings of the worker, from `HEADRACE_…` variables (nested by `__`); each with its unit and reason."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class KafkaSettings(BaseModel):
    bootstrap: str = "127.0.0.1:9092"
    session_timeout_ms: int = 10_000  # R18; the lease is 3 s shorter
    heartbeat_interval_ms: int = 1_000  # what a rebalance waits for (research: 1 s is the lever)
    rebalance_timeout_ms: int = 30_000
    request_timeout_ms: int = 15_000
    max_partition_fetch_bytes: int = 262_144


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
    deadline_s: float = 60.0  # one upload or download, retries included


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
    overfill: float = 1.15  # running + waiting at the engine, as a share of max_num_seqs
    reserve: float = 0.06  # share of slots and KV kept for the urgent
    stall_s: float = 60.0  # running > 0 and no step for so long = hang
    max_prompt_chars: int = 4_000_000  # refused before rendering
    start_attempts: int = 5  # rebuilds in a row before the worker gives up
    # simulated engine: seconds per step = base + per_seq x running + per_prefill_token x tokens
    sim_step_base_s: float = 0.008
    sim_step_per_seq_s: float = 0.00002
    sim_step_per_prefill_token_s: float = 0.00002
    sim_kv_tokens: int = 1_000_000
    sim_start_s: float = 0.2


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
    tenants_file: Path | None = None
    cache_secret: str = "development-only"  # HMAC key of the prefix-cache salts
    identity: Literal["trusted", "topic", "signed"] = "trusted"
    drain_s: float = 20.0
    replication_factor: int = 1
    log_level: str = "INFO"
    log_format: Literal["logfmt", "json"] = "logfmt"

    kafka: KafkaSettings = Field(default_factory=KafkaSettings)
    store: StoreSettings = Field(default_factory=StoreSettings)
    engine: EngineSettings = Field(default_factory=EngineSettings)
    delivery: DeliverySettings = Field(default_factory=DeliverySettings)
    ledger: LedgerSettings = Field(default_factory=LedgerSettings)
    duplicates: DuplicatesSettings = Field(default_factory=DuplicatesSettings)
    telemetry: TelemetrySettings = Field(default_factory=TelemetrySettings)
