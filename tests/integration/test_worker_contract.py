"""One worker with the real model on the real parts: every promise of the contract that one worker can show."""

from __future__ import annotations

import hashlib
import json
import time
import urllib.request
import uuid
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import orjson
import pytest

from client import Client, StoreAccess
from schemas.names import COMPLETIONS, EMBEDDINGS, USAGE
from service.cli.process import WorkerProcess
from service.settings import StoreSettings
from service.store import Store
from tests.integration.command_kit import told
from tests.integration.conftest import TestStack
from tests.integration.delivery_kit import until
from tests.integration.worker_kit import MODEL, Fleet, Wire, check_numbering, job, new_id, text_of

PAST = (datetime.now(UTC) - timedelta(minutes=1)).isoformat()


@pytest.fixture(scope="module")
async def worker(fleet: Fleet) -> WorkerProcess:
    return await fleet.main()


@pytest.fixture(scope="module")
async def wire(stack: TestStack, worker: WorkerProcess) -> AsyncIterator[Wire]:
    async with Wire(stack.bootstrap, USAGE) as wire:
        yield wire


async def done(wire: Wire, value: dict[str, Any], **how: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Publishes a job; its terminal event and all its events, checked against the contract's models and numbering."""
    await wire.publish(value, **how)
    end = await wire.ended(value["id"])
    events = wire.events(value["id"])
    wire.valid(value["id"])
    check_numbering(events)
    assert len(wire.terminals(value["id"])) == 1
    return end, events


# -- what works


async def test_a_chat_streams_and_ends_with_the_fold_of_its_chunks(wire: Wire) -> None:
    end, events = await done(wire, job(new_id("chat"), max_tokens=24))
    assert (events[0]["type"], end["type"]) == ("started", "completed")
    assert sum(e["type"] == "chunk" for e in events) >= 1
    message = end["response"]["choices"][0]["message"]
    assert text_of(events) == message["content"] and message["role"] == "assistant"
    assert end["text_sha256"] == [hashlib.sha256(message["content"].encode()).hexdigest()]
    usage = end["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert "cached_tokens" in usage["prompt_tokens_details"]
    assert sum(e["tokens"] for e in events if e["type"] == "chunk") == usage["completion_tokens"]
    assert end["timings"]["total_ms"] > 0


async def test_a_job_that_wants_no_stream_gets_no_chunk(wire: Wire) -> None:
    value = job(new_id("final"))
    value["reply"]["stream"] = False
    end, events = await done(wire, value)
    assert end["type"] == "completed" and not [e for e in events if e["type"] == "chunk"]


async def test_a_plain_completion_streams(wire: Wire) -> None:
    value = job(new_id("plain"))
    value["endpoint"] = COMPLETIONS
    value["body"] = {
        "model": MODEL,
        "prompt": "The river Danube flows",
        "max_tokens": 12,
        "temperature": 0,
        "logprobs": 1,
    }
    end, events = await done(wire, value)
    choice = end["response"]["choices"][0]
    assert end["response"]["object"] == "text_completion" and choice["text"] == text_of(events)
    assert len(choice["logprobs"]["tokens"]) == end["usage"]["completion_tokens"]


async def test_two_choices_with_a_seed_are_the_same_twice(wire: Wire) -> None:
    texts = []
    for _ in range(2):
        end, events = await done(wire, job(new_id("two"), n=2, seed=11, temperature=1.0, max_tokens=12))
        choices = end["response"]["choices"]
        assert [c["index"] for c in choices] == [0, 1]
        assert [text_of(events, i) for i in (0, 1)] == [c["message"]["content"] for c in choices]
        texts.append([c["message"]["content"] for c in choices])
    assert texts[0] == texts[1]


async def test_a_stop_string_ends_the_text_before_it(wire: Wire) -> None:
    end, _ = await done(wire, job(new_id("stop"), "Count: one, two, three", stop=["e"], max_tokens=64))
    choice = end["response"]["choices"][0]
    assert choice["finish_reason"] == "stop" and "e" not in choice["message"]["content"]


async def test_logprobs_come_one_a_token(wire: Wire) -> None:
    end, _ = await done(wire, job(new_id("logprobs"), max_tokens=5, logprobs=True, top_logprobs=2))
    content = end["response"]["choices"][0]["logprobs"]["content"]
    assert len(content) == end["usage"]["completion_tokens"] and len(content[0]["top_logprobs"]) == 2


async def test_a_json_schema_is_kept(wire: Wire) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    end, _ = await done(wire, job(new_id("schema"), "Invent a person.", response_format=form, max_tokens=80))
    assert set(orjson.loads(end["response"]["choices"][0]["message"]["content"])) == {"name", "age"}


async def test_a_required_tool_is_called_the_same_in_chunks_and_response(wire: Wire) -> None:
    tool = {
        "type": "function",
        "function": {
            "name": "flow",
            "parameters": {
                "type": "object",
                "properties": {"river": {"type": "string", "maxLength": 10}},
                "required": ["river"],
                "additionalProperties": False,
            },
            "strict": True,
        },
    }
    body = {"tools": [tool], "tool_choice": {"type": "function", "function": {"name": "flow"}}, "max_tokens": 60}
    end, events = await done(wire, job(new_id("tool"), "How much water does the Rhine carry?", **body))
    (call,) = end["response"]["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "flow" and set(orjson.loads(call["function"]["arguments"])) == {"river"}
    streamed = [
        part["function"].get("arguments") or ""
        for e in events
        if e["type"] == "chunk"
        for choice in e["chunk"]["choices"]
        for part in choice["delta"].get("tool_calls") or []
    ]
    assert "".join(streamed) == call["function"]["arguments"]


async def test_persian_emoji_and_combining_characters_come_whole_in_every_chunk(wire: Wire) -> None:
    text = "سلام دنیا 🌊👩‍👩‍👧 é ñ ẹ̀ " * 3
    forced = {"choice": [text]}  # a model this small would not write it by itself
    end, events = await done(wire, job(new_id("unicode"), "Say it.", max_tokens=300, structured_outputs=forced))
    assert end["response"]["choices"][0]["message"]["content"] == text == text_of(events)
    assert sum(e["type"] == "chunk" for e in events) > 1
    for event in events:
        assert "\ufffd" not in orjson.dumps(event).decode()


async def test_metadata_comes_back_and_the_default_reply_topic_serves(wire: Wire) -> None:
    value = job(new_id("default"))
    del value["reply"]
    value["metadata"] = {"کلید": "مقدار"}
    end, events = await done(wire, value)
    assert end["metadata"] == {"کلید": "مقدار"} and any(e["type"] == "chunk" for e in events)


async def test_a_large_output_is_stored_and_its_digest_holds(stack: TestStack, worker: WorkerProcess) -> None:
    access = StoreAccess(stack.store_endpoint, "headrace", "headrace-secret")
    async with Client(stack.bootstrap, tenant="acme", model=MODEL, store=access) as client:
        body = {"messages": [{"role": "user", "content": "Tell a story."}], "max_tokens": 20}
        stored = await client.publish(body, output={"inline_max_bytes": 64})
        result = await stored.result(120)
        assert result.output is not None and result.output.key.startswith("v1/acme/")
        assert result.response["usage"]["completion_tokens"] == result.usage.completion_tokens


async def test_a_claim_checked_input_is_fetched_and_a_wrong_digest_is_refused(
    stack: TestStack, wire: Wire, worker: WorkerProcess
) -> None:
    store = Store(StoreSettings(endpoint=stack.store_endpoint))
    body = orjson.dumps({"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4})
    try:
        ref = await store.put(f"v1/acme/inputs/{new_id('in')}.json", body, "application/json")
    finally:
        store.close()
    value = job(new_id("input"))
    del value["body"]
    good = {**value, "input": {k: ref[k] for k in ("bucket", "key", "size", "sha256", "content_type")}}
    assert (await done(wire, good))[0]["type"] == "completed"
    bad = {**good, "id": new_id("digest"), "input": {**good["input"], "sha256": "0" * 64}}
    end, _ = await done(wire, bad)
    assert (end["type"], end["error"]["code"]) == ("failed", "input_unavailable")


async def test_the_prefix_cache_serves_its_own_tenant_only(wire: Wire) -> None:
    prompt = f"{new_id('prefix')} " + "The headrace carries water from the weir to the wheel. " * 40
    cached = {}
    for name, tenant in (("first", "acme"), ("same", "acme"), ("other", "globex")):
        end, _ = await done(wire, job(new_id(name), prompt, tenant=tenant, max_tokens=4), key=tenant.encode())
        cached[name] = end["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached["first"] == cached["other"] == 0 and cached["same"] >= 128


async def test_every_attempt_leaves_one_usage_record(wire: Wire) -> None:
    value = job(new_id("usage"), max_tokens=6)
    end, _ = await done(wire, value)

    def records() -> list[dict[str, Any]]:
        return [r for r in (orjson.loads(x.value) for x in wire.of(USAGE)) if r["job_id"] == value["id"]]

    await until(records, "the usage record")
    (record,) = records()
    assert record["completion_tokens"] == end["usage"]["completion_tokens"] and record["attempt"] == end["attempt"]


# -- bad input: each gets what the contract says, and later jobs go on


def _without(value: dict[str, Any], *names: str) -> dict[str, Any]:
    return {k: v for k, v in value.items() if k not in names}


def _nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return {"type": "json_schema", "json_schema": {"name": "deep", "schema": schema}}


IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/x.png"}}]}]
BLOB = {"size": 3, "sha256": "0" * 64, "content_type": "application/json"}

# name → (change to a good job, expected "type/code")
REFUSED: dict[str, tuple[Any, str]] = {
    "unknown field in the job": (lambda j: {**j, "prioritty": 3}, "failed/invalid_job"),
    "unknown field in the body": (lambda j: {**j, "body": {**j["body"], "max_tokenss": 5}}, "failed/invalid_request"),
    "unknown schema version": (lambda j: {**j, "schema_version": 99}, "failed/invalid_job"),
    "unknown endpoint": (lambda j: {**j, "endpoint": "/v1/audio/speech"}, "failed/invalid_job"),
    "unknown tenant": (lambda j: {**j, "tenant": "nobody-here"}, "failed/unknown_tenant"),
    "unknown model": (lambda j: {**j, "body": {**j["body"], "model": "gpt-99"}}, "failed/model_not_found"),
    "embeddings": (
        lambda j: {**j, "endpoint": EMBEDDINGS, "body": {"model": MODEL, "input": "x"}},
        "failed/model_not_found",
    ),
    "no body": (lambda j: _without(j, "body"), "failed/invalid_job"),
    "prompt over the context": (
        lambda j: {**j, "body": {**j["body"], "messages": [{"role": "user", "content": "river " * 20_000}]}},
        "failed/context_length_exceeded",
    ),
    "max_tokens 0": (lambda j: {**j, "body": {**j["body"], "max_tokens": 0}}, "failed/invalid_request"),
    "max_tokens -1": (lambda j: {**j, "body": {**j["body"], "max_tokens": -1}}, "failed/invalid_request"),
    "max_tokens 10^9": (lambda j: {**j, "body": {**j["body"], "max_tokens": 10**9}}, "failed/invalid_request"),
    "n 20,000": (lambda j: {**j, "body": {**j["body"], "n": 20_000}}, "failed/invalid_request"),
    "echo": (
        lambda j: {**j, "endpoint": COMPLETIONS, "body": {"model": MODEL, "prompt": "a", "echo": True}},
        "failed/invalid_request",
    ),
    "a list of prompts": (
        lambda j: {**j, "endpoint": COMPLETIONS, "body": {"model": MODEL, "prompt": ["a", "b"]}},
        "failed/invalid_request",
    ),
    "a schema of 100 levels": (
        lambda j: {**j, "body": {**j["body"], "response_format": _nested(100)}},
        "failed/invalid_request",
    ),
    "an image by URL": (lambda j: {**j, "body": {**j["body"], "messages": IMAGE}}, "failed/invalid_request"),
    "a cache salt": (lambda j: {**j, "body": {**j["body"], "cache_salt": "mine"}}, "failed/invalid_request"),
    "deadline past": (lambda j: {**j, "deadline": PAST}, "expired/"),
    "a foreign bucket": (
        lambda j: {**_without(j, "body"), "input": {"bucket": "not-ours", "key": "a", **BLOB}},
        "failed/not_authorized",
    ),
    "a missing key": (
        lambda j: {**_without(j, "body"), "input": {"bucket": "outputs", "key": "v1/acme/none", **BLOB}},
        "failed/input_unavailable",
    ),
}

# name → raw record; {id} is replaced
DEAD: dict[str, bytes | None] = {
    "not JSON": b"this is not json {id}",
    "NaN": b'{"schema_version":1,"id":"{id}","tenant":"acme","body":{"temperature":NaN}}',
    "Infinity": b'{"schema_version":1,"id":"{id}","tenant":"acme","body":{"temperature":Infinity}}',
    "empty": b"",
    "null": None,
    "900 kB of noise": b"\x93\x00\xff{id}" * 90_000,
    "invalid UTF-8": b'{"id": "\xff\xfe{id}"}',
    "no id": b'{"schema_version":1,"tenant":"acme","marker":"{id}"}',
    "a forbidden character in the id": b'{"schema_version":1,"id":"{id}/x","tenant":"acme"}',
}
DEAD_REPLY = {
    "a missing reply topic": "no-such-topic-xyz",
    "an internal reply topic": "__consumer_offsets",
    "a jobs topic as reply topic": "inference.default.jobs.standard",
}


async def test_every_bad_input_is_answered_or_a_dead_letter_and_later_jobs_go_on(wire: Wire) -> None:
    refused = {name: new_id("bad") for name in REFUSED}
    for name, (change, _) in REFUSED.items():
        await wire.publish(change(job(refused[name])))
    seed = new_id("seed")
    await wire.publish(orjson.dumps(job(seed)).replace(b'"max_tokens"', b'"seed":1180591620717411303424,"max_tokens"'))
    dead = {name: new_id("dead") for name in (*DEAD, *DEAD_REPLY)}
    for name, raw in DEAD.items():
        marker = dead[name].encode()
        body = raw if raw is None else raw.replace(b"{id}", marker)[:900_000]
        await wire.publish(body, headers=[("x-marker", marker)])
    for name, topic in DEAD_REPLY.items():
        await wire.publish({**job(dead[name]), "reply": {"topic": topic}})
    binary = new_id("binary")
    await wire.publish(
        job(binary), headers=[("x-binary", b"\xff\xfe\x00"), ("x-null", None), ("traceparent", b"00-zz-yy")]
    )

    assert (await wire.ended(binary))["type"] == "completed"
    for name, (_, expected) in REFUSED.items():
        end = await wire.ended(refused[name])
        got = f"{end['type']}/{(end.get('error') or {}).get('code', '')}"
        assert got == expected, f"{name}: {got}, expected {expected}"
        assert end["type"] == "expired" or (end["error"]["message"] and end["error"]["retriable"] in (True, False))
        wire.valid(refused[name])
    assert (await wire.ended(seed))["error"]["code"] in ("invalid_request", "invalid_job")
    for name, marker in dead.items():
        await until(lambda marker=marker: wire.dead_with(marker), f"the dead letter of: {name}")
    unknown = (await wire.ended(refused["unknown field in the body"]))["error"]["message"]
    assert "max_tokenss" in unknown and "max_tokens" in unknown


# -- what an operator sees


async def test_the_worker_tells_its_health_and_its_figures(wire: Wire, worker: WorkerProcess) -> None:
    def get(path: str) -> tuple[int, str]:
        with urllib.request.urlopen(worker.url + path, timeout=5) as answer:
            return answer.status, answer.read().decode()

    assert get("/livez")[0] == 200
    status, ready = get("/readyz")
    assert status == 200 and json.loads(ready)
    metrics = get("/metrics")[1]
    assert "headrace_" in metrics and "vllm:" in metrics
    assert json.loads(get("/schema/asyncapi")[1])["asyncapi"].startswith("3")


async def test_the_operators_commands_agree_with_the_running_engine(stack: TestStack, worker: WorkerProcess) -> None:
    model = ("--model", str(stack.model), "--kv-cache", "1", "--max-num-seqs", "32")
    code, found = await told(stack.bootstrap, "default", "capacity", *model, "--worker", worker.url)
    assert code == 0 and found["agree"] is True and found["warnings"] == []
    assert found["engine"]["kv_tokens"] == found["formula"]["kv_tokens"] == 46_592  # 364 blocks of 128 in 1 GiB
    code, found = await told(stack.bootstrap, "default", "selftest", "cache-isolation")
    assert code == 0 and [check["name"] for check in found["checks"] if not check["ok"]] == []
    assert [check["name"] for check in found["checks"]].count("isolated") == 4


async def test_one_trace_leads_from_publisher_to_reply(stack: TestStack, wire: Wire) -> None:
    if not stack.zipkin:
        pytest.skip("no Collector and viewer here: Go or Maven is missing")
    from service.cli.trace import fetch

    trace, parent = uuid.uuid4().hex, "00f067aa0ba902b7"
    value = job(new_id("trace"), max_tokens=8)
    started = time.time()
    await done(wire, value, headers=[("traceparent", f"00-{trace}-{parent}-01".encode())])
    spans = fetch(stack.zipkin, trace, 30.0, ("process", "queue", "admission", "chat", "prefill", "decode", "send"))
    assert {span["traceId"] for span in spans} == {trace}
    by_name = {span["name"].split(" ")[0]: span for span in spans}
    process = by_name["process"]
    assert process["parentId"] == parent
    for name in ("queue", "admission", "chat", "send"):
        assert by_name[name]["parentId"] == process["id"], name
    for name in ("prefill", "decode"):
        assert by_name[name]["parentId"] == by_name["chat"]["id"], name
    for span in spans:
        assert started - 5 < span["timestamp"] / 1e6 < time.time() + 5
        assert span["duration"] <= process["duration"] + 1000
    assert by_name["decode"]["timestamp"] >= by_name["prefill"]["timestamp"]
    events = wire.events(value["id"])
    assert events[0]["trace_id"] == trace
