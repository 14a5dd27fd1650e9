"""The engine room: one engine per process, behind the protocol of `protocol.py`."""

from __future__ import annotations

from collections.abc import Callable

from service.engine.protocol import Engine
from service.settings import Settings


def build(settings: Settings, salt: Callable[[str], str]) -> Engine:
    """An engine of the configured kind, not started. `salt` gives a tenant's prefix-cache salt.

    vLLM itself is imported when its engine starts, in that engine's thread: the import takes 7-25 s.
    """
    if settings.engine.kind == "simulated":
        from service.engine.simulated import SimulatedEngine

        return SimulatedEngine(settings)
    from service.engine.vllm.engine import VllmEngine

    return VllmEngine(settings, salt)


__all__ = ["build"]
