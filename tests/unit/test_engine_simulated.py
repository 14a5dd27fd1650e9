"""The simulated engine: the protocol's promises, its timing model, and the faults that tests ask it for."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any, cast

import pytest

from schemas.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound
from schemas.names import CHAT, COMPLETIONS
from service.engine import build
from service.engine.instance import instance
from service.engine.protocol import Engine, EngineFault, EngineLost, EngineState, Finished, Output, Overloaded
from service.engine.simulated import SimulatedEngine
from service.frames import Delta, Head
from service.job import Job, Place, Record, Ticket
from service.settings import Settings

_numbers = itertools.count()


def settings_of(**changes: Any) -> Settings:
    settings = Settings()
    quick = {"kind": "simulated", "sim_start_s": 0.0, "sim_step_base_s": 0.0005, "sim_step_per_seq_s": 0.0}
    exact = {"overfill": 1.0, "reserve": 0.0}  # max_num_seqs is what the engine gets
    quick |= {"sim_step_per_prefill_token_s": 0.0, **exact}
    settings.engine = settings.engine.model_copy(update={**quick, **changes})
    return settings


async def started(**changes: Any) -> SimulatedEngine:
    engine = build(settings_of(**changes), str)
    assert isinstance(engine, SimulatedEngine)
    await engine.start()
    return engine


def job_of(text: str = "a river", tier: str = "interactive", stream: bool = True, **body: Any) -> Job:
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
        tenant="acme",
        tier=tier,
        endpoint=CHAT,
        model="m",
        reply_topic="replies",
        reply_partition=None,
        stream=stream,
        progress=False,
        inline_max_bytes=262_144,
        store="auto",
        ttl_days=None,
        metadata=None,
        digest="",
        trace={},
        broker_time=0.0,
    )
    messages = [{"role": "user", "content": text}]
    return Job(Ticket(place, 1), Record(place, b"", b"", (), 0), head, {"messages": messages, **body}, time.time())


def running(engine: Engine, job: Job, prepared: Any, attempt: str, priority: int = 0) -> AsyncGenerator[Output, None]:
    return cast(AsyncGenerator[Output, None], engine.run(job, prepared, attempt, priority))


async def ask(engine: Engine, job: Job, priority: int = 0) -> tuple[list[Delta], Finished]:
    prepared = await engine.prepare(job)
    deltas: list[Delta] = []
    async with contextlib.aclosing(running(engine, job, prepared, job.head.job_id, priority)) as outputs:
        async for output in outputs:
            if isinstance(output, Finished):
                return deltas, output
            deltas += output
    raise AssertionError("no Finished")


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.002)


def text_of(deltas: list[Delta], index: int = 0) -> str:
    return "".join(d.text for d in deltas if d.index == index)


async def test_its_name_says_that_it_is_simulated() -> None:
    engine = build(settings_of(), str)
    capacity = await engine.start()
    assert capacity.model == "simulated:smollm2-135m-instruct"
    await engine.close()


async def test_tokens_of_all_deltas_are_the_usage_and_the_last_delta_ends_each_choice() -> None:
    engine = await started()
    deltas, end = await ask(engine, job_of(max_tokens=7, n=3))
    assert end.usage.completion == sum(d.tokens for d in deltas) == 21
    for index in range(3):
        own = [d for d in deltas if d.index == index]
        assert [d.finish_reason for d in own] == [None] * (len(own) - 1) + ["length"]
    assert end.scheduled and end.first_token and end.last_token
    assert end.scheduled <= end.first_token <= end.last_token
    await engine.close()


async def test_the_same_prompt_gives_the_same_text_and_another_one_another() -> None:
    engine = await started()
    first, _ = await ask(engine, job_of("one", max_tokens=9))
    again, _ = await ask(engine, job_of("one", max_tokens=9, n=2))
    other, _ = await ask(engine, job_of("two", max_tokens=9))
    assert text_of(first) == text_of(again, 0) != text_of(again, 1)
    assert text_of(first) != text_of(other)
    await engine.close()


async def test_without_a_limit_a_choice_ends_by_itself() -> None:
    engine = await started()
    deltas, end = await ask(engine, job_of())
    assert end.usage.completion == 128
    assert deltas[-1].finish_reason == "stop"
    await engine.close()


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "minLength": 3}, "age": {"$ref": "#/$defs/years"}, "tags": {}},
    "required": ["name", "age"],
    "$defs": {"years": {"type": "integer", "minimum": 18}},
}


@pytest.mark.parametrize(
    "constraint, said",
    [
        ({"response_format": {"type": "json_object"}}, "{}"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}}}, None),
        ({"structured_outputs": {"json": PERSON}}, None),
        ({"structured_outputs": {"choice": ["certainly", "no"]}}, "certainly"),
    ],
)
async def test_what_a_constraint_asks_for_is_said(constraint: dict[str, Any], said: str | None) -> None:
    engine = await started()
    deltas, finished = await ask(engine, job_of(max_tokens=200, **constraint))
    text = text_of(deltas)
    assert text == said if said else json.loads(text) == {"name": "xxx", "age": 18}
    assert deltas[-1].finish_reason == "stop" and finished.usage.completion == -(-len(text) // 4)
    deltas, _ = await ask(engine, job_of(max_tokens=1, **constraint))
    assert deltas[-1].finish_reason == ("stop" if said == "{}" else "length")


def test_a_schema_that_grows_without_end_has_a_small_instance() -> None:
    branch = {"type": "object", "required": ["l", "r"], "properties": {"l": {"$ref": "#"}, "r": {"$ref": "#"}}}
    wide = {"type": "array", "minItems": 10**9, "items": {"type": "array", "minItems": 10**9, "items": {}}}
    for schema in (branch, wide):
        assert len(json.dumps(instance(schema))) < 500_000


async def test_unwatched_and_bulk_jobs_get_few_outputs_and_all_tokens() -> None:
    engine = await started(sim_step_base_s=0.005)
    watched, _ = await ask(engine, job_of(max_tokens=48))
    bulk, _ = await ask(engine, job_of(max_tokens=48, tier="bulk"))
    unwatched, end = await ask(engine, job_of(max_tokens=48, stream=False))
    assert len(watched) > len(bulk) > len(unwatched)
    assert end.usage.completion == 48
    await engine.close()


@pytest.mark.parametrize(
    "change, refused",
    [
        ({"model": "gpt-99"}, ModelNotFound),
        ({"max_tokens": 0}, InvalidRequest),
        ({"n": -1}, InvalidRequest),
        ({"n": 20_000}, InvalidRequest),
        ({"messages": []}, InvalidRequest),
        ({"messages": [{"role": "user", "content": "x" * 20_000}]}, ContextLengthExceeded),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, InvalidRequest),
    ],
)
async def test_a_bad_body_is_refused(change: dict[str, Any], refused: type[Exception]) -> None:
    engine = await started()
    job = job_of()
    job.body.update(change)
    with pytest.raises(refused):
        await engine.prepare(job)
    await engine.close()


async def test_completions_take_a_text_or_token_ids_but_no_list_of_prompts() -> None:
    engine = await started()
    job = job_of()
    job.head.endpoint = COMPLETIONS
    job.body = {"prompt": [1, 2, 3], "max_tokens": 2}
    assert (await engine.prepare(job)).prompt_tokens == 3
    job.body = {"prompt": ["a", "b"]}
    with pytest.raises(InvalidRequest):
        await engine.prepare(job)
    await engine.close()


async def test_steps_take_the_time_of_the_formula() -> None:
    engine = await started(sim_step_base_s=0.004, sim_step_per_seq_s=0.001, sim_step_per_prefill_token_s=0.00001)
    job = job_of("x" * 4000, max_tokens=20)  # 1,000 tokens: the first step is 15 ms, the other 19 are 5 ms each
    begin = time.monotonic()
    await ask(engine, job)
    assert 0.110 <= time.monotonic() - begin < 2
    await engine.close()


async def test_no_more_run_than_there_are_slots_and_the_lower_priority_value_goes_first() -> None:
    engine = await started(max_num_seqs=1)
    order: list[str] = []

    async def one(name: str, priority: int) -> None:
        await ask(engine, job_of(name, max_tokens=200), priority)
        order.append(name)

    tasks = []
    for waiting, (name, priority) in enumerate((("first", 5), ("late", 9), ("urgent", 1))):
        tasks.append(asyncio.create_task(one(name, priority)))
        await until(lambda waiting=waiting: (engine.stats().running, engine.stats().waiting) == (1, waiting))  # type: ignore[misc]
    await asyncio.gather(*tasks)
    assert order == ["first", "urgent", "late"]
    assert (engine.stats().running, engine.stats().waiting, engine.stats().kv_usage) == (0, 0, 0.0)
    await engine.close()


async def test_cached_tokens_are_reported_and_counted_and_never_cross_a_salt() -> None:
    engine = build(settings_of(), lambda tenant: f"secret of {tenant}")
    await engine.start()
    prompt = "x" * 400 + " and so on"  # 102 tokens: 6 full blocks
    cached = []
    for tenant in ("acme", "acme", "globex", "acme"):
        job = job_of(prompt, max_tokens=2)
        job.head.tenant = tenant
        _, end = await ask(engine, job)
        cached.append(end.usage.cached)
    assert cached == [0, 96, 0, 96]
    assert (engine.stats().prefix_queries, engine.stats().prefix_hits) == (4 * 102, 2 * 96)
    await engine.close()


async def test_a_named_profile_takes_the_place_of_the_single_numbers() -> None:
    engine = build(settings_of(sim_profile="h200-8b", sim_kv_tokens=1), str)
    assert (await engine.start()).kv_tokens == 829_056
    begin = time.monotonic()
    await ask(engine, job_of(max_tokens=20))
    assert time.monotonic() - begin >= 20 * 0.0045
    await engine.close()


async def test_a_full_kv_cache_preempts_and_still_completes_everyone() -> None:
    engine = await started(sim_kv_tokens=400)
    results = await asyncio.gather(*[ask(engine, job_of("x" * 400, max_tokens=60)) for _ in range(6)])
    assert all(end.usage.completion == 60 for _, end in results)
    assert engine.stats().preemptions == sum(end.preemptions for _, end in results) > 0
    assert engine.stats().kv_usage == 0.0
    await engine.close()


async def test_a_queue_over_its_bound_is_overloaded_but_the_widest_job_runs_alone() -> None:
    engine = await started(max_num_seqs=2)
    _, end = await ask(engine, job_of(max_tokens=2, n=128))
    assert end.usage.completion == 256
    many = [asyncio.create_task(ask(engine, job_of(max_tokens=2000, n=66))) for _ in range(2)]
    await until(lambda: engine.stats().waiting == 130)
    with pytest.raises(Overloaded):
        await ask(engine, job_of(max_tokens=2))
    await engine.close()
    for lost in many:
        with pytest.raises(EngineLost):
            await lost


async def test_cancel_ends_with_what_was_made_and_frees_the_slots() -> None:
    engine = await started()
    job = job_of(max_tokens=2000, n=2)
    made = 0
    async for output in running(engine, job, await engine.prepare(job), "a1"):
        if isinstance(output, Finished):
            assert output.usage.completion == made
            break
        made += sum(d.tokens for d in output)
        assert all(d.finish_reason is None for d in output)
        if made >= 20:
            await engine.cancel("a1")
            await engine.cancel("a1")
    assert engine.stats().running == 0
    await engine.cancel("unknown")
    await engine.close()


async def test_closing_the_iterator_frees_the_slot() -> None:
    engine = await started()
    job = job_of(max_tokens=2000)
    outputs = running(engine, job, await engine.prepare(job), "a1")
    await anext(outputs)
    assert engine.stats().running == 1
    await outputs.aclose()
    assert (engine.stats().running, engine.stats().kv_usage) == (0, 0.0)
    await engine.close()


async def test_a_fault_hits_its_own_job_only() -> None:
    engine = await started()
    neighbour = asyncio.create_task(ask(engine, job_of(max_tokens=40)))
    with pytest.raises(EngineFault):
        await ask(engine, job_of("please [[sim:fault:5]]", max_tokens=40))
    _, end = await neighbour
    assert end.usage.completion == 40
    await engine.close()


async def test_a_death_ends_everyone_with_enginelost() -> None:
    engine = await started()
    neighbour = asyncio.create_task(ask(engine, job_of(max_tokens=1000)))
    with pytest.raises(EngineLost):
        await ask(engine, job_of("[[sim:lost:3]]", max_tokens=40))
    with pytest.raises(EngineLost):
        await neighbour
    assert engine.state is EngineState.DEAD
    with pytest.raises(EngineLost):
        await ask(engine, job_of())
    await engine.close()


async def test_a_hang_is_silent_and_shows_as_stalled() -> None:
    engine = await started(stall_s=0.05)
    hanging = asyncio.create_task(ask(engine, job_of("[[sim:hang]]", max_tokens=40)))
    await asyncio.sleep(0.02)
    assert not hanging.done()
    await asyncio.sleep(0.06)
    assert engine.state is EngineState.STALLED
    await engine.close()
    with pytest.raises(EngineLost):
        await hanging


async def test_an_idle_engine_is_never_stalled() -> None:
    engine = await started(stall_s=0.01)
    await asyncio.sleep(0.03)
    assert engine.state is EngineState.READY
    await ask(engine, job_of(max_tokens=3))
    await engine.close()


async def test_close_drains_for_as_long_as_it_may_then_loses_the_rest() -> None:
    engine = await started(sim_step_base_s=0.005)
    short = asyncio.create_task(ask(engine, job_of(max_tokens=10)))
    long = asyncio.create_task(ask(engine, job_of(max_tokens=1900)))
    await until(lambda: engine.stats().running == 2)
    await engine.close(drain_s=0.5)
    _, end = await short
    assert end.usage.completion == 10
    with pytest.raises(EngineLost):
        await long
    assert engine.state is EngineState.CLOSED


async def test_a_late_event_loop_finds_its_tokens_waiting() -> None:
    engine = await started(sim_step_base_s=0.001)
    job = job_of(max_tokens=60)
    outputs = running(engine, job, await engine.prepare(job), "a1")
    await anext(outputs)
    time.sleep(0.02)  # noqa: ASYNC251 - the loop is held on purpose
    output = await anext(outputs)
    assert isinstance(output, list) and output[0].tokens >= 10
    await outputs.aclose()
    await engine.close()


async def test_one_core_makes_far_more_than_50_000_tokens_a_second() -> None:
    engine = await started(max_num_seqs=512, sim_step_base_s=0.00001, max_num_batched_tokens=100_000)
    jobs = [job_of(f"{i}", max_tokens=100) for i in range(512)]
    begin = time.process_time()
    await asyncio.gather(*[ask(engine, job) for job in jobs])
    assert 51_200 / (time.process_time() - begin) > 100_000
    await engine.close()
