"""`submit`, `tail` and `job` as a user calls them, against a real broker; the worker's side is a double of the wire."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.integration.conftest import TestStack
from tests.integration.reply_double import Double, Job, double, ordinary

# The commands under test alone, so that this does not depend on what the other commands need to be imported.
CALL = """
import typer
from service.cli import job, submit, tail
app = typer.Typer()
for command in (submit, tail, job):
    command.register(app)
app()
"""
LIMIT_S = 60.0


@pytest.fixture
async def wire(stack: TestStack) -> AsyncIterator[Double]:
    async with double(stack.bootstrap) as made:
        made.script = ordinary
        yield made


async def start(wire: Double, *arguments: str) -> Process:
    environment = {
        **os.environ,
        "HEADRACE_POOL": wire.pool,
        "HEADRACE_KAFKA__BOOTSTRAP": wire.bootstrap,
        "COLUMNS": "200",
    }
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", CALL, *arguments),
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
        env=environment,
        cwd=Path(__file__).parents[2],
        preexec_fn=_interruptible,
    )


def _interruptible() -> None:
    """A run in the background of a shell ignores SIGINT, and what it starts inherits that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


async def call(wire: Double, *arguments: str, stdin: str = "") -> tuple[int | None, str, str]:
    process = await start(wire, *arguments)
    out, err = await asyncio.wait_for(process.communicate(stdin.encode()), LIMIT_S)
    assert b"Traceback" not in err, err.decode()
    return process.returncode, out.decode(), err.decode()


def a_job(wire: Double, **more: Any) -> str:
    """A job whose events go to the test's own topic."""
    body = {"messages": [{"role": "user", "content": "world"}]}
    return orjson.dumps({"tenant": "globex", "body": body, "reply": {"topic": wire.replies}, **more}).decode()


async def test_submit_streams_the_answer_and_tells_the_summary_beside_it(wire: Double) -> None:
    code, out, err = await call(wire, "submit", "-", "--max-tokens", "8", stdin=a_job(wire, id="s-1"))
    assert (code, out) == (0, "Hello world\n"), err
    assert err.startswith("[job s-1 of globex]\n") and "3 + 2 tokens" in err
    job = await wire.jobs.get()
    assert job.fields["tenant"] == "globex" and job.fields["body"]["max_tokens"] == 8 and job.fields["body"]["model"]


async def test_submit_in_json_ends_with_the_whole_event(wire: Double) -> None:
    code, out, _ = await call(wire, "submit", "--json", "--no-stream", stdin=a_job(wire, metadata={"k": "v"}))
    told = orjson.loads(out.splitlines()[-1])
    assert code == 0 and told["type"] == "completed" and told["metadata"] == {"k": "v"}
    assert told["response"]["choices"][0]["message"]["content"] == "Hello world"
    assert (await wire.jobs.get()).fields["reply"]["stream"] is False


async def test_submit_in_json_tells_the_trace_of_the_attempt(wire: Double) -> None:
    async def traced(job: Job) -> None:
        await job.started(trace_id="f" * 32)
        await job.completed("x")

    wire.script = traced
    code, out, _ = await call(wire, "submit", "--json", stdin=a_job(wire))
    assert code == 0 and orjson.loads(out.splitlines()[-1])["trace_id"] == "f" * 32


async def test_submit_takes_a_body_as_its_argument(wire: Double) -> None:
    code, out, err = await call(wire, "submit", a_job(wire, id="arg-1"))
    assert (code, out) == (0, "Hello world\n"), err


async def test_a_restarted_attempt_prints_its_text_anew(wire: Double) -> None:
    async def twice(job: Job) -> None:
        await job.started("A")
        await job.chunk("wrong ", "A", 1)
        await asyncio.sleep(0.3)  # so that it is shown before the second attempt begins
        await job.started("B")
        await job.chunk("right", "B", 1)
        await job.completed("right", "B", 2)

    wire.script = twice
    code, out, err = await call(wire, "submit", stdin=a_job(wire))
    assert code == 0 and out.endswith("right\n") and "started over" in err


async def test_a_failed_job_exits_1_with_the_services_words(wire: Double) -> None:
    async def failing(job: Job) -> None:
        await job.event("failed", error={"code": "engine_failed", "message": "it broke", "retriable": True})

    wire.script = failing
    code, out, err = await call(wire, "submit", stdin=a_job(wire))
    assert (code, out) == (1, "") and "engine_failed: it broke" in err and "sent again" in err


async def test_wrong_usage_is_2_and_no_broker_is_3(wire: Double) -> None:
    for arguments, stdin in (
        (("submit", "--tier", "fast", "hi"), ""),
        (("submit",), ""),
        (("submit",), a_job(wire, id="no good")),
    ):
        code, _, _ = await call(wire, *arguments, stdin=stdin)
        assert code == 2, arguments
    for arguments in (("submit", "hi"), ("tail", "--no-follow"), ("job", "x")):
        code, _, err = await call(wire, *arguments, "--bootstrap", "127.0.0.1:9")
        assert code == 3 and "127.0.0.1:9" in err and len(err.strip().splitlines()) == 1, err
    code, _, err = await call(wire, "tail", "--topic", "no-such-topic", "--no-follow")
    assert code == 3 and "topics apply" in err


async def test_ctrl_c_leaves_cleanly_and_says_how_to_find_the_job(wire: Double) -> None:
    wire.script = None
    process = await start(wire, "submit")
    assert process.stdin is not None
    process.stdin.write(a_job(wire, id="left").encode())
    process.stdin.close()
    await asyncio.wait_for(wire.jobs.get(), LIMIT_S)
    process.send_signal(signal.SIGINT)
    _, err = await asyncio.wait_for(process.communicate(), 15)
    assert process.returncode == 130 and b"headrace job left" in err and b"Traceback" not in err, err


async def test_tail_shows_a_jobs_events_and_ends_with_it(wire: Double) -> None:
    await call(wire, "submit", stdin=a_job(wire, id="t-1"))
    code, out, err = await call(wire, "tail", "t-1", "--topic", wire.replies)
    assert code == 0, err
    lines = out.splitlines()
    assert len(lines) == 4 and "started" in lines[0] and "'Hello '" in lines[1] and "completed" in lines[3]
    code, out, _ = await call(wire, "tail", "t-1", "--topic", wire.replies, "--json")
    events = [orjson.loads(one) for one in out.splitlines()]
    assert [one["type"] for one in events] == ["started", "chunk", "chunk", "completed"]
    assert events[-1]["place"]["topic"] == wire.replies and events[-1]["step"] == "end"


async def test_tail_follows_a_job_that_is_still_running(wire: Double) -> None:
    go_on = asyncio.Event()

    async def halting(job: Job) -> None:
        await job.started()
        await go_on.wait()
        await job.event("failed", seq=1, error={"code": "internal", "message": "no", "retriable": True})

    wire.script = halting
    submitting = asyncio.create_task(call(wire, "submit", stdin=a_job(wire, id="t-2")))
    await asyncio.wait_for(wire.jobs.get(), LIMIT_S)
    tailing = await start(wire, "tail", "t-2", "--topic", wire.replies, "--json")
    assert tailing.stdout is not None
    assert orjson.loads(await asyncio.wait_for(tailing.stdout.readline(), LIMIT_S))["type"] == "started"
    go_on.set()
    assert orjson.loads(await asyncio.wait_for(tailing.stdout.readline(), LIMIT_S))["type"] == "failed"
    assert await asyncio.wait_for(tailing.wait(), 15) == 1
    assert (await submitting)[0] == 1


async def test_an_id_conflict_on_another_partition_makes_no_difference(wire: Double) -> None:
    """Whichever partition answers first, `tail` and `job` tell the same end."""

    async def both(job: Job) -> None:
        await ordinary(job)
        job.fields["reply"]["partition"] = (job.fields["reply"]["partition"] + 1) % 3
        await asyncio.sleep(0.02)  # a later millisecond
        await job.event("failed", "B", error={"code": "id_conflict", "message": "no", "retriable": False})

    wire.script = both
    for n in range(3):
        await call(wire, "submit", stdin=a_job(wire, id=f"c-{n}"))
        code, out, err = await call(wire, "tail", f"c-{n}", "--topic", wire.replies, "--json")
        ends = [one["type"] for one in map(orjson.loads, out.splitlines()) if one["step"] == "end"]
        assert (code, ends) == (0, ["completed"]), (out, err)
        code, out, _ = await call(wire, "job", f"c-{n}", "--topic", wire.replies, "--json")
        assert (code, orjson.loads(out)["state"]) == (0, "completed")


async def test_job_tells_the_state_and_where_the_time_went(wire: Double) -> None:
    await call(wire, "submit", stdin=a_job(wire, id="j-1"))
    code, out, err = await call(wire, "job", "j-1", "--topic", wire.replies)
    assert code == 0, err
    assert "globex/j-1" in out and "completed" in out and "█" in out and "prefill" in out
    code, out, _ = await call(wire, "job", "j-1", "--topic", wire.replies, "--json")
    told = orjson.loads(out)
    assert (told["state"], told["suppressed"], told["whole"]) == ("completed", 0, True)
    assert told["attempts"][0]["chunks"] == 2 and told["stages_ms"]["prefill"] == 2.0
    code, _, err = await call(wire, "job", "never-heard-of", "--topic", wire.replies)
    assert code == 1 and "queued, unknown, or older" in err


async def test_job_starts_from_the_status_record_when_there_is_one(wire: Double, stack: TestStack) -> None:
    from aiokafka.admin import AIOKafkaAdminClient, NewTopic

    await call(wire, "submit", stdin=a_job(wire, id="j-2"))
    job = await wire.jobs.get()
    partition, offset = job.places[-1]
    status = f"inference.{wire.pool}.status"
    admin = AIOKafkaAdminClient(bootstrap_servers=wire.bootstrap)
    await admin.start()
    try:
        await admin.create_topics([NewTopic(status, 3, 1)])
        record = {
            "schema_version": 1,
            "tenant": "globex",
            "job_id": "j-2",
            "run": 0,
            "kind": "completed",
            "origin": f"inference.{wire.pool}.jobs.standard/{job.place[0]}/{job.place[1]}",
            "terminal": {"topic": wire.replies, "partition": partition, "offset": offset},
        }
        await wire.producer.send_and_wait(status, orjson.dumps(record), key=b"globex|j-2|0", partition=0)
        code, out, err = await call(wire, "job", "j-2", "--topic", wire.replies, "--json")
        assert code == 0, err
        told = orjson.loads(out)
        assert told["state"] == "completed" and told["terminal"]["offset"] == offset
        assert told["stages_ms"]["kafka"] >= 0
    finally:
        await admin.delete_topics([status])
        await admin.close()
