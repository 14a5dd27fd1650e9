"""What vLLM is told: engine arguments, environment and logging, from the settings. Pure; imports no vLLM."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from typing import Any

from service.engine.bounds import MAX_N, queue_bound
from service.settings import EngineSettings

# Sequences of the largest CUDA graph that vLLM captures unasked, and the distance of those above 256.
GRAPHS_BY_DEFAULT, GRAPH_STEP = 512, 16
BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    try:
        for line in cpuinfo.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("flags", "Features"):
                return frozenset(value.split())
    except OSError:
        pass
    return frozenset()


def dtype(settings: EngineSettings, cpu: bool, flags: frozenset[str]) -> str:
    """On a CPU without bfloat16 instructions float32 is 5 times as fast as bfloat16 and float16 (measured, AVX2)."""
    if settings.dtype != "auto" or not cpu:
        return settings.dtype
    return "bfloat16" if flags & BF16_FLAGS else "float32"


def arguments(settings: EngineSettings, cpu: bool, flags: frozenset[str]) -> dict[str, Any]:
    """Arguments of AsyncEngineArgs. Batch sizes are always explicit: the class's own defaults are those of a toy."""
    eager = cpu if settings.enforce_eager is None else settings.enforce_eager
    return graphs(settings.max_num_seqs, eager) | {
        "model": settings.model,
        "served_model_name": [settings.served_name],
        "dtype": dtype(settings, cpu, flags),
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "enforce_eager": eager,
        "stream_interval": settings.stream_interval,
        "reasoning_parser": settings.reasoning_parser or "",
        "enable_prefix_caching": True,
        "scheduling_policy": "priority",
        "max_num_queued_reqs": queue_bound(settings.max_num_seqs),
        "trust_remote_code": False,
        "use_tqdm_on_load": False,
        "disable_log_stats": False,
        "enable_log_requests": False,
    }


def graphs(slots: int, eager: bool) -> dict[str, Any]:
    """CUDA graphs cover every batch, the reserve's slots included: a larger one than the largest graph runs eagerly."""
    if eager or slots <= GRAPHS_BY_DEFAULT:
        return {}
    return {"max_cudagraph_capture_size": -(-slots // GRAPH_STEP) * GRAPH_STEP}


def environment(settings: EngineSettings, log_config: Path) -> tuple[dict[str, str], dict[str, str]]:
    """(always set, set unless the operator did): variables of this process and, by inheritance, of vLLM's children."""
    forced = {
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # threads of ours run already: a fork could hang
        "VLLM_LOGGING_CONFIG_PATH": str(log_config),
        "VLLM_CPU_KVCACHE_SPACE": str(settings.kv_cache_gib),
        "VLLM_MAX_N_SEQUENCES": str(MAX_N),
    }
    defaults = {
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",  # models are folders; a name is never looked up
        # A Worker on a CPU never stops by itself: EngineCore waits this long for it, then kills it and tidies up.
        "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "1",
        # One engine on one host: no look-up of the host's own address, which an offline machine may not have.
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }
    if importlib.util.find_spec("flashinfer") is None:
        defaults["VLLM_USE_FLASHINFER_SAMPLER"] = "0"  # 0.26 imports it unasked and fails without
    return forced, defaults


def log_config(errors: Path, level: int) -> dict[str, Any]:
    """vLLM's processes log errors to stderr; warnings too go into `errors`, from which a failed start is explained.

    Its start-up chatter (60 lines, a dozen of them warnings about what we chose) is shown at log level DEBUG only.
    """
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"format": "%(asctime)s %(levelname)s %(processName)s %(name)s %(message)s"}},
        "handlers": {
            "stderr": {
                "class": "logging.StreamHandler",
                "stream": "ext://sys.stderr",
                "formatter": "line",
                "level": "INFO" if level <= logging.DEBUG else "ERROR",
            },
            "errors": {
                "class": "logging.FileHandler",
                "filename": str(errors),
                "formatter": "line",
                "level": "WARNING",
            },
        },
        "loggers": {"vllm": {"handlers": ["stderr", "errors"], "level": "INFO", "propagate": False}},
    }
