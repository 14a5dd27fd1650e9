"""What the engine may hold at once: sequences, and tokens of its KV cache. Pure arithmetic.

Each admitted job claims what it is expected to need in the end: its prompt and `n` times its expected output, in whole
blocks. A part of slots and KV is the reserve: only who gets a lift may use it (tenancy.md §3).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from service.engine.protocol import Capacity, Prepared
from service.scheduler.fair_queue import Flow


@dataclass(slots=True)
class Claim:
    """What one admitted job holds. Tokens of KV cache."""

    sequences: int
    tokens: int  # at its end
    fresh: int  # of them what it does not share with the prefix cache, as expected
    output: int  # of them output, all choices together
    growth: int = 0  # of `fresh` what is not in the cache yet, as last measured


class Admission:
    """Counts what is admitted against the engine's capacity.

    Kept in reserve: `reserved` sequences, and the share `reserve` of the KV cache.
    """

    def __init__(self, capacity: Capacity, reserved: int = 0, reserve: float = 0.0) -> None:
        self._block = capacity.block_size
        self._kv = capacity.kv_tokens
        self.reserved = min(reserved, capacity.max_num_seqs - 1)
        self.most_sequences = capacity.max_num_seqs - self.reserved
        self.most_tokens = max(1, int(capacity.kv_tokens * (1.0 - reserve)))
        self.sequences = 0
        self.tokens = 0
        self.jobs = 0
        self._live: float | None = None  # tokens in use, as last measured
        self._growth = 0  # what the admitted jobs will add to that

    @property
    def reserve_left(self) -> bool:
        return self.sequences < self.most_sequences + self.reserved

    def claim(self, prepared: Prepared, expected_output: int, cached: float = 0.0) -> Claim:
        """`expected_output`: tokens of one choice; `cached`: share of the prompt that is likely to be cached."""
        output = prepared.n * self._blocks(min(prepared.max_tokens, expected_output))
        tokens = self._blocks(prepared.prompt_tokens) + output
        return Claim(prepared.n, tokens, tokens - int(prepared.prompt_tokens * cached), output)

    def fits(self, claim: Claim, lift: float = 0.0) -> bool:
        """`lift`: share of the reserve that the job may use. An empty engine takes any job: the largest one runs too.

        Prompts that running jobs share are claimed several times and stored once, so what is in use decides where the
        claims are too many.
        """
        if self.jobs == 0:
            return True
        if self.sequences + claim.sequences > self.most_sequences + int(self.reserved * lift):
            return False
        most = self.most_tokens + int((self._kv - self.most_tokens) * lift)
        if self.tokens + claim.tokens <= most:
            return True
        return self._live is not None and self._live + self._growth + claim.fresh <= most

    def below(self, share: float, flow: Flow[Any], claim: Claim) -> bool:
        """Whether a tenant stays within its share with this job. One that has nothing in the engine is below it."""
        if not flow.jobs:
            return True
        sequences, tokens = flow.sequences + claim.sequences, flow.tokens + claim.tokens
        return sequences <= share * self.most_sequences and tokens <= share * self.most_tokens

    def admit(self, claim: Claim) -> None:
        self.jobs += 1
        self.sequences += claim.sequences
        self.tokens += claim.tokens
        claim.growth = claim.fresh
        self._growth += claim.growth

    def release(self, claim: Claim) -> None:
        self.jobs -= 1
        self.sequences -= claim.sequences
        self.tokens -= claim.tokens
        self._growth -= claim.growth

    def grow(self, claim: Claim, output: int) -> int:
        """The job produces more than was expected: room for `output` tokens in all. Returns what that adds."""
        more = max(0, self._blocks(output) - claim.output)
        claim.output += more
        claim.tokens += more
        claim.fresh += more
        claim.growth += more
        self.tokens += more
        self._growth += more
        return more

    def produced(self, claim: Claim, tokens: int) -> None:
        """The job's prompt and so many tokens of output are in the cache."""
        growth = max(0, claim.output - tokens)
        self._growth += growth - claim.growth
        claim.growth = growth

    def measure(self, kv_usage: float) -> None:
        """`kv_usage`: share of the cache that is in use, 0 to 1; call it when every `produced` has been said."""
        self._live = kv_usage * self._kv if kv_usage > 0 else None  # nothing is said: claims decide

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._block) * self._block
