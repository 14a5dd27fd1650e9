"""A worker process that a command starts, waits for and stops: for the demo and the benchmarks."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import orjson

# A worker drains (settings.drain_s, 20 s) and closes its parts (40 s at the most); after this it is killed, seconds.
STOP_S = 65.0
LOG_TAIL_LINES = 5


class WorkerStopped(Exception):
    """The worker ended, or did not become ready in time. The message names its log and shows its last lines."""


class WorkerProcess:
    """`async with WorkerProcess("demo", logs, stack.environment()) as worker: await worker.ready(240)`."""

    def __init__(self, name: str, logs: Path, environment: Mapping[str, str]) -> None:
        self.name = name
        self._environment = {**os.environ, **environment, "HEADRACE_WORKER": name}
        self.log = logs / f"worker-{name}.log"
        self.url = ""
        self._process: asyncio.subprocess.Process | None = None

    @property
    def process(self) -> asyncio.subprocess.Process:
        assert self._process is not None, "used as `async with`"
        return self._process

    async def __aenter__(self) -> Self:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as errors:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "service.cli", "worker", "--json"),
                env=self._environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                start_new_session=True,  # a Ctrl-C at the terminal is the command's to handle
            )
        return self

    async def ready(self, deadline_s: float) -> str:
        """Waits until the worker has joined its group; returns the address of its HTTP side. Raises WorkerStopped."""
        try:
            async with asyncio.timeout(deadline_s):
                self.url = await self._ready_line()
        except TimeoutError:
            raise WorkerStopped(f"the worker was not ready after {deadline_s:g} s; see {self.log}") from None
        if not self.url:
            await self.process.wait()
            raise WorkerStopped(f"the worker ended before it was ready; {self.log} ends with:\n{self._tail()}")
        return self.url

    async def _ready_line(self) -> str:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            if line.startswith(b"{"):
                event = orjson.loads(line)
                if event.get("event") == "ready":
                    return str(event["http"])
        return ""

    async def stop(self, *, kill: bool = False) -> int:
        """SIGTERM and a drain, or SIGKILL; returns the exit code."""
        process = self.process
        if process.returncode is None:
            process.send_signal(signal.SIGKILL if kill else signal.SIGTERM)
            try:
                async with asyncio.timeout(STOP_S):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()
        assert process.returncode is not None
        return process.returncode

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def _tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(f"  {line}" for line in lines[-LOG_TAIL_LINES:])
