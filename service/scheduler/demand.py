"""What the scheduler reads of a job's body: how many answers, how long at most, and how the prompt begins. Pure."""

from __future__ import annotations

from typing import Any, NamedTuple

from service.job import Job

# Prompts are alike that have so many first characters in common, or a quarter as many tokens: four KV blocks of 16.
ALIKE = 256


class Demand(NamedTuple):
    """`most`: output of one choice at most, tokens; None = the body does not say."""

    choices: int = 1
    most: int | None = None

    @classmethod
    def of(cls, job: Job) -> Demand:
        body = job.body
        n = body.get("n", 1)
        most = body.get("max_completion_tokens", body.get("max_tokens"))
        return cls(n if type(n) is int and n > 0 else 1, most if type(most) is int and most > 0 else None)

    def output(self, expected: int) -> int:
        """Expected output of all choices together, if that of one is `expected`."""
        return self.choices * (expected if self.most is None or expected < self.most else self.most)


def likeness(job: Job) -> int:
    """The same for jobs whose prompts begin alike; 0 = too short for the prefix cache to matter."""
    prompt = job.body.get("prompt")
    if isinstance(prompt, list):
        few = ALIKE // 4
        return hash(tuple(prompt[:few])) if len(prompt) >= few else 0
    text = prompt if isinstance(prompt, str) else _chat(job.body.get("messages"))
    return hash(text[:ALIKE]) if len(text) >= ALIKE else 0


def _chat(messages: Any) -> str:
    """The first two messages as far as they are text: a system prompt, and how the user begins."""
    if not isinstance(messages, list):
        return ""
    contents = [message.get("content") for message in messages[:2]]
    return "\n".join(content for content in contents if isinstance(content, str))
