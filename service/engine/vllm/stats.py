"""The engine's heartbeat and gauges: vLLM calls `record` once per step on our event loop. Never raises.

An exception in here would kill vLLM's output handler, and with it every running request.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from service.engine.protocol import EngineStats
from service.engine.vllm.compat import StatLoggerBase

log = logging.getLogger(__name__)


class StepRecorder(StatLoggerBase):
    """Writes what vLLM reports into an EngineStats that the engine shares with its readers."""

    def __init__(self, stats: EngineStats) -> None:
        self._stats = stats
        self._broken = False

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        stats = self._stats
        stats.last_step = time.monotonic()
        try:
            if scheduler_stats is not None:
                stats.running = scheduler_stats.num_running_reqs
                stats.waiting = scheduler_stats.num_waiting_reqs + getattr(
                    scheduler_stats, "num_skipped_waiting_reqs", 0
                )
                stats.kv_usage = scheduler_stats.kv_cache_usage
                prefix = scheduler_stats.prefix_cache_stats
                if prefix is not None and prefix.queries:
                    stats.prefix_queries += prefix.queries
                    stats.prefix_hits += prefix.hits
            if iteration_stats is not None:
                stats.generated += iteration_stats.num_generation_tokens
                stats.preemptions += iteration_stats.num_preempted_reqs
        except Exception:
            if not self._broken:  # once: it would be said at every step
                self._broken = True
                log.exception("vLLM's statistics have another shape than expected; gauges stand still")

    def log_engine_initialized(self) -> None:
        """Nothing to say: the engine reports its capacity itself."""
