"""How many sequences an engine has room for, and the nets under the scheduler's own limits, the same for both engines.

Owns these numbers; enforces nothing.
"""

from __future__ import annotations

from service.settings import EngineSettings

MAX_N = 128  # choices of one request
QUEUE_FACTOR = 2  # sequences an engine takes, as a multiple of its slots: the scheduler keeps far below


def queue_bound(max_num_seqs: int) -> int:
    """Running and waiting sequences above which an engine says Overloaded; an empty one takes the widest request."""
    return QUEUE_FACTOR * max_num_seqs + MAX_N


def ordinary(settings: EngineSettings) -> int:
    """Sequences that any job may hold a slot for.

    A slot is held until the job's last event is acknowledged, and the next job needs a turn of the event loop: without
    some more than `max_num_seqs`, so many of those would be idle (measured: about 15 %).
    """
    return max(1, int(settings.max_num_seqs * settings.overfill))


def reserved(settings: EngineSettings) -> int:
    """Slots on top, which only serve the urgent.

    Without preemption, equal jobs that were admitted together free no slot for a whole generation. No ordinary job may
    wait inside the engine for a slot: it would take one of these.
    """
    return max(1, int(settings.max_num_seqs * settings.reserve)) if settings.reserve else 0


def slots(settings: EngineSettings) -> int:
    """What the engine itself gets as `max_num_seqs`."""
    return ordinary(settings) + reserved(settings)
