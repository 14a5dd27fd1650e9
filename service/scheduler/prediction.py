"""What a job will cost, guessed from what its tenant's jobs have cost so far (tenancy.md §3). Pure arithmetic."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass, field

from service.frames import Usage

# Expected output of a tenant of which nothing has ended yet, tokens.
FIRST_GUESS = 256
# Ended jobs a tenant's prediction looks back on.
MEMORY = 64


@dataclass(frozen=True, slots=True)
class Price:
    """Cost tokens of a token: one of an uncached prompt, one of the output."""

    prompt: float = 1.0
    output: float = 8.0

    def cost(self, prompt: float, output: float) -> float:
        return self.prompt * prompt + self.output * output

    def of(self, usage: Usage) -> float:
        """What was used in the end."""
        return self.cost(max(0, usage.prompt - usage.cached), usage.completion)


@dataclass(slots=True)
class Prediction:
    """One tenant's."""

    outputs: deque[int] = field(default_factory=deque)
    ranked: list[int] = field(default_factory=list)  # the same, by size
    characters_per_token: float = 4.0
    cached: float = 0.0  # share of a prompt that the prefix cache holds

    def expected_output(self) -> int:
        """The 75th percentile of the last outputs, tokens of one choice."""
        ranked = self.ranked
        if not ranked:
            return FIRST_GUESS
        return ranked[(len(ranked) * 3) // 4 if len(ranked) > 1 else 0]

    def expected_prompt(self, size: int) -> int:
        """`size`: bytes of the job."""
        return max(1, int(size / self.characters_per_token))

    def learn_prompt(self, size: int, tokens: int) -> None:
        """Exponentially weighted, 1/8 for the newest."""
        if tokens > 0:
            ratio = min(32.0, max(0.5, size / tokens))
            self.characters_per_token += (ratio - self.characters_per_token) / 8

    def learn_output(self, tokens: int) -> None:
        outputs, ranked = self.outputs, self.ranked
        if len(outputs) == MEMORY:
            del ranked[bisect_left(ranked, outputs.popleft())]
        outputs.append(tokens)
        insort(ranked, tokens)

    def learn_cached(self, usage: Usage) -> None:
        """Exponentially weighted, 1/8 for the newest."""
        if usage.prompt > 0:
            self.cached += (min(1.0, usage.cached / usage.prompt) - self.cached) / 8
