"""`headrace usage`, `selftest` and `capacity` as an operator calls them, on real Kafka and a worker without a model."""

from __future__ import annotations

import csv
import io
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

from schemas.names import USAGE
from service import topics
from service.cli.process import WorkerProcess
from service.delivery.events import stamp
from tests.integration.command_kit import headrace, told
from tests.integration.conftest import TestStack
from tests.integration.simulated_kit import SimulatedPool, metric
from tests.integration.worker_kit import MODEL, job, new_id

T0 = 1_700_000_000.0  # long before any other record of the run
SINCE, UNTIL = "2023-11-14T22:00:00Z", "2023-11-15T00:00:00Z"


async def write_usage(bootstrap: str, tenants: list[str], count: int, *, doubled: int = 0) -> None:
    """`count` completed jobs in turn, every fifth of them run twice, `doubled` records written once more."""
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap, acks="all", linger_ms=5)
    await producer.start()
    try:
        waits = []
        for number in range(count):
            tenant = tenants[number % len(tenants)]
            value: dict[str, Any] = {
                "schema_version": 1,
                "tenant": tenant,
                "job_id": f"job-{number}",
                "run": 0,
                "attempt": f"01{number:024d}",
                "model": MODEL,
                "tier": "standard",
                "kind": "completed",
                "prompt_tokens": 10,
                "completion_tokens": 5,
                "cached_tokens": 4,
                "queued_s": 0.1,
                "running_s": 0.5,
                "at": stamp(T0 + number % 600),
            }
            records = [value]
            if number % 5 == 0:
                records = [{**value, "kind": "abandoned", "attempt": f"00{number:024d}", "completion_tokens": 2}, value]
            if number < doubled:
                records += records
            for record in records:
                at_ms = int((T0 + number % 600) * 1000)
                waits.append(await producer.send(USAGE, orjson.dumps(record), key=tenant.encode(), timestamp_ms=at_ms))
        for wait in waits:
            await wait
    finally:
        await producer.stop()


async def keep(bootstrap: str) -> None:
    """The records of this module are years old: a broker deletes such ones when it next looks, every five minutes, and
    a reader stops at the first younger one, as other modules' jobs have left there.
    """
    (usage,) = (topic for topic in topics.plan("any", 1) if topic.name == USAGE)
    config = {**usage.config, "retention.ms": "-1"}
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    try:
        (answer,) = await admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, USAGE, config)])
        assert not any(resource["error_code"] for resource in answer.to_object()["resources"])
        (described,) = await admin.describe_topics([USAGE])
        places = [TopicPartition(USAGE, partition["partition"]) for partition in described["partitions"]]
        await admin.delete_records(dict.fromkeys(places, RecordsToDelete(-1)))
    finally:
        await admin.close()


@pytest.fixture(scope="module")
async def tenants(stack: TestStack, simulated: SimulatedPool) -> list[str]:
    """Two tenants of this run alone, with 1,000 jobs between them; the pool has the topics."""
    names = sorted(f"used-{uuid.uuid4().hex[:8]}" for _ in range(2))
    await keep(stack.bootstrap)
    await write_usage(stack.bootstrap, names, 1000, doubled=100)
    return names


async def test_usage_counts_every_attempt_once(stack: TestStack, tenants: list[str]) -> None:
    span = ("--since", SINCE, "--until", UNTIL)
    code, found = await told(stack.bootstrap, "any", "usage", "--tenant", tenants[0], *span)
    assert code == 0
    total = found["total"]
    assert (total["jobs"], total["completed"]) == (500, 500)
    assert (total["prompt_tokens"], total["cached_tokens"], total["completion_tokens"]) == (5000, 2000, 2500)
    assert (total["other_attempts"], total["other_completion_tokens"]) == (100, 200)
    assert (found["doubled"], found["unreadable"]) == (60, 0)  # 50 of the first 100 jobs, 10 of them twice


async def test_usage_has_rows_and_costs_as_json_and_csv(stack: TestStack, tenants: list[str]) -> None:
    machines = ("--by", "tenant", "--since", SINCE, "--until", UNTIL, "--machine-hour", "3", "--workers", "2")
    _, found = await told(stack.bootstrap, "any", "usage", *machines)
    rows = {row["tenant"]: row for row in found["rows"]}
    assert set(tenants) <= set(rows) and found["total"]["cost"] == 12.0  # two machines, two hours
    assert sum(row["cost"] for row in rows.values()) == pytest.approx(12.0, abs=1e-5)
    prices = ("--price-prompt", "1", "--price-cached", "0.5", "--price-output", "4", "--tenant", tenants[1])
    code, out, _ = await headrace(
        stack.bootstrap, "any", "usage", "--by", "model,hour", "--since", SINCE, "--until", UNTIL, *prices, "--csv"
    )
    (row,) = csv.DictReader(io.StringIO(out))
    assert code == 0 and (row["model"], row["hour"], row["jobs"]) == (MODEL, "2023-11-14T22:00:00Z", "500")
    assert float(row["cost"]) == pytest.approx((3000 * 1 + 2000 * 0.5 + 2500 * 4) / 1e6)


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("usage", "--by", "who"), 2, "'who' is none of"),
        (("usage", "--since", "1h", "--until", "2h"), 2, "--until"),
        (("usage", "--machine-hour", "1", "--price-output", "1"), 2, "not both"),
        (("usage", "--bootstrap", "127.0.0.1:9"), 3, "no Kafka broker answers"),
        (("capacity", "--worker", "127.0.0.1:9"), 3, "no worker answers"),
        (("capacity", "--model", "nowhere"), 2, "has no config.json"),
        (("selftest", "cache-isolation", "--tenant", "nobody"), 2, "not in the registry"),
        (("selftest", "cache-isolation", "--pool", "no-such-pool"), 3, "no topic inference.no-such-pool"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
async def test_what_cannot_be_done_is_said_in_a_line(
    stack: TestStack, arguments: tuple[str, ...], code: int, says: str
) -> None:
    done, _, err = await headrace(stack.bootstrap, "any", *arguments)
    assert done == code and says in " ".join(err.split())


# -- with a worker

TOGETHER = """tenants:
  - {id: acme, reply_topics: ["*"]}
  - {id: globex, reply_topics: ["*"]}
  - {id: left, cache_domain: both, reply_topics: ["*"]}
  - {id: right, cache_domain: both, reply_topics: ["*"]}
"""


@pytest.fixture(scope="module")
async def worker(
    simulated: SimulatedPool, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[WorkerProcess, Path]]:
    """A worker with a registry of its own, and that registry's file."""
    file = tmp_path_factory.mktemp("registry") / "tenants.yaml"
    file.write_text(TOGETHER)
    if "main" in simulated.workers:  # the self-test's jobs must come to the worker whose registry is known here
        await simulated.stop("main")
    yield await simulated.start("operators", HEADRACE_TENANTS_FILE=str(file)), file
    await simulated.stop("operators")


async def test_the_self_test_proves_isolation_on_the_running_engine(
    simulated: SimulatedPool, worker: tuple[WorkerProcess, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_TENANTS_FILE", str(worker[1]))
    code, found = await told(simulated.bootstrap, simulated.name, "selftest", "cache-isolation")
    failed = [check for check in found["checks"] if not check["ok"]]
    assert code == 0 and found["ok"] and not failed
    names = [check["name"] for check in found["checks"]]
    assert names.count("isolated") == 4 and names.count("shared domain") == names.count("caller's salt") == 2
    assert all(check["cached_tokens"] > 0 for check in found["checks"] if check["name"] == "own hit")
    assert found["workers"] == [worker[0].name]


async def test_the_self_test_finds_tenants_that_share_without_being_told_so(
    simulated: SimulatedPool, worker: tuple[WorkerProcess, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "apart.yaml"
    file.write_text(TOGETHER.replace("cache_domain: both, ", ""))  # as the operator believes it to be
    monkeypatch.setenv("HEADRACE_TENANTS_FILE", str(file))
    pair = ("--tenant", "left", "--tenant", "right")
    code, out, err = await headrace(simulated.bootstrap, simulated.name, "selftest", "cache-isolation", *pair)
    assert code == 1 and "FAILED" in out and "LEAK: right was served" in err


async def test_the_self_test_says_when_no_worker_answers(
    simulated: SimulatedPool, worker: tuple[WorkerProcess, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The topics of a pool that nobody serves."""
    monkeypatch.setenv("HEADRACE_TENANTS_FILE", str(worker[1]))
    idle = f"idle-{uuid.uuid4().hex[:8]}"
    code, _, err = await headrace(simulated.bootstrap, idle, "topics", "apply", "--partitions", "1")
    assert code == 0, err
    code, found = await told(simulated.bootstrap, idle, "selftest", "cache-isolation", "--timeout", "1s")
    assert code == 1 and not found["ok"] and "no worker answered a job of acme" in found["error"]


async def test_capacity_shows_the_engines_report_beside_the_formula(
    stack: TestStack, worker: tuple[WorkerProcess, Path]
) -> None:
    code, found = await told(
        stack.bootstrap, "any", "capacity", "--model", str(stack.model), "--kv-cache", "1", "--worker", worker[0].url
    )
    assert code == 0 and found["parameters"] == 134_515_008 and found["formula"]["per_token"] == 23_040
    # Eight slots, over-full by 15 %, and one of the reserve.
    assert (found["engine"]["slots"], found["engine"]["kv_tokens"]) == (10, 1_000_000)
    assert found["agree"] is None and "simulated" in found["warnings"][0]
    small = ("--model", str(stack.model), "--kv-cache", "0.001", "--max-model-len", "2048")
    code, _, err = await headrace(stack.bootstrap, "any", "capacity", *small)
    assert code == 1 and "not one sequence of 2,048 tokens fits" in err


async def test_a_kv_cache_that_is_too_small_for_all_makes_jobs_wait_and_preempts_next_to_none(
    simulated: SimulatedPool, worker: tuple[WorkerProcess, Path]
) -> None:
    """Sixty jobs of 50 + 200 tokens at once, where a dozen fit: they queue, none fails, hardly any is put back."""
    await simulated.stop("operators")
    small = await simulated.start(
        "operators",
        HEADRACE_TENANTS_FILE=str(worker[1]),
        HEADRACE_ENGINE__SIM_KV_TOKENS="3000",
        HEADRACE_ENGINE__SIM_STEP_BASE_S="0.002",
        HEADRACE_ENGINE__MAX_NUM_SEQS="64",
    )
    async with simulated.wire() as wire:
        ids = [new_id("peak") for _ in range(60)]
        for id in ids:
            await wire.publish(job(id, "x" * 200, max_tokens=200))
        kinds = {(await wire.ended(id))["type"] for id in ids}
    assert kinds == {"completed"}
    assert metric(small, "headrace_engine_kv_tokens") == 3000
    assert metric(small, "headrace_engine_preemptions_total") <= 6
