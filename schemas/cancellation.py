"""Whose cancellation a CancelledError is: what service and client must ask alike."""

from __future__ import annotations

import asyncio


def is_asked_for() -> bool:
    """Whether somebody cancelled the running task. False: an aiokafka client or an engine that goes away cancelled the
    future that it waited for, which is a failure like others.
    """
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0
