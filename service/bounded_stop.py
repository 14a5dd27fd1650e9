"""Stopping a client of the broker within a bound (R19). Knows nothing of which client it is."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

log = logging.getLogger(__name__)

CANCEL_S = 0.5  # for a stop that is given up to let go of what it holds


async def stop_within(seconds: float, stopping: Coroutine[Any, Any, Any]) -> None:
    """Awaits a client's stop for at most `seconds`. Never raises but for the caller's own cancellation.

    In a task of its own: without a broker an aiokafka client's stop hangs, fails, or raises CancelledError, which its
    caller would take for its own.
    """
    task = asyncio.ensure_future(stopping)
    await asyncio.wait({task}, timeout=seconds)
    if not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=CANCEL_S)
    elif not task.cancelled() and (error := task.exception()) is not None:
        log.info("stopping a client failed: %r", error)
