"""Running jobs that are stopped for want of memory run again, whenever that hits them (R10)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from service.scheduler.scheduler import Entry
from tests.unit.test_poison import Mortal, Room, until


class Struck(Room):
    """Stops everything between a job's admission and the first turn of its task."""

    runs = 0

    def run(self, entry: Entry) -> Awaitable[None]:  # type: ignore[override]
        self.runs += 1
        if self.runs == 1:
            asyncio.get_running_loop().call_soon(self.scheduler.interrupt)
        return super().run(entry)


async def test_a_job_stopped_before_its_first_turn_runs_again() -> None:
    room = Struck(Mortal(set()))
    room.put(1)
    await until(lambda: room.runs == 2 and not room.scheduler.running)
    assert room.ends(1)[-1] == "completed"
    await room.scheduler.stop()
