"""The registry of models on its topic: two pools, one list of names (tenancy.md §1)."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from client import Client
from schemas.names import overflow_topic, status_topic
from tests.integration.command_kit import headrace, told
from tests.integration.conftest import TestStack
from tests.integration.delivery_kit import until
from tests.integration.simulated_kit import SimulatedPool, events_of, metric, statuses
from tests.integration.worker_kit import Wire, job, new_id


class Pair:
    """Two pools that serve a model each, and an alias of the second one's."""

    def __init__(self, stack: TestStack, state: Path) -> None:
        self.near, self.far = SimulatedPool(stack, state), SimulatedPool(stack, state)
        suffix = uuid.uuid4().hex[:8]
        self.small, self.large, self.alias = f"small-{suffix}", f"large-{suffix}", f"alias-{suffix}"
        self.gone = f"gone-{suffix}"

    async def start(self) -> None:
        for pool, model in ((self.near, self.small), (self.far, self.large)):
            await pool.topics()
            await pool.start("main", HEADRACE_ENGINE__SERVED_NAME=model)
            await self.models("set", model, "--pool", pool.name)
        await self.models("set", self.alias, "--pool", self.far.name, "--alias-of", self.large)

    async def models(self, *arguments: str) -> None:
        code, done = await told(self.near.bootstrap, self.near.name, "models", *arguments, "--yes")
        assert code == 0 and done["applied"], done

    async def close(self) -> None:
        for name in (self.small, self.large, self.alias, self.gone):
            await told(self.near.bootstrap, self.near.name, "models", "remove", name, "--yes")
        await self.near.close()
        await self.far.close()


@pytest.fixture(scope="module")
async def pair(stack: TestStack, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    made = Pair(stack, tmp_path_factory.mktemp("models"))
    try:
        await made.start()
        yield made
    finally:
        await made.close()


def wire_of(pair: Pair) -> Wire:
    topics = [status_topic(pair.near.name), status_topic(pair.far.name), overflow_topic(pair.far.name)]
    return Wire(pair.near.bootstrap, *topics, pool=pair.near.name)


async def test_a_client_finds_the_pool_by_the_model_and_by_its_alias(pair: Pair) -> None:
    async with Client(pair.near.bootstrap, tenant="acme") as client:
        for name, pool in ((pair.small, pair.near), (pair.large, pair.far), (pair.alias, pair.far)):
            job_ = await client.publish(
                {"model": name, "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
            )
            assert job_.place is not None and job_.place.topic.startswith(f"inference.{pool.name}.jobs.")
            result = await job_.result(30)
            assert result.response["model"].endswith(pair.small if pool is pair.near else pair.large)


async def test_a_job_in_the_wrong_pool_is_sent_on_once_and_answered_once(pair: Pair) -> None:
    async with wire_of(pair) as wire:
        id = new_id("astray")
        await wire.publish(job(id, model=pair.alias, max_tokens=2))
        end = await wire.ended(id, 30)
        assert end["type"] == "completed" and end["response"]["model"].endswith(pair.large)
        await until(lambda: len(statuses(wire, pair.far, id)) == 1, "its status record there", 10)
        await until(lambda: len(statuses(wire, pair.near, id)) == 1, "the note here", 10)
        (there,), (here,) = statuses(wire, pair.far, id), statuses(wire, pair.near, id)
        assert (here["kind"], there["kind"]) == ("moved", "completed") and here["origin"] == there["origin"]
        assert len(events_of(wire, id, "started")) == len(wire.terminals(id)) == 1
        worker = await pair.near.main()
        assert metric(worker, "headrace_moved_to_overflow_total", reason="model") >= 1
        for pool in (pair.near, pair.far):
            code, account = await told(pool.bootstrap, pool.name, "reconcile", "--since", "15m")
            assert (code, account["lost"], account["doubled"], account["running"]) == (0, 0, 0, 0), account


async def test_a_pool_that_does_not_serve_what_the_registry_says_refuses_instead_of_sending_it_round(
    pair: Pair,
) -> None:
    await pair.models("set", pair.gone, "--pool", pair.far.name)
    async with wire_of(pair) as wire:
        id = new_id("nowhere")
        await wire.publish(job(id, model=pair.gone))
        end = await wire.ended(id, 30)
        assert (end["type"], end["error"]["code"]) == ("failed", "model_not_found")


async def test_submit_goes_to_the_models_pool(pair: Pair) -> None:
    # Without --pool and HEADRACE_POOL, as an application that knows the model only.
    code, out, err = await headrace(
        pair.near.bootstrap, "", *("submit", "hello", "--model", pair.alias, "--max-tokens", "2", "--json")
    )
    assert code == 0 and pair.large in out, err


async def test_a_model_set_twice_is_nothing_to_do_and_a_wrong_one_is_refused(pair: Pair) -> None:
    code, done = await told(
        pair.near.bootstrap, pair.near.name, "models", "set", pair.small, "--pool", pair.near.name, "--yes"
    )
    assert (code, done["applied"]) == (0, False)
    code, _, err = await headrace(pair.near.bootstrap, pair.near.name, "models", "set", "x", "--pool", "a b", "--yes")
    assert code == 2 and "pool must match" in err
    _, listed = await told(pair.near.bootstrap, pair.near.name, "models", "list")
    assert {entry["name"]: entry["alias_of"] for entry in listed["models"]}[pair.alias] == pair.large
