"""The registry on its topic: changed by command while a worker runs, in force at once, never by somebody unaware."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml
from aiokafka import AIOKafkaProducer

from client import Client
from schemas.keys import partition_of
from schemas.names import TENANTS
from service.cli.registry_topic import ChangedMeanwhile, RegistryTopic
from service.settings import KafkaSettings, Settings
from tests.integration.command_kit import headrace, told
from tests.integration.conftest import TestStack
from tests.integration.delivery_kit import until
from tests.integration.simulated_kit import SimulatedPool, endless, metric
from tests.integration.worker_kit import MODEL, Wire, job, new_id


class Office:
    """`headrace tenants …` against the test's stack, and jobs of the tenants."""

    def __init__(self, pool: SimulatedPool, wire: Wire) -> None:
        self.pool = pool
        self.wire = wire

    async def tenants(self, *arguments: str) -> tuple[int | None, dict[str, Any]]:
        return await told(self.pool.bootstrap, self.pool.name, "tenants", *arguments)

    async def ends(self, tenant: str, **body: Any) -> dict[str, Any]:
        """The terminal event of a small job of this tenant."""
        id = new_id("registry")
        await self.wire.publish(job(id, tenant=tenant, max_tokens=2, **body), key=tenant.encode())
        return await self.wire.ended(id, 30)

    async def completes(self, tenant: str) -> None:
        """Waits until jobs of this tenant run."""
        limit = time.monotonic() + 10
        while (await self.ends(tenant))["type"] != "completed":
            assert time.monotonic() < limit, f"{tenant} is not served"

    async def refused(self, tenant: str, code: str) -> None:
        """Waits until jobs of this tenant fail so: the change reaches the worker within moments."""
        limit = time.monotonic() + 10
        while (await self.ends(tenant)).get("error", {}).get("code") != code:
            assert time.monotonic() < limit, f"{tenant} is not refused with {code}"


@pytest.fixture
async def office(simulated: SimulatedPool) -> AsyncIterator[Office]:
    await simulated.main()
    async with simulated.wire() as wire:
        yield Office(simulated, wire)


def new_tenant() -> str:
    return f"t-{uuid.uuid4().hex[:8]}"


async def test_a_tenant_is_made_changed_disabled_and_enabled_while_a_worker_runs(office: Office) -> None:
    name = new_tenant()
    assert (await office.ends(name))["error"]["code"] == "unknown_tenant"

    code, done = await office.tenants("set", name, "--weight", "2", "--limit", "n=2", "--yes")
    assert (code, done["applied"]) == (0, True)
    assert done["changes"] == [
        {
            "id": name,
            "kind": "added",
            "fields": [
                {"field": "weight", "before": 1.0, "after": 2.0},
                {"field": "limits.n", "before": 8, "after": 2},
            ],
        }
    ]
    await office.completes(name)
    failed = await office.ends(name, n=3)
    assert failed["error"]["code"] == "quota_exceeded" and "3" in failed["error"]["message"]
    assert "2" in failed["error"]["message"], "the limit and the value are told"

    assert (await office.tenants("disable", name, "--yes"))[0] == 0
    await office.refused(name, "not_authorized")
    assert (await office.tenants("enable", name, "--yes"))[0] == 0
    await office.completes(name)


async def test_an_invalid_entry_leaves_the_former_in_force_and_is_counted(office: Office) -> None:
    name = new_tenant()
    await office.tenants("set", name, "--limit", "n=1", "--yes")
    await office.completes(name)
    worker = await office.pool.main()
    refused = metric(worker, "headrace_tenant_entries_refused_total")
    async with AIOKafkaProducer(bootstrap_servers=office.pool.bootstrap, acks="all") as producer:
        await producer.send_and_wait(TENANTS, orjson.dumps({"id": name, "weight": -1}), key=name.encode())
    await until(lambda: metric(worker, "headrace_tenant_entries_refused_total") == refused + 1, "the count", 10)
    assert (await office.ends(name))["type"] == "completed"
    assert (await office.ends(name, n=2))["error"]["code"] == "quota_exceeded"
    code, listed = await office.tenants("list")
    assert code == 0 and "weight must be greater than 0" in listed["invalid"][name]
    code, _, err = await headrace(office.pool.bootstrap, office.pool.name, "tenants", "show", name)
    assert code == 1 and "weight must be greater than 0" in err
    await office.tenants("set", name, "--weight", "1", "--yes")


async def test_a_dry_run_and_a_question_nobody_can_answer_change_nothing(office: Office) -> None:
    name = new_tenant()
    code, done = await office.tenants("set", name, "--weight", "2", "--dry-run")
    assert (code, done["applied"], len(done["changes"])) == (0, False, 1)
    code, out, err = await headrace(office.pool.bootstrap, office.pool.name, "tenants", "set", name, "--weight", "2")
    assert code == 2 and "--yes" in err and "weight: 1.0 → 2.0" in out
    code, _, err = await headrace(
        office.pool.bootstrap, office.pool.name, "tenants", "set", name, "--weight", "2", "--json"
    )
    assert code == 2 and "--yes" in err
    _, listed = await office.tenants("list")
    assert name not in [tenant["id"] for tenant in listed["tenants"]]


@pytest.mark.parametrize(
    "arguments, says",
    [
        (("set", "x", "--limit", "runing_jobs=3"), "did you mean running_jobs?"),
        (("set", "x", "--limit", "n=many"), "n=NUMBER"),
        (("set", "x", "--tier", "fast"), "interactive, standard, bulk"),
        (("set", "x"), "nothing to change"),
        (("set", "a.b", "--weight", "1", "--yes"), "id must match"),
        (("set", "x", "--weight", "0", "--yes"), "weight must be greater than 0"),
        (("set", "x", "--order", "tenant", "--spread", "2", "--yes"), "needs spread 1"),
        (("disable", "acmee", "--yes"), "did you mean acme?"),
        (("apply", "none.yaml", "--yes"), "cannot be read"),
    ],
)
async def test_what_cannot_be_is_refused_in_one_line_before_anything_is_asked(
    office: Office, arguments: tuple[str, ...], says: str
) -> None:
    code, _, err = await headrace(office.pool.bootstrap, office.pool.name, "tenants", *arguments)
    assert code == 2 and says in " ".join(err.split()), err


async def test_a_file_is_applied_shown_as_it_will_be_and_applying_it_again_does_nothing(
    office: Office, tmp_path: Path
) -> None:
    one, two = new_tenant(), new_tenant()
    file = tmp_path / "tenants.yaml"
    file.write_text(yaml.safe_dump({"tenants": [{"id": one, "weight": 3}, {"id": two, "tier": "bulk"}]}))
    code, done = await office.tenants("apply", str(file), "--yes")
    assert (code, [change["kind"] for change in done["changes"]]) == (0, ["added", "added"])
    code, done = await office.tenants("apply", str(file), "--yes")
    assert (code, done["applied"], done["changes"]) == (0, False, [])
    code, entry = await office.tenants("show", two)
    assert (code, entry["tier"], entry["limits"]["n"]) == (0, "bulk", 8)
    _, out, _ = await headrace(office.pool.bootstrap, office.pool.name, "tenants", "show", two)
    own = tmp_path / "entry.yaml"
    own.write_text(out)
    code, done = await office.tenants("set", two, "--file", str(own), "--yes")
    assert (code, done["changes"]) == (0, []), "what `show` prints is what `set --file` takes"
    _, done = await office.tenants("apply", str(file), "--prune", "--dry-run")
    assert "acme" in [change["id"] for change in done["changes"] if change["kind"] == "removed"]
    assert "acme" in [tenant["id"] for tenant in (await office.tenants("list"))[1]["tenants"]]


async def test_an_entry_that_somebody_else_changed_in_the_meantime_is_not_overwritten(simulated: SimulatedPool) -> None:
    found = Settings(kafka=KafkaSettings(bootstrap=simulated.bootstrap))
    one, two = new_tenant(), new_tenant()
    entry = {name: orjson.dumps({"id": name}) for name in (one, two)}
    async with RegistryTopic(found, TENANTS) as ours, RegistryTopic(found, TENANTS) as theirs:
        seen = await ours.read()
        await theirs.write({one: entry[one]}, await theirs.read())
        with pytest.raises(ChangedMeanwhile, match=f"{one}.*nothing was written"):
            await ours.write(entry, seen)
        assert two not in await ours.read(), "all or nothing"
        await ours.write(entry, await ours.read())
        seen = await ours.read()
        await theirs.write({one: None}, await theirs.read())
        with pytest.raises(ChangedMeanwhile):
            await ours.write({one: entry[one]}, seen)
        await ours.write({two: None}, await ours.read())


async def test_the_spread_of_jobs_in_order_changes_only_when_none_is_unfinished(office: Office) -> None:
    name = new_tenant()
    await office.tenants("set", name, "--order", "conversation", "--spread", "2", "--yes")
    await office.completes(name)
    id = new_id("ordered")
    await office.wire.publish({**endless(id), "tenant": name, "conversation": "c"}, key=f"{name}|0".encode())
    await until(lambda: office.wire.events(id), "the job's start", 20)
    code, done = await office.tenants("set", name, "--spread", "4", "--yes")
    assert (code, done["applied"]) == (1, False)
    assert f"1 in pool {office.pool.name}" in done["refused"] and "publishers" in done["refused"]
    code, _ = await office.tenants("set", name, "--weight", "2", "--yes")
    assert code == 0, "anything else may change"
    async with Client(office.pool.bootstrap, tenant=name, pool=office.pool.name) as client:
        await client.cancel(id)
    await office.wire.ended(id, 20)
    limit = time.monotonic() + 15  # until its end is committed
    while (await office.tenants("set", name, "--spread", "4", "--yes"))[0] != 0:
        assert time.monotonic() < limit
    _, entry = await office.tenants("show", name)
    assert (entry["spread"], entry["former_spread"]) == (4, 2)


async def test_a_client_publishes_where_the_registry_says_live(office: Office) -> None:
    name = new_tenant()
    await office.tenants("set", name, "--tier", "bulk", "--spread", "3", "--yes")
    async with Client(office.pool.bootstrap, tenant=name, pool=office.pool.name, model=MODEL) as client:

        async def published() -> tuple[str, str]:
            job = await client.publish({"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}, stream=False)
            assert job.place is not None
            job.close()
            return job.place.topic.rpartition(".")[2], str(job.place.partition)

        first = [await published() for _ in range(20)]
        assert {tier for tier, _ in first} == {"bulk"}
        keys = {partition_of(f"{name}|{k}", 6) for k in range(3)}
        assert {int(number) for _, number in first} <= keys
        await office.tenants("set", name, "--tier", "interactive", "--yes")
        limit = time.monotonic() + 10
        while (await published())[0] != "interactive":
            assert time.monotonic() < limit


async def test_a_new_stack_has_the_development_tenants_on_its_topic(stack: TestStack) -> None:
    if not stack.environment:
        pytest.skip("not a stack of this run")
    _, listed = await told(stack.bootstrap, "default", "tenants", "list")
    assert {tenant["id"]: tenant["tier"] for tenant in listed["tenants"] if "-" not in tenant["id"]} == {
        "acme": "interactive",
        "globex": "standard",
        "initech": "bulk",
    }
