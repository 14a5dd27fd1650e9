"""AsyncLLM behind our protocol: starts and closes it in a thread of its own, runs requests, reports its state.

Never raises anything but the protocol's errors out of `run`, never blocks the event loop, and never leaves a request or
a child process behind. Imports vLLM only when it starts. Facts and traps: the engine chapter of docs/decisions.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from schemas.errors import Refusal
from schemas.names import CHAT, COMPLETIONS
from service.engine import pace
from service.engine.protocol import (
    Capacity,
    EngineAway,
    EngineFault,
    EngineLost,
    EngineState,
    EngineStats,
    Output,
    Overloaded,
    Prepared,
    StartFailure,
)
from service.engine.vllm import arguments, failures
from service.engine.vllm.deltas import Reader
from service.engine.vllm.refusals import refusal
from service.job import Job
from service.settings import Settings

if TYPE_CHECKING:
    from service.engine.vllm.render import Renderer

log = logging.getLogger(__name__)

PRIORITY_MAX = 2**63 - 1  # beyond 64 bits a priority cannot be sent to EngineCore, and the request's state would leak
WARM_UP_S = 300.0  # the first logprobs of an engine's life compile for up to 21 s on a CPU
# Between SIGTERM and SIGKILL for the children of an idle engine, so that they unlink their shared memory.
CLOSE_GRACE_S = 5.0
NO_TEMPLATE = "must provide a chat template"  # a base model: it serves plain completions
ABORT_S = 5.0  # calls into a dying engine may hang for ever


class VllmEngine:
    """One AsyncLLM, started once. A new one takes its place after a death: see Supervisor.

    `salt` gives a tenant's prefix-cache salt; it must be secret and never empty (tenancy.md §4).
    """

    def __init__(self, settings: Settings, salt: Callable[[str], str]) -> None:
        self._settings = settings.engine
        self._log_level = logging.getLevelNamesMapping().get(settings.log_level.upper(), logging.INFO)
        self._salt = salt
        self._state = EngineState.STARTING
        self._stats = EngineStats()
        self._readers: dict[str, Reader] = {}  # attempts in the engine
        self._idle = asyncio.Event()
        self._idle.set()
        self._busy_since = 0.0  # monotonic; when the first of the attempts in the engine came to an empty one
        self._lost = False  # an output said so before vLLM noticed
        # PR_SET_PDEATHSIG follows the thread that started a child: this one lives as long as the engine (orphans.py).
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._building: asyncio.Future[None] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._compat: Any = None  # the module, once it is imported
        self._engine: Any = None
        self._renderer: Renderer | None = None

    @property
    def state(self) -> EngineState:
        if self._state is not EngineState.READY:
            return self._state
        if self._lost or self._engine.errored:
            return EngineState.DEAD
        if self._readers:
            last = max(self._stats.last_step, self._busy_since)
            if time.monotonic() - last > self._settings.stall_s:
                return EngineState.STALLED
        return EngineState.READY

    # ------------------------------------------------------------------ start

    async def start(self) -> Capacity:
        loop = asyncio.get_running_loop()
        try:
            self._building = loop.run_in_executor(self._thread, self._build)
            await asyncio.shield(self._building)
            from service.engine.vllm.render import Renderer

            self._renderer = Renderer(self._engine, self._settings)
            async with asyncio.timeout(WARM_UP_S):
                await self._warm_up()
        except Exception as error:
            message = failures.explain(error, self._child_log())
            log.debug("engine start failed", exc_info=True)
            await self.close()
            raise StartFailure(message) from error
        gc.collect()
        gc.freeze()  # what is loaded now stays: a full collection would walk it for nothing (8 % of the front-end)
        self._state = EngineState.READY
        return self._capacity()

    def _build(self) -> None:
        """In the engine's thread: blocks for the whole start.

        Returns nothing: something below keeps this call's frames, and what they return, until the process ends.
        """
        if not Path(self._settings.model).is_dir():
            raise FileNotFoundError(f"model folder {self._settings.model!r} does not exist")
        self._folder = tempfile.TemporaryDirectory(prefix="headrace-engine-")
        folder = Path(self._folder.name)
        config = folder / "logging.json"
        config.write_text(json.dumps(arguments.log_config(folder / "errors.log", self._log_level)))
        forced, defaults = arguments.environment(self._settings, config)
        os.environ.update(forced)
        for name, value in defaults.items():
            os.environ.setdefault(name, value)

        from service.engine.vllm import compat
        from service.engine.vllm.stats import StepRecorder

        self._compat = compat
        flags = arguments.cpu_flags() if compat.is_cpu() else frozenset()
        compat.check_parsers(self._settings.tool_parser, self._settings.reasoning_parser)
        args = compat.engine_args(arguments.arguments(self._settings, compat.is_cpu(), flags))
        stats = self._stats
        self._engine = compat.AsyncLLM.from_engine_args(
            args, stat_loggers=[lambda vllm_config, engine_index=0: StepRecorder(stats)]
        )

    async def _warm_up(self) -> None:
        """One request with logprobs and one with a schema: both compile at their first use, while others would wait."""
        chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "logprobs": True, "top_logprobs": 1}
        plain = {"prompt": "Hi", "max_tokens": 2, "logprobs": 1}
        schema = {
            "prompt": "Hi",
            "max_tokens": 8,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "warm-up", "schema": {"type": "object", "properties": {"a": {"type": "null"}}}},
            },
        }
        assert self._renderer is not None
        for number, (endpoint, body) in enumerate(((CHAT, chat), (COMPLETIONS, plain), (COMPLETIONS, schema))):
            try:
                prepared = await self._renderer.prepare(endpoint, body, "warm-up", 1)
            except Refusal as refused:
                if endpoint == CHAT and NO_TEMPLATE in refused.message:
                    log.warning("the model has no chat template: jobs for %s will be refused", CHAT)
                    continue
                raise
            async for _ in self._generate(prepared, f"warm-up-{number}", 0):
                pass

    def _capacity(self) -> Capacity:
        compat, engine = self._compat, self._engine
        if not compat.HAS_REQUEST_INTERVAL:
            log.warning(
                "vLLM %s has one stream_interval for all jobs: %d", compat.VERSION, self._settings.stream_interval
            )
        return Capacity(
            max_model_len=int(engine.model_config.max_model_len),
            max_num_seqs=int(engine.vllm_config.scheduler_config.max_num_seqs),
            kv_tokens=compat.kv_tokens(engine),
            block_size=int(engine.vllm_config.cache_config.block_size),
            model=self._settings.served_name,
            version=f"vllm {compat.VERSION} {compat.device()}",
        )

    @property
    def async_llm(self) -> Any:
        """vLLM's own engine, for benchmarks that run it bare; None before the start and after the end."""
        return self._engine

    # ------------------------------------------------------------------ jobs

    async def prepare(self, job: Job) -> Prepared:
        if self._renderer is None:
            raise EngineLost(f"the engine is {self._state}")
        every = pace.interval(job, self._settings.stream_interval)
        return await self._renderer.prepare(job.head.endpoint, job.body, self._salt(job.tenant), every)

    def run(self, job: Job, prepared: Prepared, attempt: str, priority: int) -> AsyncIterator[Output]:
        if self.state is not EngineState.READY:
            return _away(f"the engine is {self.state}")
        return self._generate(prepared, attempt, priority)

    async def _generate(self, prepared: Prepared, attempt: str, priority: int) -> AsyncIterator[Output]:
        rendered = prepared.request
        reader = Reader(rendered, prepared.prompt_tokens, prepared.n)
        # Set at submission: a job may have waited in the scheduler since it was rendered, and ties go by arrival.
        rendered.input["arrival_time"] = time.time()
        if not self._readers:
            self._busy_since = time.monotonic()
            self._idle.clear()
        self._readers[attempt] = reader
        read = reader.read
        ended = False
        try:
            outputs = cast(
                AsyncGenerator[Any, None],
                self._engine.generate(
                    rendered.input,
                    rendered.params,
                    attempt,
                    priority=max(-PRIORITY_MAX, min(priority, PRIORITY_MAX)),
                    **rendered.extra,
                ),
            )
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    deltas = read(output)
                    if deltas:
                        yield deltas
            ended = True
        except (EngineFault, Refusal):
            raise
        except EngineLost:
            self._lost = True
            raise
        except Exception as error:
            raise self._translated(error, rendered.asked) from error
        finally:
            del self._readers[attempt]
            if not self._readers:
                self._idle.set()
            if not ended:
                await self._abort(attempt)
        yield reader.finished()

    def _translated(self, error: Exception, body: dict[str, Any]) -> Exception:
        """vLLM's errors → the protocol's."""
        compat = self._compat
        if self._engine is None or isinstance(error, compat.EngineDeadError) or self._engine.errored:
            return EngineLost("the engine died")
        cause = error.__cause__ if isinstance(error, compat.EngineGenerateError) else error
        if isinstance(cause, compat.OVERLOADED):
            return Overloaded("the engine's own queue is full")
        if isinstance(cause, compat.REQUEST_FAULTS):
            return EngineFault(f"the engine failed this request: {type(cause).__name__}")
        # What cannot be sent to EngineCore (a number beyond 64 bits) is the request's fault as much as what is refused.
        if isinstance(cause, (*compat.CLIENT_ERRORS, ValueError, TypeError, OverflowError)):
            return refusal(cast(Exception, cause), body)
        log.error("the engine failed a request", exc_info=error)
        return EngineFault(f"the engine failed this request: {type(cause or error).__name__}")

    async def cancel(self, attempt: str) -> None:
        reader = self._readers.get(attempt)
        if reader is not None:
            reader.cancelled = True
            await self._abort(attempt)

    async def _abort(self, attempt: str) -> None:
        """Frees the slot, and what a request leaves behind that broke off while it was being added. Idempotent."""
        engine = self._engine
        if engine is None or self._lost or engine.errored:
            return
        with contextlib.suppress(Exception):
            async with asyncio.timeout(ABORT_S):
                await engine.abort(attempt)

    def stats(self) -> EngineStats:
        return self._stats

    # ------------------------------------------------------------------ end

    async def close(self, drain_s: float = 0.0) -> None:
        healthy = self.state is EngineState.READY
        if healthy and drain_s > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(drain_s):
                    await self._idle.wait()
        self._state = EngineState.CLOSED
        await self._stop_building()
        engine, self._engine = self._engine, None
        renderer, self._renderer = self._renderer, None
        if renderer is not None:
            renderer.close()
        if engine is not None:
            # vLLM leaves the callers of a closed engine waiting for ever: they are told before their engine goes.
            engine.output_processor.propagate_error(self._compat.EngineDeadError())
            grace = CLOSE_GRACE_S if healthy else 0.0
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._thread, engine.shutdown, grace)
            await loop.run_in_executor(self._thread, self._compat.kill_children)  # reaps what was killed
        self._thread.shutdown(wait=False)
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.cleanup()
        del engine, renderer
        gc.unfreeze()
        gc.collect()  # vLLM's objects are one large cycle: tens of MiB for each rebuild

    async def _stop_building(self) -> None:
        """A start that is under way fails when its processes die; imports cannot be stopped, only waited for."""
        building = self._building
        while building is not None and not building.done():
            if self._compat is not None:
                await asyncio.to_thread(self._compat.kill_children)
            await asyncio.wait({building}, timeout=0.5)

    def _child_log(self) -> str:
        if self._folder is None:
            return ""
        try:
            text = (Path(self._folder.name) / "errors.log").read_text(errors="replace")
        except OSError:
            return ""
        return text[-failures.LOG_TAIL :]


async def _away(reason: str) -> AsyncIterator[Output]:
    raise EngineAway(reason)
    yield []  # makes this an async generator
