"""What the engine may hold at once: sequences, and tokens of its KV cache. Pure arithmetic.

Each admitted job reserves what it is expected to need in the end: its prompt and `n` times its expected output. The
engine is kept over-full in sequences (its own queue hides the loop's lag; research: about 15 % on a GPU), never in KV.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from service.engine.protocol import Capacity, Prepared

# Expected output of a tenant of which nothing has ended yet, tokens.
FIRST_GUESS = 256
# Ended jobs a tenant's prediction looks back on.
MEMORY = 64


@dataclass(slots=True)
class Claim:
    """What one admitted job holds; `tokens` of KV cache at its end."""

    sequences: int
    tokens: int


class Admission:
    """Counts what is admitted against the engine's capacity."""

    def __init__(self, capacity: Capacity, overfill: float, reserve: float) -> None:
        self._max_sequences = max(1, int(capacity.max_num_seqs * overfill))
        self._max_tokens = max(1, int(capacity.kv_tokens * (1.0 - reserve)))
        self.sequences = 0
        self.tokens = 0
        self.jobs = 0

    def claim(self, prepared: Prepared, expected_output: int) -> Claim:
        output = min(prepared.max_tokens, expected_output)
        return Claim(prepared.n, prepared.prompt_tokens + prepared.n * output)

    def fits(self, claim: Claim) -> bool:
        """An empty engine takes any job, so that the largest one runs at all."""
        if self.jobs == 0:
            return True
        sequences, tokens = self.sequences + claim.sequences, self.tokens + claim.tokens
        return sequences <= self._max_sequences and tokens <= self._max_tokens

    def admit(self, claim: Claim) -> None:
        self.jobs += 1
        self.sequences += claim.sequences
        self.tokens += claim.tokens

    def release(self, claim: Claim) -> None:
        self.jobs -= 1
        self.sequences -= claim.sequences
        self.tokens -= claim.tokens

    def full(self) -> bool:
        """No job whatever would be admitted now."""
        return self.jobs > 0 and (self.sequences >= self._max_sequences or self.tokens >= self._max_tokens)


@dataclass(slots=True)
class Prediction:
    """What a tenant's jobs have cost so far, to guess the next one's cost before it has run."""

    outputs: deque[int] = field(default_factory=lambda: deque(maxlen=MEMORY))
    characters_per_token: float = 4.0

    def expected_output(self) -> int:
        """The 75th percentile of the last outputs, tokens of one choice."""
        if not self.outputs:
            return FIRST_GUESS
        ranked = sorted(self.outputs)
        return ranked[(len(ranked) * 3) // 4 if len(ranked) > 1 else 0]

    def expected_prompt(self, record_bytes: int) -> int:
        return max(1, int(record_bytes / self.characters_per_token))

    def learn_prompt(self, record_bytes: int, tokens: int) -> None:
        """Exponentially weighted, 1/8 for the newest."""
        if tokens > 0:
            ratio = min(32.0, max(0.5, record_bytes / tokens))
            self.characters_per_token += (ratio - self.characters_per_token) / 8

    def learn_output(self, tokens: int) -> None:
        self.outputs.append(tokens)
