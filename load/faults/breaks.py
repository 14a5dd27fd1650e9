"""The faults: what is broken, when, and for how long. Each mends what it broke and says whom it hit.

Owns no processes (the arena does) and no numbers (judgement.py). All chance comes from the round's seed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

import psutil

from load.arena import BROKER, OBJECTS, Arena

# Seconds. Frozen: mostly longer than a session (10 s), after which the partitions belong to others.
FROZEN = (7.0, 20.0)
AWAY = (5.0, 25.0)
REPLACED_AFTER = (0.0, 4.0)
STORM_JOINERS = 2
STORM_STAYS = (0.5, 4.0)
# A delivery process takes a moment to be there after its worker, or after the one before it.
DELIVERY_WAIT_S = 10.0
# What a killed process had handed to the kernel, or to its delivery process, may still reach the log.
ECHO_S = 1.0


class Log(Protocol):
    def __call__(self, line: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Hit:
    """Whose running jobs were interrupted: of `worker` (None: of all), in flight at any time in [since, until]."""

    fault: str
    since: float
    until: float
    worker: str | None


@dataclass(slots=True)
class Scene:
    """What a fault works with."""

    arena: Arena
    chance: random.Random
    say: Log
    lethal: Callable[[], Awaitable[None]]  # publishes a job of which the simulated engine dies
    frozen: tuple[float, float] = FROZEN
    away: tuple[float, float] = AWAY
    hits: list[Hit] = field(default_factory=list)
    rebuilt_s: list[float] = field(default_factory=list)  # engine cores: from kill to rebuilt
    _engaged: set[str] = field(default_factory=set)
    _free: asyncio.Condition = field(default_factory=asyncio.Condition)
    _names: int = 0

    @asynccontextmanager
    async def victim(self) -> AsyncIterator[str]:
        """A worker that no other fault of this round is at work on."""
        async with self._free:
            await self._free.wait_for(lambda: bool(self._idle()))
            name = self.chance.choice(self._idle())
            self._engaged.add(name)
        try:
            yield name
        finally:
            async with self._free:
                self._engaged.discard(name)
                self._free.notify_all()

    def _idle(self) -> list[str]:
        return sorted(set(self.arena.workers) - self._engaged)

    def hit(self, fault: str, since: float, until: float, worker: str | None) -> None:
        self.hits.append(Hit(fault, since, until, worker))

    def fresh(self, base: str) -> str:
        self._names += 1
        return f"{base}-{time.time_ns() // 1_000_000 % 100_000_000}{self._names}"


Fault = Callable[[Scene], Awaitable[None]]


async def kill_worker(scene: Scene) -> None:
    async with scene.victim() as name:
        since = time.time()
        await scene.arena.kill(name)
        scene.hit("kill-worker", since, since + ECHO_S, name)
        scene.say(f"killed worker {name}")
        await asyncio.sleep(scene.chance.uniform(*REPLACED_AFTER))
        # Half of them come back under their old name, as under a supervisor; their lock may still be held.
        await scene.arena.start(name if scene.chance.random() < 0.5 else scene.fresh(name[:2]))


async def kill_delivery(scene: Scene) -> None:
    async with scene.victim() as name:
        process = await _delivery(scene, name)
        since = time.time()
        process.kill()
        scene.hit("kill-delivery", since, since + ECHO_S, name)
        scene.say(f"killed the delivery process of {name}")


async def freeze_worker(scene: Scene) -> None:
    await _freeze(scene, "freeze-worker", worker=True, delivery=False)


async def freeze_delivery(scene: Scene) -> None:
    await _freeze(scene, "freeze-delivery", worker=False, delivery=True)


async def freeze_both(scene: Scene) -> None:
    """As a machine that is suspended, or out of memory for a while."""
    await _freeze(scene, "freeze-both", worker=True, delivery=True)


async def _freeze(scene: Scene, fault: str, *, worker: bool, delivery: bool) -> None:
    async with scene.victim() as name:
        pids = [scene.arena.workers[name].process.pid] if worker else []
        if delivery:
            pids.append((await _delivery(scene, name)).pid)
        seconds = scene.chance.uniform(*scene.frozen)
        since = time.time()
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        scene.say(f"froze {name} ({fault}) for {seconds:.1f} s")
        try:
            await asyncio.sleep(seconds)
        finally:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):  # a frozen delivery process is killed by its worker
                    os.kill(pid, signal.SIGCONT)
        scene.hit(fault, since, time.time() + ECHO_S if worker else since + ECHO_S, name)


async def storm(scene: Scene) -> None:
    """Workers join and leave again and again, at about the same time."""

    async def visit(number: int) -> None:
        name = scene.fresh(f"visitor{number}")
        await asyncio.sleep(scene.chance.uniform(0.0, 1.0))
        await scene.arena.start(name)
        await asyncio.sleep(scene.chance.uniform(*STORM_STAYS))
        since = time.time()
        code = await scene.arena.leave(name)
        scene.hit("rebalance-storm", since, time.time(), name)
        if code != 0:
            raise AssertionError(f"a worker that was asked to leave ended with {code}")

    async def again() -> None:
        """A worker of the house leaves and comes back."""
        async with scene.victim() as name:
            since = time.time()
            code = await scene.arena.leave(name)
            scene.hit("rebalance-storm", since, time.time(), name)
            await scene.arena.start(name)
            if code != 0:
                raise AssertionError(f"a worker that was asked to leave ended with {code}")

    scene.say(f"rebalance storm: {STORM_JOINERS} join and leave, one leaves and joins")
    await asyncio.gather(again(), *(visit(number) for number in range(STORM_JOINERS)))


async def stop_broker(scene: Scene) -> None:
    await _broker(scene, "stop-broker", signal.SIGTERM)


async def kill_broker(scene: Scene) -> None:
    await _broker(scene, "kill-broker", signal.SIGKILL)


async def _broker(scene: Scene, fault: str, number: signal.Signals) -> None:
    seconds = scene.chance.uniform(*scene.away)
    since = time.time()
    await scene.arena.end_part(BROKER, number)
    scene.say(f"broker ended by {number.name}, away for {seconds:.1f} s")
    await asyncio.sleep(seconds)
    await scene.arena.begin_part(BROKER)
    scene.hit(fault, since, time.time() + ECHO_S, None)
    scene.say(f"broker back after {time.time() - since:.1f} s")


async def freeze_broker(scene: Scene) -> None:
    """Connections stay open, and nothing is answered: a commit or a batch that is on its way hangs."""
    seconds = scene.chance.uniform(*scene.away)
    since = time.time()
    scene.arena.signal_part(BROKER, signal.SIGSTOP)
    scene.say(f"broker frozen for {seconds:.1f} s")
    try:
        await asyncio.sleep(seconds)
    finally:
        scene.arena.signal_part(BROKER, signal.SIGCONT)
    scene.hit("freeze-broker", since, time.time() + ECHO_S, None)


async def store_away(scene: Scene) -> None:
    """Half of the times it is gone, half of the times it only does not answer."""
    await (kill_store if scene.chance.random() < 0.5 else freeze_store)(scene)


async def kill_store(scene: Scene) -> None:
    """No running job is interrupted by it, nor by the next two."""
    seconds = scene.chance.uniform(*scene.away)
    await scene.arena.end_part(OBJECTS, signal.SIGKILL)
    scene.say(f"store killed, away for {seconds:.1f} s")
    await asyncio.sleep(seconds)
    await scene.arena.begin_part(OBJECTS)


async def freeze_store(scene: Scene) -> None:
    seconds = scene.chance.uniform(*scene.away)
    scene.arena.signal_part(OBJECTS, signal.SIGSTOP)
    scene.say(f"store frozen for {seconds:.1f} s")
    try:
        await asyncio.sleep(seconds)
    finally:
        scene.arena.signal_part(OBJECTS, signal.SIGCONT)


async def fill_store(scene: Scene) -> None:
    """Its disk is full: it answers, and takes nothing. The kernel lets none of its files grow."""
    seconds = scene.chance.uniform(*scene.away)
    process = scene.arena.part(OBJECTS)
    assert process is not None
    before = process.rlimit(psutil.RLIMIT_FSIZE)
    process.rlimit(psutil.RLIMIT_FSIZE, (1, before[1]))
    scene.say(f"store's disk full for {seconds:.1f} s")
    try:
        await asyncio.sleep(seconds)
    finally:
        process.rlimit(psutil.RLIMIT_FSIZE, before)


async def lose_engine(scene: Scene) -> None:
    """The simulated engine dies of a job; whom that hits is read from the log."""
    scene.say("a job of which the engine dies")
    await scene.lethal()


async def kill_core(scene: Scene) -> None:
    """kill -9 of the real engine's core process."""
    async with scene.victim() as name:
        core = scene.arena.core(name)
        if core is None:
            raise AssertionError(f"worker {name} has no engine core")
        log = scene.arena.workers[name].log
        told = log.read_text(errors="replace").count("engine rebuilt")
        since, began = time.time(), time.monotonic()
        core.kill()
        scene.hit("kill-core", since, since + ECHO_S, name)
        scene.say(f"killed the engine core of {name}")
        while log.read_text(errors="replace").count("engine rebuilt") == told:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        scene.rebuilt_s.append(time.monotonic() - began)
        scene.say(f"engine of {name} rebuilt after {scene.rebuilt_s[-1]:.1f} s")


async def _delivery(scene: Scene, name: str) -> psutil.Process:
    deadline = time.monotonic() + DELIVERY_WAIT_S
    while (process := scene.arena.delivery(name)) is None:
        if time.monotonic() > deadline:
            raise AssertionError(f"worker {name} has no delivery process")
        await asyncio.sleep(0.05)
    return process


COMMON: dict[str, Fault] = {
    "kill-worker": kill_worker,
    "kill-delivery": kill_delivery,
    "freeze-worker": freeze_worker,
    "freeze-delivery": freeze_delivery,
    "freeze-both": freeze_both,
    "rebalance-storm": storm,
    "stop-broker": stop_broker,
    "kill-broker": kill_broker,
    "store-away": store_away,
}
# What either engine can be made to suffer beside these.
FAULTS: dict[str, dict[str, Fault]] = {
    "simulated": {**COMMON, "lose-engine": lose_engine},
    "vllm": {"kill-core": kill_core, **COMMON},  # what only the real engine has comes first
}
# Two of these at a time would only wait for each other.
SOLITARY = (frozenset({"stop-broker", "kill-broker"}),)
