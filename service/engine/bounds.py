"""The nets under the scheduler's own limits, the same around both engines. Owns these numbers; enforces nothing."""

from __future__ import annotations

MAX_N = 128  # choices of one request
QUEUE_FACTOR = 2  # sequences an engine takes, as a multiple of its slots: the scheduler keeps far below


def queue_bound(max_num_seqs: int) -> int:
    """Running and waiting sequences above which an engine says Overloaded; an empty one takes the widest request."""
    return QUEUE_FACTOR * max_num_seqs + MAX_N
