"""Dead letters of a whole worker, listed, shown and replayed by the command line."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from schemas.names import DEAD_LETTERS, H_REPLAY_OF, H_TRACEPARENT, jobs_topic
from tests.integration.command_kit import headrace, told
from tests.integration.delivery_kit import until
from tests.integration.simulated_kit import SimulatedPool
from tests.integration.worker_kit import Wire, job, new_id

TRACE = "0af7651916cd43dd8448eb211c80319c"


class Case:
    """One pool's letters: the topic is shared by all, so everything is asked by origin topic."""

    def __init__(self, pool: SimulatedPool, wire: Wire, tier: str) -> None:
        self.pool = pool
        self.wire = wire
        self.tier = tier
        self.topic = jobs_topic(pool.name, tier)

    async def die(self, value: dict[str, Any] | bytes, marker: str, **more: Any) -> Any:
        await self.wire.publish(value, tier=self.tier, **more)
        await until(lambda: self.wire.dead_with(marker), f"the dead letter of {marker}")
        return self.wire.dead_with(marker)[0]

    async def told(self, *arguments: str) -> tuple[int | None, dict[str, Any]]:
        return await told(self.pool.bootstrap, self.pool.name, "dead-letters", *arguments)

    async def list(self, *arguments: str) -> list[dict[str, Any]]:
        code, answer = await self.told("list", "--topic", self.topic, *arguments)
        assert code == 0 and answer["whole"]
        return answer["letters"]


@pytest.fixture
async def wire(simulated: SimulatedPool) -> AsyncIterator[Wire]:
    await simulated.main()
    async with simulated.wire() as wire:
        yield wire


def lost_reply(id: str, topic: str) -> dict[str, Any]:
    value = job(id, "secret words", max_tokens=3)
    value["reply"]["topic"] = topic
    return value


async def make(bootstrap: str, topic: str) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    try:
        await admin.create_topics([NewTopic(topic, 1, 1)])
    finally:
        await admin.close()


async def test_a_letter_is_replayed_once_under_the_next_run_and_ends_well(simulated: SimulatedPool, wire: Wire) -> None:
    case = Case(simulated, wire, "interactive")
    id, replies = new_id("dead"), new_id("acme.late")
    traceparent = f"00-{TRACE}-b7ad6b7169203331-01".encode()
    headers = [(H_TRACEPARENT, traceparent), ("mine", b"\xff\x00"), ("null", None)]
    record = await case.die(lost_reply(id, replies), id, headers=headers)
    place = f"{record.partition}/{record.offset}"
    (letter,) = await case.list()
    assert (letter["letter"], letter["code"], letter["job_id"], letter["replayed"]) == (
        place,
        "reply_topic_refused",
        id,
        None,
    )

    code, shown, _ = await headrace(simulated.bootstrap, simulated.name, "dead-letters", "show", place)
    assert code == 0 and replies in shown and "secret words" not in shown
    code, shown, _ = await headrace(simulated.bootstrap, simulated.name, "dead-letters", "show", place, "--value")
    assert code == 0 and "secret words" in shown

    await make(simulated.bootstrap, replies)
    code, dry = await case.told("replay", place, "--dry-run")
    assert code == 0 and dry["replayed"][0]["run"] == 1 and dry["replayed"][0]["place"] is None
    assert (await case.list())[0]["replayed"] is None, "a dry run published something"

    async with Wire(simulated.bootstrap, replies, case.topic, pool=simulated.name) as after:
        code, done = await case.told("replay", place)
        assert code == 0 and done["replayed"][0]["run"] == 1, done
        await until(lambda: after.terminals(id), "the replay's end", 60)
        (end,) = after.terminals(id)
        assert (end["type"], end["run"]) == ("completed", 1)
        (again,) = after.of(case.topic)
        assert again.key == b"acme" and orjson.loads(again.value)["run"] == 1
        assert dict(again.headers)["mine"] == b"\xff\x00" and ("null", None) in again.headers
        assert dict(again.headers)[H_REPLAY_OF].decode() == f"{DEAD_LETTERS}/{place}"
        (started,) = [event for event in after.events(id) if event["type"] == "started"]
        assert started["trace_id"] == TRACE, "the replay is in another trace"

        (letter,) = await case.list()
        assert letter["replayed"]["run"] == 1
        code, refused = await case.told("replay", place)
        assert code == 1 and not refused["replayed"] and "--again" in refused["refused"][0]["why"]
        code, skipped = await case.told("replay", "--topic", case.topic)
        assert code == 0 and not skipped["replayed"] and skipped["skipped"][0]["letter"] == place
        assert len(after.of(case.topic)) == 1

        code, further = await case.told("replay", place, "--again")
        assert code == 0 and further["replayed"][0]["run"] == 2
        await until(lambda: len(after.terminals(id)) == 2, "the second replay's end", 60)
        assert after.terminals(id)[1]["run"] == 2


async def test_letters_are_chosen_by_filters_and_refused_one_by_one(simulated: SimulatedPool, wire: Wire) -> None:
    case = Case(simulated, wire, "bulk")
    ids = [new_id("dead") for _ in range(3)]
    for id, tenant in zip(ids, ("acme", "globex", "globex"), strict=True):
        value = {**lost_reply(id, new_id(f"{tenant}.none")), "tenant": tenant}
        await case.die(value, id, key=tenant.encode())
    broken = new_id("broken")
    await case.die(b"no json " + broken.encode(), broken)
    assert len(await case.list()) == 4
    assert {letter["job_id"] for letter in await case.list("--tenant", "globex")} == set(ids[1:])
    assert len(await case.list("--limit", "2")) == 2
    assert [letter["code"] for letter in await case.list("--code", "invalid_job")] == ["invalid_job"]

    code, done = await case.told("replay", "--topic", case.topic, "--tenant", "globex")
    assert code == 0 and {one["job_id"] for one in done["replayed"]} == set(ids[1:])
    await until(lambda: all(len(wire.dead_with(id)) == 2 for id in ids[1:]), "their second letters")  # still no topic

    code, rest = await case.told("replay", "--topic", case.topic, "--code", "invalid_job")
    assert code == 1 and not rest["replayed"]
    assert "cannot carry a run" in rest["refused"][0]["why"]


async def test_wrong_usage_and_missing_letters_have_their_exit_codes(simulated: SimulatedPool, wire: Wire) -> None:
    async def code(*arguments: str) -> int | None:
        return (await headrace(simulated.bootstrap, simulated.name, "dead-letters", *arguments))[0]

    assert await code("replay") == 2
    assert await code("replay", "1/2", "--all") == 2
    assert await code("show", "nowhere") == 2
    assert await code("show", "0/999999999") == 1
    assert await code("replay", "0/999999999") == 1
    assert (await headrace("127.0.0.1:1", simulated.name, "dead-letters", "list"))[0] == 3
