"""Where attempts wait that may not send now: for the gate (R5), for room in their lane, for their topic."""

from __future__ import annotations

from service.delivery.attempt import Attempt
from service.delivery.lane import Lane
from service.frames import Waiting


class Parking:
    def __init__(self) -> None:
        self._held: list[Attempt] = []
        self._crowded: dict[Lane, list[Attempt]] = {}
        self._unlocated: dict[str, list[Attempt | Waiting]] = {}

    def hold(self, attempt: Attempt) -> None:
        """Until the gate opens."""
        attempt.parked = True
        self._held.append(attempt)

    def crowd(self, lane: Lane, attempt: Attempt) -> None:
        """Until the lane has room."""
        attempt.parked = True
        self._crowded.setdefault(lane, []).append(attempt)

    def seek(self, topic: str, one: Attempt | Waiting) -> None:
        """Until it is known whether the topic exists."""
        self._unlocated.setdefault(topic, []).append(one)

    def opened(self) -> list[Attempt]:
        """The gate is open: who waited for it, in order."""
        held, self._held = self._held, []
        return _leave(held)

    def roomy(self, lane: Lane) -> list[Attempt]:
        """This lane has room: who waited for it, in order."""
        return _leave(self._crowded.pop(lane, []))

    def found(self, topic: str) -> list[Attempt | Waiting]:
        """It is known now: who waited for it, in order."""
        return self._unlocated.pop(topic, [])

    def vanished(self, topic: str) -> None:
        """Its lanes are gone: nobody waits for room there."""
        self._unlocated.pop(topic, None)
        self._crowded = {lane: crowd for lane, crowd in self._crowded.items() if lane.topic != topic}


def _leave(attempts: list[Attempt]) -> list[Attempt]:
    for attempt in attempts:
        attempt.parked = False
    return attempts
