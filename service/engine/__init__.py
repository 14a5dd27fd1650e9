"""The engine room: one engine per process, behind the protocol of `protocol.py`."""

from __future__ import annotations

from collections.abc import Callable

from service.engine import bounds
from service.engine.protocol import Engine
from service.settings import Settings


def build(settings: Settings, salt: Callable[[str], str]) -> Engine:
    """An engine of the configured kind, not started. `salt` gives a tenant's prefix-cache salt.

    The engine's `max_num_seqs` is all the slots: the ordinary ones and the reserve.
    vLLM itself is imported when its engine starts, in that engine's thread: the import takes 7-25 s.
    """
    engine = settings.engine.model_copy(update={"max_num_seqs": bounds.slots(settings.engine)})
    settings = settings.model_copy(update={"engine": engine})
    if settings.engine.kind == "simulated":
        from service.engine.simulated import SimulatedEngine

        return SimulatedEngine(settings, salt)
    from service.engine.vllm.engine import VllmEngine

    return VllmEngine(settings, salt)


__all__ = ["build"]
