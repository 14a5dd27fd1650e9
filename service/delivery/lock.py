"""One flock per worker name, held by the worker and its delivery process alike (R8).

The kernel frees it when the last of the two is gone, so a new worker of the same name cannot start beside an old
delivery process that still sends.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import time
from pathlib import Path

POLL_S = 0.05


class NameTaken(Exception):
    """Another worker of this name, or what is left of it, is alive."""


class NameLock:
    def __init__(self, folder: Path, worker: str) -> None:
        self._path = folder / f"{re.sub(r'[^A-Za-z0-9._-]', '_', worker)}.lock"
        self._worker = worker
        self.descriptor = -1

    async def acquire(self, timeout_s: float) -> None:
        """Raises NameTaken after `timeout_s` seconds."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        deadline = time.monotonic() + timeout_s
        try:
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        raise NameTaken(
                            f"a worker named {self._worker!r} is still alive here (lock {self._path}); stop it, or set "
                            "HEADRACE_WORKER to another name"
                        ) from None
                await asyncio.sleep(POLL_S)
        except BaseException:
            os.close(descriptor)
            raise
        self.descriptor = descriptor

    def release(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
