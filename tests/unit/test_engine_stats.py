"""What vLLM reports of each step becomes our gauges and counters, preemptions among them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from service.engine.protocol import EngineStats


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module without vLLM, whose import takes seconds: it needs a base class of it."""
    compat = ModuleType("service.engine.vllm.compat")
    compat.StatLoggerBase = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "service.engine.vllm.compat", compat)
    monkeypatch.delitem(sys.modules, "service.engine.vllm.stats", raising=False)
    yield importlib.import_module("service.engine.vllm.stats")
    sys.modules.pop("service.engine.vllm.stats", None)


def scheduler(**more: Any) -> SimpleNamespace:
    prefix = SimpleNamespace(queries=500, hits=384)
    given = {"num_running_reqs": 4, "num_waiting_reqs": 2, "kv_cache_usage": 0.75, "prefix_cache_stats": prefix}
    return SimpleNamespace(**{**given, **more})


def test_steps_add_up(room: Any) -> None:
    stats = EngineStats()
    recorder = room.StepRecorder(stats)
    recorder.record(scheduler(), SimpleNamespace(num_generation_tokens=4, num_preempted_reqs=0))
    recorder.record(
        scheduler(num_skipped_waiting_reqs=1), SimpleNamespace(num_generation_tokens=3, num_preempted_reqs=2)
    )
    recorder.record(scheduler(num_running_reqs=0, num_waiting_reqs=0), None)
    recorder.record(None, SimpleNamespace(num_generation_tokens=1, num_preempted_reqs=1))
    assert (stats.generated, stats.preemptions) == (8, 3)
    assert (stats.running, stats.waiting, stats.kv_usage) == (0, 0, 0.75)
    assert (stats.prefix_queries, stats.prefix_hits) == (1500, 1152)
    assert stats.last_step > 0


def test_statistics_of_another_shape_never_reach_the_engine_and_are_said_once(
    room: Any, caplog: pytest.LogCaptureFixture
) -> None:
    stats = EngineStats()
    recorder = room.StepRecorder(stats)
    for _ in range(3):
        recorder.record(SimpleNamespace(), SimpleNamespace())
    assert len(caplog.records) == 1 and stats.last_step > 0
