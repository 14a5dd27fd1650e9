"""The jobs of one round: short and long, streamed and not, stored and inline, several choices, some published twice.

Pure: the same seed gives the same jobs.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import orjson

from load.scenario import WORDS
from schemas.names import CHAT, COMPLETIONS, REPLIES, SCHEMA_VERSION

TENANTS = ("acme", "globex", "initech")
TIERS = ("interactive", "standard", "bulk")
# Output tokens: most jobs take a second or so of the simulated engine, some long enough to be hit by anything.
TOKENS = (4, 40, 120, 240, 600)
TOKENS_WEIGHTS = (1, 2, 4, 3, 1)
STREAM, STORED, CHAT_SHARE, CHOICES = 0.7, 0.12, 0.5, 0.08
# Published again right away with the same content, as a caller does who is not sure.
TWICE = 0.03


@dataclass(frozen=True, slots=True)
class Planned:
    id: str
    at_s: float  # after the round's begin
    tenant: str
    tier: str
    value: bytes
    stream: bool
    tokens: int  # of the output, all choices together
    twice: bool = False
    lethal: bool = False  # the simulated engine dies of it


def plan(
    run: str,
    chance: random.Random,
    *,
    count: int,
    over_s: float,
    model: str,
    scale: float = 1.0,
    twice: bool = True,
) -> list[Planned]:
    """`count` jobs over `over_s` seconds, in order of time. `scale`: of the output tokens, for a slow engine."""
    moments = sorted(chance.uniform(0.0, over_s) for _ in range(count))
    return [_one(f"{run}-{n}", at, chance, model, scale, twice) for n, at in enumerate(moments)]


def _one(id: str, at_s: float, chance: random.Random, model: str, scale: float, twice: bool) -> Planned:
    tenant = chance.choice(TENANTS)
    tokens = max(1, int(chance.choices(TOKENS, TOKENS_WEIGHTS)[0] * chance.uniform(0.7, 1.3) * scale))
    stream = chance.random() < STREAM
    stored = chance.random() < STORED
    prompt = f"{id} " + " ".join(chance.choices(WORDS, k=chance.randint(5, 80)))
    n = 2 if chance.random() < CHOICES else 1
    more: dict[str, Any] = {"n": n}
    if stored:
        more["output"] = {"store": "always"}
    endpoint = CHAT if chance.random() < CHAT_SHARE else COMPLETIONS
    again = chance.random() < TWICE and twice
    value = job(id, tenant, endpoint, prompt, model, tokens, stream, **more)
    return Planned(id, at_s, tenant, chance.choice(TIERS), value, stream, tokens * n, again)


def lethal(id: str, at_s: float, model: str) -> Planned:
    """A job of which the simulated engine dies after a few tokens, every time."""
    value = job(id, "globex", COMPLETIONS, f"{id} [[sim:lost:20]]", model, 100, True)
    return Planned(id, at_s, "globex", "standard", value, True, 100, lethal=True)


def job(
    id: str,
    tenant: str,
    endpoint: str,
    prompt: str,
    model: str,
    tokens: int,
    stream: bool,
    *,
    n: int = 1,
    output: dict[str, Any] | None = None,
    topic: str = REPLIES,
) -> bytes:
    body: dict[str, Any] = {"model": model, "max_tokens": tokens, "ignore_eos": True, "n": n}
    body["temperature"] = 0 if n == 1 else 0.8  # vLLM makes no two choices of the one greedy answer
    if endpoint == CHAT:
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["prompt"] = prompt
    fields: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "id": id,
        "tenant": tenant,
        "endpoint": endpoint,
        "body": body,
        "reply": {"topic": topic, "stream": stream},
    }
    if output is not None:
        fields["output"] = output
    return orjson.dumps(fields)
