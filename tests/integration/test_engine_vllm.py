"""The vLLM engine on the real model: what its protocol promises. One engine for all; about two minutes on two cores."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from schemas.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound, Refusal
from schemas.names import CHAT, COMPLETIONS
from service.engine import build
from service.engine.protocol import EngineLost, EngineState, EngineStats, Finished, Overloaded, StartFailure
from service.engine.supervisor import Supervisor
from service.frames import Delta, Head, Usage
from service.job import Job, Place, Record, Ticket
from service.settings import Settings
from tests.integration.conftest import TestStack

pytestmark = pytest.mark.timeout(400)

RIVERS = [{"role": "user", "content": "Name three rivers in Europe."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        "strict": True,
    },
}
_numbers = itertools.count()


def settings_of(model: Path, **changes: Any) -> Settings:
    settings = Settings()
    settings.engine = settings.engine.model_copy(
        update={"kind": "vllm", "model": str(model), "max_num_seqs": 16, "max_model_len": 1024, **changes}
    )
    return settings


def job_of(body: dict[str, Any], endpoint: str = CHAT, tenant: str = "acme", tier: str = "interactive") -> Job:
    number = next(_numbers)
    place = Place("jobs", 0, number)
    head = Head(
        topic=place.topic,
        partition=0,
        offset=number,
        epoch=1,
        origin=str(place),
        job_id=f"job-{number}",
        run=0,
        tenant=tenant,
        tier=tier,
        endpoint=endpoint,
        model="smollm2-135m-instruct",
        reply_topic="replies",
        reply_partition=None,
        stream=True,
        progress=False,
        inline_max_bytes=262_144,
        store="auto",
        ttl_days=None,
        metadata=None,
        digest="",
        trace={},
        broker_time=0.0,
    )
    body = {"model": "smollm2-135m-instruct", "temperature": 0, **body}
    return Job(Ticket(place, 1), Record(place, b"", b"", (), 0), head, body, time.time())


@dataclass
class Answer:
    """The deltas of an attempt, and what they fold to."""

    deltas: list[Delta] = field(default_factory=list)
    end: Finished | None = None
    outputs: int = 0

    @property
    def usage(self) -> Usage:
        assert self.end is not None
        return self.end.usage

    def text(self, index: int = 0) -> str:
        return "".join(d.text for d in self.deltas if d.index == index)

    def reason(self, index: int = 0) -> str | None:
        own = [d for d in self.deltas if d.index == index]
        assert all(d.finish_reason is None for d in own[:-1])
        return own[-1].finish_reason

    def calls(self) -> list[list[str]]:
        found: dict[int, list[str]] = {}
        for delta in self.deltas:
            for call in delta.tool_calls or ():
                entry = found.setdefault(call["index"], ["", "", ""])
                entry[0] += call.get("id", "")
                entry[1] += call["function"].get("name", "")
                entry[2] += call["function"].get("arguments", "")
        return [found[index] for index in sorted(found)]


async def ask(engine: Supervisor, body: dict[str, Any], endpoint: str = CHAT, tenant: str = "acme") -> Answer:
    job = job_of(body, endpoint, tenant)
    prepared = await engine.prepare(job)
    answer = Answer()
    async with contextlib.aclosing(engine.run(job, prepared, f"attempt-{job.head.job_id}", 0)) as outputs:  # type: ignore[type-var]
        async for output in outputs:
            assert answer.end is None, "Finished is the last output"
            if isinstance(output, Finished):
                answer.end = output
            else:
                answer.outputs += 1
                answer.deltas += output
    assert sum(d.tokens for d in answer.deltas) == answer.usage.completion
    assert answer.usage.prompt == prepared.prompt_tokens
    return answer


async def until(condition: Any, seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        await asyncio.sleep(0.05)


def engine_processes(parent: int) -> list[psutil.Process]:
    """EngineCore and Worker below a process, and what is about to become one."""
    with contextlib.suppress(psutil.NoSuchProcess):
        below = psutil.Process(parent).children(recursive=True)
        return [p for p in below if "VLLM::" in _line(p) or "multiprocessing.spawn" in _line(p)]
    return []


def _line(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline()) or process.name()
    return ""


@pytest.fixture(scope="session")
def doomed(stack: TestStack) -> Iterator[subprocess.Popen[bytes]]:
    """A process that starts an engine of its own, at the same time as ours starts."""
    code = (
        "import asyncio, sys\n"
        "from tests.integration.test_engine_vllm import settings_of\n"
        "from service.engine import build\n"
        "from pathlib import Path\n"
        "async def main():\n"
        "    await build(settings_of(Path(sys.argv[1])), str).start()\n"
        "    await asyncio.sleep(600)\n"
        "if __name__ == '__main__':\n"
        "    asyncio.run(main())\n"
    )
    worker = subprocess.Popen([sys.executable, "-c", code, str(stack.model)], stderr=subprocess.DEVNULL)
    yield worker
    worker.kill()
    worker.wait()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def engine(stack: TestStack, doomed: subprocess.Popen[bytes]) -> AsyncIterator[Supervisor]:
    settings = settings_of(stack.model)
    supervisor = Supervisor(lambda: build(settings, lambda tenant: f"salt of {tenant}"), settings.engine)
    capacity = await supervisor.start()
    # 16 ordinary slots, 15 % over-full, and one in reserve
    assert (capacity.max_model_len, capacity.max_num_seqs, capacity.block_size) == (1024, 19, 128)
    assert capacity.kv_tokens > 10_000
    yield supervisor
    await supervisor.close()
    assert not engine_processes(os.getpid()), "no process of the engine is left"


def test_what_is_read_of_vllms_statistics_is_what_this_vllm_reports() -> None:
    """Its classes are no stable interface; what it names otherwise would leave our gauges standing still."""
    from vllm.v1.metrics.stats import IterationStats, SchedulerStats

    from service.engine.vllm.stats import StepRecorder

    stats, step = EngineStats(), IterationStats()
    step.num_preempted_reqs, step.num_generation_tokens = 2, 3
    StepRecorder(stats).record(SchedulerStats(num_running_reqs=4, num_waiting_reqs=5, kv_cache_usage=0.5), step)
    assert (stats.preemptions, stats.generated, stats.running, stats.waiting, stats.kv_usage) == (2, 3, 4, 5, 0.5)


async def test_no_engine_process_outlives_a_kill_9_of_the_worker(
    engine: Supervisor, doomed: subprocess.Popen[bytes]
) -> None:
    def protected() -> list[psutil.Process]:
        """A child that has left the parent's process group has installed its protection."""
        assert doomed.poll() is None, "its engine ended before its Worker process came up"
        return [p for p in engine_processes(doomed.pid) if os.getpgid(p.pid) == p.pid]

    await until(lambda: len(protected()) >= 2, 200, "EngineCore and Worker came up")
    children = protected()
    doomed.kill()
    doomed.wait()
    _, alive = await asyncio.to_thread(psutil.wait_procs, children, 10)
    assert not alive


async def test_a_chat_streams_its_tokens_and_ends_with_usage_and_times(engine: Supervisor) -> None:
    before = time.time()
    answer = await ask(engine, {"messages": RIVERS, "max_tokens": 12})
    assert answer.outputs > 3, "several outputs, not one"
    assert answer.text()
    assert answer.reason() == "length"
    assert answer.usage.completion == 12
    end = answer.end
    assert end is not None and end.scheduled and end.first_token and end.last_token
    assert before - 1 < end.scheduled <= end.first_token <= end.last_token < time.time() + 1


async def test_a_plain_completion_of_a_text_and_of_token_ids(engine: Supervisor) -> None:
    by_text = await ask(engine, {"prompt": "The river Danube flows", "max_tokens": 8}, COMPLETIONS)
    assert by_text.text() and by_text.usage.completion == 8
    by_ids = await ask(engine, {"prompt": [504, 6864, 282], "max_tokens": 4}, COMPLETIONS)
    assert by_ids.usage.prompt == 3 and by_ids.usage.completion == 4


async def test_bulk_and_unwatched_jobs_hand_out_fewer_outputs(engine: Supervisor) -> None:
    job = job_of({"messages": RIVERS, "max_tokens": 24, "ignore_eos": True}, tier="bulk")
    outputs = [o async for o in engine.run(job, await engine.prepare(job), "bulk", 0) if not isinstance(o, Finished)]
    assert len(outputs) <= 5
    assert sum(d.tokens for o in outputs for d in o) == 24


async def test_a_stop_string_is_left_out_of_the_text_but_counted(engine: Supervisor) -> None:
    answer = await ask(engine, {"messages": RIVERS, "max_tokens": 64, "stop": ["e"]})
    assert "e" not in answer.text()
    assert answer.reason() == "stop"
    assert answer.deltas[-1].stop_reason == "e"


async def test_logprobs_have_openais_shapes(engine: Supervisor) -> None:
    chat = await ask(engine, {"messages": RIVERS, "max_tokens": 4, "logprobs": True, "top_logprobs": 2})
    content = [entry for d in chat.deltas if d.logprobs for entry in d.logprobs["content"]]
    assert len(content) == 4
    assert "".join(entry["token"] for entry in content).startswith(chat.text())
    assert all(len(entry["top_logprobs"]) == 2 and entry["logprob"] <= 0 for entry in content)
    assert all(bytes(entry["bytes"]).decode() == entry["token"] for entry in content)
    plain = await ask(engine, {"prompt": "The river", "max_tokens": 4, "logprobs": 2}, COMPLETIONS)
    lists: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for delta in plain.deltas:
        for name in lists:
            lists[name] += delta.logprobs[name]
    assert {len(values) for values in lists.values()} == {4}
    assert lists["text_offset"] == list(itertools.accumulate(map(len, lists["tokens"][:-1]), initial=0))


async def test_a_json_schema_binds_the_output(engine: Supervisor) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    body = {"messages": [{"role": "user", "content": "Invent a person."}], "max_tokens": 80, "response_format": wanted}
    answer = await ask(engine, body)
    assert sorted(json.loads(answer.text())) == ["age", "name"]


async def test_two_choices_are_told_apart_and_both_end(engine: Supervisor) -> None:
    answer = await ask(engine, {"messages": RIVERS, "max_tokens": 10, "n": 2, "temperature": 1.0, "seed": 7})
    assert {d.index for d in answer.deltas} == {0, 1}
    assert answer.reason(0) and answer.reason(1)
    assert answer.text(0) and answer.text(1)


@pytest.mark.parametrize(
    "choice, reason",
    [("required", "tool_calls"), ({"type": "function", "function": {"name": "weather"}}, "stop")],
)
async def test_forced_tool_calls_come_as_fragments(engine: Supervisor, choice: Any, reason: str) -> None:
    body = {
        "messages": [{"role": "user", "content": "The weather in Paris?"}],
        "max_tokens": 60,
        "tools": [WEATHER],
        "tool_choice": choice,
        "parallel_tool_calls": False,
    }
    answer = await ask(engine, body)
    ((identity, name, arguments),) = answer.calls()
    assert identity and name == "weather"
    if answer.reason() != "length":  # a model of this size may never close its string
        assert isinstance(json.loads(arguments)["city"], str)
        assert answer.reason() == reason
    assert not answer.text().strip()


@pytest.mark.parametrize("choice", ["auto", "none"])
async def test_tools_that_are_not_forced_leave_a_plain_answer(engine: Supervisor, choice: str) -> None:
    answer = await ask(engine, {"messages": RIVERS, "max_tokens": 8, "tools": [WEATHER], "tool_choice": choice})
    assert answer.text() or answer.calls()
    assert answer.reason() in ("length", "stop", "tool_calls")


async def test_persian_and_emoji_come_through_whole(engine: Supervisor) -> None:
    text = "سلام! 🌊👩‍👩‍👧 یک جمله درباره رودخانه بنویس. café é"
    body = {"prompt": f"Repeat: {text}\nRepeat: {text}\nRepeat:", "max_tokens": 60}
    answer = await ask(engine, body, COMPLETIONS)
    assert any(ord(c) > 0x600 for c in answer.text()), "the model repeats the line"
    for delta in answer.deltas:
        assert "\ufffd" not in delta.text
    cuts = [ask(engine, {**body, "max_tokens": tokens}, COMPLETIONS) for tokens in range(1, 14)]
    for cut in await asyncio.gather(*cuts):  # some end in the middle of a character
        assert "\ufffd" not in cut.text()
        assert answer.text().startswith(cut.text())


async def test_the_prefix_cache_is_shared_within_a_tenant_and_never_across(engine: Supervisor) -> None:
    body = {"messages": [{"role": "user", "content": "river " * 300}], "max_tokens": 1}
    assert (await ask(engine, body, tenant="first")).usage.cached == 0
    assert (await ask(engine, body, tenant="first")).usage.cached >= 256
    assert (await ask(engine, body, tenant="second")).usage.cached == 0
    assert (await ask(engine, {**body, "cache_salt": "salt of first"}, tenant="third")).usage.cached == 0


def schema(wanted: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "d", "schema": wanted}}


@pytest.mark.parametrize(
    "constraint",
    [
        {"structured_outputs": {"regex": r"\p{L}+"}},
        {"structured_outputs": {"regex": "a{1000}{1000}"}},
        {"structured_outputs": {"grammar": "root ::= root"}},
        {"structured_outputs": {"regex": "(.{0,10}x?){0,10}"}},
        {"response_format": schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}})},
    ],
)
async def test_a_constraint_that_cannot_be_followed_is_refused_at_once_and_stalls_nobody(
    engine: Supervisor, constraint: dict[str, Any]
) -> None:
    other = job_of({"messages": RIVERS, "max_tokens": 900, "ignore_eos": True})
    prepared = await engine.prepare(other)
    times: list[float] = []

    async def watch() -> None:
        async for _ in engine.run(other, prepared, f"attempt-{other.head.job_id}", 0):
            times.append(time.monotonic())  # noqa: PERF401 (looked at meanwhile)

    watching = asyncio.create_task(watch())
    await until(lambda: len(times) > 3, 20, "another job streams")
    with pytest.raises(InvalidRequest, match="cannot follow this constraint"):
        await ask(engine, {"messages": RIVERS, "max_tokens": 4, **constraint})
    seen = len(times)
    await until(lambda: len(times) > seen or watching.done(), 20, "the other job goes on")
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    assert max(after - before for before, after in itertools.pairwise(times)) < 4.0


IMAGE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/x"}}
UNKNOWN_TOOL = {"type": "function", "function": {"name": "no"}}
DEEP: dict[str, Any] = {"type": "string"}
for _ in range(100):
    DEEP = {"type": "object", "properties": {"a": DEEP}}


@pytest.mark.parametrize(
    "endpoint, body, refused, says",
    [
        (CHAT, {"messages": []}, InvalidRequest, "message"),
        (CHAT, {"messages": RIVERS, "model": "gpt-99"}, ModelNotFound, "smollm2"),
        ("/v1/embeddings", {"input": "x"}, ModelNotFound, "embeddings"),
        (CHAT, {"messages": RIVERS, "max_tokens": 0}, InvalidRequest, "max_tokens"),
        (CHAT, {"messages": RIVERS, "max_tokens": -1}, InvalidRequest, "max_tokens"),
        (CHAT, {"messages": RIVERS, "max_tokens": 10**9}, InvalidRequest, "max_tokens"),
        (CHAT, {"messages": RIVERS, "temperature": "hot"}, InvalidRequest, "temperature"),
        (CHAT, {"messages": RIVERS, "temperature": -1}, InvalidRequest, "temperature"),
        (CHAT, {"messages": RIVERS, "top_p": 1.5}, InvalidRequest, "top_p"),
        (CHAT, {"messages": RIVERS, "n": 20_000, "temperature": 1}, InvalidRequest, "n"),
        (CHAT, {"messages": RIVERS, "n": 2, "temperature": 0}, InvalidRequest, "n"),
        (CHAT, {"messages": RIVERS, "seed": 2**70}, InvalidRequest, "seed"),
        (CHAT, {"messages": RIVERS, "top_logprobs": 2}, InvalidRequest, "logprobs"),
        (CHAT, {"messages": RIVERS, "logprobs": True, "top_logprobs": 100}, InvalidRequest, "logprobs"),
        (CHAT, {"messages": RIVERS, "logit_bias": {"999999": 1}}, InvalidRequest, "logit_bias"),
        (CHAT, {"messages": [{"role": "user", "content": "river " * 2000}]}, ContextLengthExceeded, "1024"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 5_000_000}]}, ContextLengthExceeded, "characters"),
        (CHAT, {"messages": [{"role": "user", "content": [IMAGE]}]}, InvalidRequest, "text"),
        (CHAT, {"messages": RIVERS, "response_format": schema(DEEP)}, InvalidRequest, "response_format"),
        (CHAT, {"messages": RIVERS, "response_format": schema({"type": "objekt"})}, InvalidRequest, "response_format"),
        (CHAT, {"messages": RIVERS, "structured_outputs": {"regex": "("}}, InvalidRequest, "unclosed group"),
        (CHAT, {"messages": RIVERS, "tools": [WEATHER], "tool_choice": UNKNOWN_TOOL}, InvalidRequest, "tool"),
        (CHAT, {"messages": RIVERS, "stop": [""]}, InvalidRequest, "stop"),
        (COMPLETIONS, {"prompt": ["a", "b"]}, InvalidRequest, "one job"),
        (COMPLETIONS, {"prompt": [-1]}, InvalidRequest, "token ids"),
        (COMPLETIONS, {"prompt": [10**6]}, InvalidRequest, "token ids"),
        (COMPLETIONS, {"prompt": [5] * 1024}, ContextLengthExceeded, "1024"),
        (COMPLETIONS, {"prompt": ""}, InvalidRequest, "empty"),
    ],
)  # fmt: skip
async def test_a_bad_request_is_refused_before_it_reaches_the_engine(
    engine: Supervisor, endpoint: str, body: dict[str, Any], refused: type[Refusal], says: str
) -> None:
    started = time.monotonic()
    with pytest.raises(Refusal) as found:
        await engine.prepare(job_of(body, endpoint))
    assert type(found.value) is refused
    assert says in found.value.message
    assert len(found.value.message) <= 400 and "/site-packages/" not in found.value.message
    assert "Traceback" not in found.value.message and "river river" not in found.value.message
    assert time.monotonic() - started < 2


async def test_an_output_longer_than_the_room_is_cut_to_it(engine: Supervisor) -> None:
    job = job_of({"messages": RIVERS, "max_tokens": 1020})
    prepared = await engine.prepare(job)
    assert prepared.prompt_tokens + prepared.max_tokens == 1024


async def test_cancel_frees_the_engine_within_a_second_and_reports_what_was_made(engine: Supervisor) -> None:
    job = job_of({"messages": RIVERS, "max_tokens": 900, "ignore_eos": True, "n": 2, "temperature": 1.0})
    prepared = await engine.prepare(job)
    answer = Answer()
    cancelled = 0.0
    async for output in engine.run(job, prepared, "to-cancel", 0):
        if isinstance(output, Finished):
            answer.end = output
            break
        answer.deltas += output
        if len(answer.deltas) >= 6 and not cancelled:
            cancelled = time.monotonic()
            await engine.cancel("to-cancel")
    assert time.monotonic() - cancelled < 1
    assert 0 < answer.usage.completion < 900
    assert sum(d.tokens for d in answer.deltas) == answer.usage.completion
    assert answer.reason(0) is None and answer.reason(1) is None
    await until(lambda: engine.stats().running == 0, 1, "the engine is free")
    await engine.cancel("to-cancel")  # idempotent


async def test_a_cancelled_task_frees_the_engine(engine: Supervisor) -> None:
    job = job_of({"messages": RIVERS, "max_tokens": 900, "ignore_eos": True})
    prepared = await engine.prepare(job)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5), contextlib.aclosing(engine.run(job, prepared, "timed", 0)) as outputs:  # type: ignore[type-var]
            async for _ in outputs:
                pass
    await until(lambda: engine.stats().running == 0, 1, "the engine is free")


async def test_more_than_the_engines_queue_takes_is_overloaded_and_leaves_nothing_behind(engine: Supervisor) -> None:
    wide = {"messages": RIVERS, "max_tokens": 400, "ignore_eos": True, "temperature": 1.0}
    first = asyncio.create_task(ask(engine, {**wide, "n": 128}))
    await until(lambda: engine.stats().running == 19, 20, "the first fills the slots")
    with pytest.raises(Overloaded):
        await ask(engine, {**wide, "n": 64})
    first.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await first
    await until(lambda: engine.stats().running == 0, 5, "the engine is free")
    assert (await ask(engine, {"messages": RIVERS, "max_tokens": 1})).usage.completion == 1


async def test_the_event_loop_stays_free_while_a_long_prompt_is_rendered(engine: Supervisor) -> None:
    worst, done = 0.0, asyncio.Event()

    async def watch() -> None:
        nonlocal worst
        while not done.is_set():
            before = time.monotonic()
            await asyncio.sleep(0.005)
            worst = max(worst, time.monotonic() - before - 0.005)

    watcher = asyncio.create_task(watch())
    with pytest.raises(ContextLengthExceeded):
        await engine.prepare(job_of({"messages": [{"role": "user", "content": "river " * 20_000}]}))
    done.set()
    await watcher
    assert worst < 0.25


async def test_after_a_kill_9_of_enginecore_jobs_get_enginelost_and_the_engine_is_rebuilt(engine: Supervisor) -> None:
    seen: list[EngineState] = []
    engine._on_change = seen.append
    body = {"messages": RIVERS, "max_tokens": 900, "ignore_eos": True}

    async def lose() -> None:
        with pytest.raises(EngineLost):
            await ask(engine, body)

    jobs = [asyncio.create_task(lose()) for _ in range(4)]
    await until(lambda: engine.stats().running == 4, 20, "four jobs run")
    (core,) = [p for p in psutil.Process().children() if "EngineCore" in _line(p)]
    old = engine_processes(os.getpid())
    os.kill(core.pid, signal.SIGKILL)
    await asyncio.wait_for(asyncio.gather(*jobs), 5)
    assert seen and seen[0] is EngineState.DEAD
    with pytest.raises(EngineLost):
        await engine.prepare(job_of(body))
    await asyncio.wait_for(engine.ready.wait(), 200)
    assert engine.rebuilds == 1
    assert not [p for p in old if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    answer = await ask(engine, {"messages": RIVERS, "max_tokens": 4})
    assert answer.usage.completion == 4
    engine._on_change = None


async def test_a_start_that_cannot_work_says_in_one_line_what_to_change(stack: TestStack, tmp_path: Path) -> None:
    for changes, says in (
        ({"model": str(tmp_path / "none")}, "HEADRACE_ENGINE__MODEL"),
        ({"model": str(tmp_path)}, "config.json"),
        ({"tensor_parallel_size": 2}, "9 attention heads"),
        ({"max_model_len": 100_000}, "8192"),
        ({"dtype": "float12"}, "HEADRACE_ENGINE__DTYPE"),
        ({"tool_parser": "nope"}, "HEADRACE_ENGINE__TOOL_PARSER"),
        ({"max_num_batched_tokens": 8}, "HEADRACE_ENGINE__MAX_NUM_BATCHED_TOKENS"),
    ):
        settings = settings_of(stack.model)
        settings.engine = settings.engine.model_copy(update=changes)
        with pytest.raises(StartFailure) as failure:
            await build(settings, str).start()
        assert says in str(failure.value)
        assert "\n" not in str(failure.value)
