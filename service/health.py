"""The worker's HTTP side: /livez, /readyz, /metrics, /schema. Owns the server and its verdicts; decides nothing else.

It runs in a thread with a loop of its own, so that it still answers, and says why, when the worker's loop is stuck, and
so that a scrape (milliseconds of text) never delays a token. What it needs from the worker it asks *on the worker's
loop*, with a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import orjson
import uvicorn
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from schemas import export
from service.settings import Settings
from service.telemetry.metrics import Metrics, Readings
from service.topics import REMEDY

T = TypeVar("T")

log = logging.getLogger(__name__)

TICK_S = 0.1  # the loop's heart-beat; its lateness is the loop's lag
LOOP_STUCK_S = (
    20.0  # longer than any pause that heals by itself (an import, a collection), shorter than a human's patience
)
ASK_S = 1.0  # how long a request waits for the worker's loop; probes usually give up after 1-2 s
# A consumer that has not asked for records for so long is stuck; it asks several times a second, paused or not.
READ_STUCK_S = 30.0
# Holds of a worker that could run nothing of what it reads; the others are told by checks of their own.
OUTAGES = frozenset({"memory", "store"})
# The engine's supervisor acts on a hang after `stall_s`; the probe, which kills the whole worker, only after this × it.
STALL_PATIENCE = 1.5


@dataclass(frozen=True, slots=True)
class Condition:
    """What the worker says of its parts, for the two verdicts."""

    engine: str  # EngineState's value
    running: int  # requests in the engine
    last_step: float  # monotonic time of the engine's last step; 0 = none yet
    joined: bool  # a member of the group, with an assignment (which may be empty: more workers than partitions)
    partitions: int
    delivery: bool  # the delivery process is up and answers
    draining: bool
    polled: float = 0.0  # monotonic time at which records were last asked for; 0 = not yet
    held: frozenset[str] = frozenset()  # why nothing new is started
    paused: frozenset[str] = frozenset()  # why nothing is read
    missing: frozenset[str] = frozenset()  # topics of the pool that are not there


class Vitals(Protocol):
    """The worker, as seen from here. Called on the worker's event loop; must return at once."""

    def condition(self) -> Condition: ...

    def readings(self) -> Readings: ...


class HealthServer:
    """`await start()` → port; `await stop(deadline_s)`. Both are called on the worker's loop."""

    def __init__(self, settings: Settings, vitals: Vitals, metrics: Metrics) -> None:
        self._host, self._wanted_port = settings.http_host, settings.http_port
        self._worker, self._stall_s = settings.worker, settings.engine.stall_s * STALL_PATIENCE
        self._pool, self._bootstrap = settings.pool, settings.kafka.bootstrap
        self._documents: tuple[dict[str, Any], dict[str, Any]] | None = None
        self._vitals = vitals
        self._metrics = metrics
        self._ticked = 0.0  # monotonic
        self._ticking: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None
        self.port = 0  # the real one, once started

    @property
    def url(self) -> str:
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self.port}"

    async def start(self) -> int:
        """Listens. Raises OSError if the address cannot be bound."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        listener = socket.create_server((self._host, self._wanted_port), family=family)
        self.port = int(listener.getsockname()[1])
        self._loop = asyncio.get_running_loop()
        self._ticked = time.monotonic()
        self._ticking = asyncio.create_task(self._tick(), name="health-tick")
        config = uvicorn.Config(
            self._app(), log_config=None, access_log=False, lifespan="off", loop="asyncio", timeout_graceful_shutdown=1
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=asyncio.run, args=(self._server.serve(sockets=[listener]),), name="health", daemon=True
        )
        self._thread.start()
        return self.port

    async def stop(self, deadline_s: float = 2.0) -> None:
        """Stops listening; what does not end in time is left to the end of the process (the thread is a daemon)."""
        if self._ticking is not None:
            self._ticking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticking
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            await asyncio.to_thread(self._thread.join, deadline_s)

    async def _tick(self) -> None:
        """On the worker's loop: proves that it turns, and measures how late."""
        while True:
            due = time.monotonic() + TICK_S
            await asyncio.sleep(TICK_S)
            self._ticked = time.monotonic()
            self._metrics.loop_lag(max(0.0, self._ticked - due))

    async def _ask(self, question: Callable[[], T]) -> T | None:
        """The worker's answer, from its own loop; None if that does not turn, or the question failed."""
        loop = self._loop
        if loop is None or loop.is_closed():
            return None

        async def answer() -> T:
            return question()

        asked = asyncio.run_coroutine_threadsafe(answer(), loop)
        try:
            async with asyncio.timeout(ASK_S):
                return await asyncio.wrap_future(asked)
        except (TimeoutError, asyncio.CancelledError):
            return None
        except Exception:  # a probe that raises would have the worker killed for a fault of its own reporting
            log.exception("the worker could not say how it is")
            return None

    # -- pages

    def _app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/livez", self._livez),
                Route("/readyz", self._readyz),
                Route("/metrics", self._scrape),
                Route("/schema", self._schemas),
                Route("/schema/asyncapi", self._asyncapi),
                Route("/schema/{name}", self._schemas),
            ]
        )

    async def _livez(self, request: Request) -> Response:
        """503 only for what a restart heals: a loop that is stuck, an engine that runs without a step."""
        silent = time.monotonic() - self._ticked
        if silent > LOOP_STUCK_S:
            return _json({"live": False, "reason": f"the event loop has not turned for {silent:.0f} s"}, 503)
        condition = await self._ask(self._vitals.condition)
        reason = None if condition is None else stalled(condition, time.monotonic(), self._stall_s)
        return _json({"live": reason is None, "reason": reason}, 503 if reason else 200)

    async def _readyz(self, request: Request) -> Response:
        """200 only if a job that arrives now would be run."""
        condition = await self._ask(self._vitals.condition)
        checks = readiness(condition, time.monotonic())
        ready = all(found is None for found in checks.values())
        body = {
            "ready": ready,
            "worker": self._worker,
            "partitions": condition.partitions if condition else 0,
            "paused": sorted(condition.paused) if condition else [],
            "checks": {name: found or "ok" for name, found in checks.items()},
        }
        return _json(body, 200 if ready else 503)

    async def _scrape(self, request: Request) -> Response:
        readings = await self._ask(self._vitals.readings)
        return Response(self._metrics.render(readings), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    async def _schemas(self, request: Request) -> Response:
        """All JSON Schemas by name, or the one that is asked for."""
        name = request.path_params.get("name")
        schemas = self._contract()[0]
        if name is None:
            return _json(schemas)
        if name not in schemas:
            return _json({"error": f"no schema of this name; there are: {', '.join(schemas)}"}, 404)
        return _json(schemas[name])

    async def _asyncapi(self, request: Request) -> Response:
        return _json(self._contract()[1])

    def _contract(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """(JSON Schemas, AsyncAPI document): made once, when first asked for; it takes a while."""
        if self._documents is None:
            self._documents = export.json_schemas(), export.asyncapi(self._pool, self._bootstrap)
        return self._documents


def stalled(condition: Condition, now: float, patience_s: float) -> str | None:
    """Why the engine counts as hanging; None while it does not. An engine that is being rebuilt is not hanging."""
    if condition.engine not in ("ready", "stalled") or condition.running <= 0 or condition.last_step <= 0:
        return None
    silent = now - condition.last_step
    if silent <= patience_s:
        return None
    return f"{condition.running} requests run and the engine has made no step for {silent:.0f} s"


def readiness(condition: Condition | None, now: float) -> dict[str, str | None]:
    """Each check: None if it holds, else what is wrong."""
    if condition is None:
        return {"worker": f"the worker did not answer within {ASK_S:g} s"}
    unread = now - condition.polled if condition.joined and condition.polled else 0.0
    outages = sorted(condition.held & OUTAGES)
    return {
        "worker": None,
        "engine": None if condition.engine == "ready" else f"the engine is {condition.engine}",
        "group": None if condition.joined else "no assignment from the consumer group yet",
        "reading": f"no records were asked for in {unread:.0f} s" if unread > READ_STUCK_S else None,
        "topics": f"missing: {', '.join(sorted(condition.missing))}; {REMEDY}" if condition.missing else None,
        "admission": f"nothing new is started: {', '.join(outages)}" if outages else None,
        "delivery": None if condition.delivery else "the delivery process is not up",
        "draining": "the worker is draining" if condition.draining else None,
    }


def _json(body: object, status: int = 200) -> Response:
    return Response(orjson.dumps(body), status_code=status, media_type="application/json")
