"""Who gets how much of the engine when all want more: tenants of different weights and shapes, each with a backlog.

A share is counted in cost tokens, as the scheduler charges them: prompt tokens that were computed, and eight times the
output tokens. The first job's time is left out. One more tenant, of hardly any weight, only runs because nobody waits
for longer than the bound for a turn; it is left out of the index.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from load.arena import ArenaFailed
from load.fairness.client import Client
from load.fairness.measures import Share, fairness, turn_wait
from load.fairness.plan import RARE, Sizes, Writer, backlog
from load.fairness.stage import Place, Stage
from service.settings import SchedulerSettings

Say = Callable[[str], None]

# The window is at least so many times a job's time in the engine.
JOBS_LONG = 20
# The first end of every tenant must come within this, seconds.
FIRST_S = 60.0
RARE_JOBS = 100
POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Shares:
    seconds: float
    job_s: float  # a job's time in the engine, on average
    of: dict[str, Share]
    running: float
    waits_s: dict[str, float]  # of each tenant, the longest for a turn
    left: int  # jobs of the shortest backlog when the window ended

    @property
    def jain(self) -> float:
        return fairness(self.of)

    @property
    def max_wait_s(self) -> float:
        return max(self.waits_s.values())

    def line(self) -> dict[str, Any]:
        most = max(share.weighted for share in self.of.values()) or 1.0
        return {
            "kind": "shares",
            "seconds": round(self.seconds, 1),
            "job_s": round(self.job_s, 2),
            "engine_running": round(self.running, 1),
            "max_wait_s": round(self.max_wait_s, 2),
            "max_wait_rare_s": round(self.waits_s[RARE], 2),
            "tenants": {
                name: {
                    "weight": share.weight,
                    "cost_tokens": round(share.cost),
                    "output_tokens": share.output,
                    "weighted": round(share.weighted / most, 3),
                }
                for name, share in self.of.items()
            },
        }


async def measure(stage: Stage, client: Client, sizes: Sizes, names: Sequence[str], say: Say) -> Shares:
    """Raises ArenaFailed if a backlog did not last."""
    async with stage.place("shares") as place:
        client.forget()
        writer = Writer("shares", stage.model)
        count = {name: round(sizes.shares_jobs * weight) for name, (weight, _) in zip(names, sizes.shares, strict=True)}
        shapes = {name: shape for name, (_, shape) in zip(names, sizes.shares, strict=True)}
        for name, shape in ({RARE: sizes.rare} | shapes).items():
            values = backlog(writer, name, shape, count.get(name, RARE_JOBS), seed=1)
            await client.publish_all(place.pool, writer, name, values)
        return await _window(place, client, sizes, names, count, say)


async def _window(
    place: Place, client: Client, sizes: Sizes, names: Sequence[str], count: dict[str, int], say: Say
) -> Shares:
    since = await _all_began(client, names)
    until = since + sizes.shares_s
    await asyncio.sleep(until - time.monotonic())
    running = place.gauges.mean("engine_running", since, until)
    job_s = _job_s(client, running, since, until)
    if (more := JOBS_LONG * job_s - sizes.shares_s) > 0:
        await asyncio.sleep(more)
        until += more
    client.raise_problem()
    over = time.time() - 2 * job_s  # those that began later have not ended
    ends = [end for end in client.ends if end.kind == "completed"]
    price = SchedulerSettings()
    of: dict[str, Share] = {}
    left = []
    for name, (weight, _) in zip(names, sizes.shares, strict=True):
        own = [end for end in ends if end.tenant == name]
        counted = [end for end in own if since <= end.at < until]
        cost = sum(price.prompt_cost * (e.prompt - e.cached) + price.output_cost * e.completion for e in counted)
        of[name] = Share(weight, cost, sum(e.completion for e in counted))
        left.append(count[name] - len(own))
    counted = [end for end in ends if since <= end.at < until]
    turns: dict[str, list[tuple[float, float]]] = {name: [] for name in (*names, RARE)}
    for end in ends:
        if end.admitted is not None:
            turns[end.tenant].append((end.received, end.admitted))
    shares = Shares(
        seconds=until - since,
        job_s=job_s,
        of=of,
        running=running,
        waits_s={name: turn_wait(turns[name], over) for name in (*names, RARE)},
        left=min(left),
    )
    if shares.left < sizes.slots // len(names):
        raise ArenaFailed("a tenant's backlog came to its end within the window of the shares")
    rate = len(counted) / shares.seconds
    say(f"  shares   {running:6.1f} running, {rate:.1f} jobs/s, Jain {shares.jain:.4f}, wait {shares.max_wait_s:.2f} s")
    return shares


def _job_s(client: Client, running: float, since: float, until: float) -> float:
    """A job's time in the engine, by Little's law."""
    ended = sum(since <= end.at < until for end in client.ends)
    return running * (until - since) / max(1, ended)


async def _all_began(client: Client, names: Sequence[str]) -> float:
    """When every tenant's first job had ended."""
    deadline = time.monotonic() + FIRST_S
    while {end.tenant for end in client.ends} < set(names):
        client.raise_problem()
        if time.monotonic() > deadline:
            raise ArenaFailed(f"not every tenant had a job ended within {FIRST_S:.0f} s")
        await asyncio.sleep(POLL_S)
    return time.monotonic()
