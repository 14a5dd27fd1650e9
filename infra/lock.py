"""A lock file between processes: the kernel frees it when its holder dies, however it dies."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from infra.errors import Busy, Cancelled


@contextmanager
def locked(
    path: Path,
    *,
    wait_s: float,
    waiting: Callable[[], None] = lambda: None,
    cancelled: threading.Event | None = None,
) -> Iterator[None]:
    """Hold `path` exclusively. `waiting` is called once if somebody else has it.

    Raises Busy after `wait_s` seconds, Cancelled as soon as the event is set.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        deadline = time.monotonic() + wait_s
        told = False
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if cancelled is not None and cancelled.is_set():
                    raise Cancelled from None
                if time.monotonic() > deadline:
                    raise Busy(
                        f"another run has held {path} for {wait_s:.0f} s",
                        remedy="wait for it, or end it, and run the same command again",
                    ) from None
                if not told:
                    waiting()
                    told = True
                time.sleep(0.1)
        yield
    finally:
        os.close(handle)
