"""How many tokens an engine gathers before it hands an output out. Owns this one choice; runs nothing.

Handing out costs about 15 µs of the event loop per output, whatever its size, so only those who watch pay for it.
The first and the last output of a choice always come at once.
"""

from __future__ import annotations

from service.job import Job

BULK = 8  # tokens; nobody watches a bulk job token by token
UNWATCHED = 16  # tokens; only the final response is delivered, a partial one after a cancel is at most so far behind


def interval(job: Job, default: int) -> int:
    """Tokens per output for this job; `default` is the engine-wide setting."""
    if not job.head.stream:
        return max(UNWATCHED, default)
    if job.head.tier == "interactive":
        return 1
    if job.head.tier == "bulk":
        return max(BULK, default)
    return default
