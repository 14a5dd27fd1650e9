"""Jobs that are due later wait on the pool's `deferred` topic, not in memory (R12).

jobs topic ──far ahead──▶ deferred topic ──▶ timetable (due, offset) ──due──▶ read by its place ──▶ admitted
"""

from __future__ import annotations

from service.deferred.deferral import Deferral
from service.deferred.relay import Relay, carry
from service.deferred.transfer import Transfer

__all__ = ["Deferral", "Relay", "Transfer", "carry"]
