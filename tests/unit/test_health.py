"""Probes tell the truth: about a stuck loop, a hanging engine, and whether a job would be run now."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from service import health as room
from service.health import Condition, HealthServer, readiness, stalled
from service.settings import Settings
from service.telemetry.metrics import Metrics, Readings

WELL = Condition(engine="ready", running=0, last_step=1.0, joined=True, partitions=4, delivery=True, draining=False)


class Worker:
    """A worker that says what the test wants."""

    def __init__(self) -> None:
        self.now = WELL
        self.threads: set[int] = set()
        self.fault: Exception | None = None

    def condition(self) -> Condition:
        self.threads.add(threading.get_ident())
        if self.fault:
            raise self.fault
        return self.now

    def readings(self) -> Readings:
        self.threads.add(threading.get_ident())
        return Readings(running=self.now.running)


class Served:
    def __init__(self, server: HealthServer, worker: Worker, metrics: Metrics) -> None:
        self.server, self.worker, self.metrics = server, worker, metrics

    def fetch(self, path: str) -> tuple[int, bytes]:
        try:
            with urllib.request.urlopen(self.server.url + path, timeout=10) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as refusal:
            return refusal.code, refusal.read()

    async def get(self, path: str) -> tuple[int, Any]:
        status, body = await asyncio.to_thread(self.fetch, path)
        return status, body if path == "/metrics" else json.loads(body)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    settings, worker = Settings(worker="w1"), Worker()
    metrics = Metrics(settings)
    server = HealthServer(settings, worker, metrics)
    assert await server.start() == server.port > 0
    yield Served(server, worker, metrics)
    await server.stop()


async def test_a_worker_that_is_well_is_live_and_ready(served: Served) -> None:
    assert await served.get("/livez") == (200, {"live": True, "reason": None})
    status, body = await served.get("/readyz")
    assert status == 200 and body["ready"] and body["worker"] == "w1" and body["partitions"] == 4
    assert body["checks"] == dict.fromkeys(
        ("worker", "engine", "group", "reading", "topics", "admission", "delivery", "draining"), "ok"
    )
    assert body["paused"] == []


@pytest.mark.parametrize(
    ("change", "check"),
    [
        ({"engine": "starting"}, "engine"),
        ({"joined": False}, "group"),
        ({"delivery": False}, "delivery"),
        ({"draining": True}, "draining"),
        ({"polled": 1.0}, "reading"),  # long ago: the consume loop is dead or stuck
        ({"held": frozenset({"store"})}, "admission"),
        ({"held": frozenset({"memory"})}, "admission"),
    ],
)
async def test_a_worker_that_would_not_run_a_job_is_live_but_not_ready(
    served: Served, change: dict[str, Any], check: str
) -> None:
    served.worker.now = replace(WELL, **change)
    status, body = await served.get("/readyz")
    assert status == 503 and not body["ready"]
    assert [name for name, said in body["checks"].items() if said != "ok"] == [check]
    assert (await served.get("/livez"))[0] == 200


async def test_why_nothing_is_read_is_told_without_being_a_fault(served: Served) -> None:
    served.worker.now = replace(WELL, polled=time.monotonic(), paused=frozenset({"memory"}))
    status, body = await served.get("/readyz")
    assert status == 200 and body["paused"] == ["memory"]


async def test_a_worker_without_partitions_of_its_own_is_ready(served: Served) -> None:
    served.worker.now = replace(WELL, partitions=0)
    assert (await served.get("/readyz"))[0] == 200


async def test_an_engine_that_runs_without_a_step_is_not_live(served: Served) -> None:
    served.worker.now = replace(WELL, running=7, last_step=time.monotonic() - 1_000)
    status, body = await served.get("/livez")
    assert status == 503 and "7 requests run and the engine has made no step for 1000 s" in body["reason"]


def test_what_counts_as_a_hang() -> None:
    hanging = replace(WELL, running=1, last_step=100.0)
    assert stalled(hanging, 190.1, 90.0) and not stalled(hanging, 189.9, 90.0)
    assert stalled(replace(hanging, running=0), 999.0, 90.0) is None
    assert stalled(replace(hanging, engine="stalled"), 999.0, 90.0)
    assert stalled(replace(hanging, engine="starting"), 999.0, 90.0) is None  # it is being rebuilt


async def test_a_stuck_loop_is_noticed_while_it_is_stuck(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "LOOP_STUCK_S", 0.5)
    monkeypatch.setattr(room, "ASK_S", 0.2)
    answers: dict[str, tuple[int, Any]] = {}

    def watch() -> None:
        give_up = time.monotonic() + 5
        while time.monotonic() < give_up:
            status, body = served.fetch("/livez")
            if status == 503:
                answers["/livez"] = status, json.loads(body)
                break
            time.sleep(0.05)
        status, body = served.fetch("/readyz")
        answers["/readyz"] = status, json.loads(body)
        answers["/metrics"] = served.fetch("/metrics")

    watcher = threading.Thread(target=watch)
    watcher.start()
    watcher.join()  # the loop stands still for as long as this takes
    assert answers["/livez"][0] == 503 and "the event loop has not turned" in answers["/livez"][1]["reason"]
    assert answers["/readyz"][0] == 503 and "did not answer" in answers["/readyz"][1]["checks"]["worker"]
    assert answers["/metrics"][0] == 200
    await asyncio.sleep(0.2)
    assert (await served.get("/livez"))[0] == 200
    text = served.metrics.render().decode()
    late = next(line for line in text.splitlines() if line.startswith("headrace_event_loop_lag_seconds_sum"))
    assert float(late.split()[1]) > 0.4


async def test_the_worker_is_asked_on_its_own_loop(served: Served) -> None:
    for path in ("/livez", "/readyz", "/metrics"):
        await served.get(path)
    assert served.worker.threads == {threading.get_ident()}


async def test_a_fault_in_the_report_does_not_get_the_worker_killed(served: Served) -> None:
    served.worker.fault = RuntimeError("boom")
    assert (await served.get("/livez"))[0] == 200
    assert (await served.get("/readyz"))[0] == 503


async def test_the_scrape_shows_current_readings(served: Served) -> None:
    served.worker.now = replace(WELL, running=5)
    status, body = await served.get("/metrics")
    assert status == 200 and b"\nheadrace_jobs_running 5.0\n" in body


async def test_the_contract_is_served(served: Served) -> None:
    status, schemas = await served.get("/schema")
    assert status == 200 and schemas["job"]["type"] == "object"
    assert await served.get("/schema/job") == (200, schemas["job"])
    status, body = await served.get("/schema/nothing")
    assert status == 404 and "job" in body["error"]
    status, document = await served.get("/schema/asyncapi")
    assert status == 200 and document["asyncapi"].startswith("3.")


async def test_a_taken_port_is_an_error_at_start(served: Served) -> None:
    settings = Settings(http_port=served.server.port)
    with pytest.raises(OSError):
        await HealthServer(settings, served.worker, Metrics(settings)).start()


async def test_stopping_is_quick_and_frees_the_port() -> None:
    settings = Settings()
    server = HealthServer(settings, Worker(), Metrics(settings))
    port = await server.start()
    began = time.monotonic()
    await server.stop(2.0)
    assert time.monotonic() - began < 20.0
    again = HealthServer(Settings(http_port=port), Worker(), Metrics(settings))
    assert await again.start() == port
    await again.stop()
    await again.stop()


def test_no_answer_is_not_ready() -> None:
    assert list(readiness(None, 0.0)) == ["worker"]
