"""Request bodies: what passes, and what each wrong one is told."""

from __future__ import annotations

from typing import Any

import pytest

from schemas.bodies import BODIES, check_body
from schemas.constraints import MAX_NESTING, nesting
from schemas.errors import ErrorCode, Refusal
from schemas.names import CHAT, COMPLETIONS, EMBEDDINGS
from schemas.tenants import Tenant, TenantLimits

TENANT = Tenant(id="acme")
MESSAGES = [{"role": "user", "content": "Name three rivers."}]


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": MESSAGES, **fields}


def plain(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": "The river", **fields}


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def formatted(schema: Any) -> dict[str, Any]:
    return chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})


def image(url: str) -> dict[str, Any]:
    return chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}])


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

# endpoint, body, what the message must contain
INVALID = {
    "not an object": (CHAT, [1], "body must be an object"),
    "typo": (CHAT, chat(max_tokenss=5), "did you mean max_tokens?"),
    "typo in a message": (CHAT, chat(messages=[{"role": "user", "contnet": "x"}]), "did you mean content?"),
    "unshowable key": (CHAT, chat(**{"<script>\n": 1}), "a key that cannot be shown"),
    "no model": (CHAT, {"messages": MESSAGES}, "body.model is missing"),
    "null model": (CHAT, chat(model=None), "body.model is missing"),
    "empty messages": (CHAT, chat(messages=[]), "body.messages must have at least 1"),
    "no messages": (CHAT, {"model": "m"}, "body.messages is missing"),
    "messages not a list": (CHAT, chat(messages={"role": "user"}), "body.messages must be a list"),
    "message not an object": (CHAT, chat(messages=["hi"]), "body.messages[0] must be an object"),
    "unknown role": (CHAT, chat(messages=[{"role": "pirate", "content": "x"}]), "unknown role"),
    "no role": (CHAT, chat(messages=[{"content": "x"}]), "has no role"),
    "no content": (CHAT, chat(messages=[{"role": "user"}]), "body.messages[0].content is missing"),
    "silent assistant": (CHAT, chat(messages=[{"role": "assistant", "content": None}]), "needs content or tool_calls"),
    "content a number": (CHAT, chat(messages=[{"role": "user", "content": 5}]), "content must be a string"),
    "tool message without id": (CHAT, chat(messages=[{"role": "tool", "content": "x"}]), "tool_call_id is missing"),
    "unknown part": (
        CHAT,
        chat(messages=[{"role": "user", "content": [{"type": "hologram"}]}]),
        "unknown role or type",
    ),
    "image by URL": (CHAT, image("http://127.0.0.1:9/x.png"), "data: URL"),
    "image by https": (CHAT, image("https://example.com/x.png"), "data: URL"),
    "file URL": (CHAT, image("file:///etc/passwd"), "data: URL"),
    "max_tokens 0": (CHAT, chat(max_tokens=0), "body.max_tokens must be at least 1"),
    "max_tokens -1": (CHAT, chat(max_tokens=-1), "body.max_tokens must be at least 1"),
    "max_tokens 10^9": (CHAT, chat(max_tokens=10**9), "body.max_tokens must be at most"),
    "max_tokens a fraction": (CHAT, chat(max_tokens=1.5), "body.max_tokens must be an integer"),
    "max_tokens true": (CHAT, chat(max_tokens=True), "body.max_tokens must be an integer"),
    "max_completion_tokens 0": (CHAT, chat(max_completion_tokens=0), "body.max_completion_tokens must be at least 1"),
    "min over max": (CHAT, chat(max_tokens=5, min_tokens=6), "body.min_tokens"),
    "temperature text": (CHAT, chat(temperature="hot"), "body.temperature must be a number"),
    "temperature 5": (CHAT, chat(temperature=5), "body.temperature must be at most 2"),
    "top_p 0": (CHAT, chat(top_p=0), "body.top_p must be greater than 0"),
    "top_k -2": (CHAT, chat(top_k=-2), "body.top_k must be at least -1"),
    "n 0": (CHAT, chat(n=0), "body.n must be at least 1"),
    "n 20000": (CHAT, chat(n=20_000), "body.n must be at most 128"),
    "seed over int64": (CHAT, chat(seed=2**63), "body.seed must be at most"),
    "seed under int64": (CHAT, chat(seed=-(2**63) - 1), "body.seed must be at least"),
    "stop too many": (CHAT, chat(stop=["a"] * 5), "body.stop must"),
    "stop empty": (CHAT, chat(stop=""), "body.stop must have at least 1 characters"),
    "logit_bias not an id": (CHAT, chat(logit_bias={"river": 1}), "body.logit_bias.river must match"),
    "top_logprobs alone": (CHAT, chat(top_logprobs=2), "logprobs: true"),
    "top_logprobs 100": (CHAT, chat(logprobs=True, top_logprobs=100), "body.top_logprobs must be at most 20"),
    "echo": (CHAT, chat(echo=True), "body.echo is refused: put the prompt before"),
    "echo of plain": (COMPLETIONS, plain(echo=True), "body.echo is refused"),
    "best_of": (COMPLETIONS, plain(best_of=3), "body.best_of is refused: send n"),
    "beam search": (COMPLETIONS, plain(use_beam_search=True), "beam search is not offered"),
    "prompt_logprobs": (CHAT, chat(prompt_logprobs=0), "body.prompt_logprobs is refused"),
    "cache_salt": (CHAT, chat(cache_salt="mine"), "derives it from the tenant"),
    "priority": (CHAT, chat(priority=-5), "jobs topic of the tier"),
    "kv_transfer_params": (CHAT, chat(kv_transfer_params={"a": 1}), "service's own"),
    "vllm_xargs": (CHAT, chat(vllm_xargs={"a": 1}), "engine's own"),
    "chat_template": (CHAT, chat(chat_template="{{ 1 }}"), "template"),
    "guided_json": (CHAT, chat(guided_json={}), "response_format"),
    "functions": (CHAT, chat(functions=[]), "use tools"),
    "suffix": (COMPLETIONS, plain(suffix="x"), "fill-in-the-middle"),
    "messages for plain": (COMPLETIONS, plain(messages=MESSAGES), "body.messages is not a known field"),
    "prompt list": (COMPLETIONS, plain(prompt=["a", "b"]), "one job per prompt"),
    "prompt list of one": (COMPLETIONS, plain(prompt=["a"]), "one job per prompt"),
    "prompts of ids": (COMPLETIONS, plain(prompt=[[1], [2]]), "one job per prompt"),
    "prompt empty": (COMPLETIONS, plain(prompt=""), "body.prompt must have at least 1"),
    "prompt no ids": (COMPLETIONS, plain(prompt=[]), "body.prompt must"),
    "prompt negative id": (COMPLETIONS, plain(prompt=[1, -1]), "body.prompt[1] must be at least 0"),
    "no prompt": (COMPLETIONS, {"model": "m"}, "body.prompt is missing"),
    "tool_choice without tools": (CHAT, chat(tool_choice="auto"), "needs tools"),
    "unknown named tool": (
        CHAT,
        chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "g"}}),
        "not among its tools",
    ),
    "tool name": (CHAT, chat(tools=[{"type": "function", "function": {"name": "a b"}}]), "function.name must match"),
    "schema nested 100 levels": (CHAT, formatted(nested(100)), "nested more than 64 levels"),
    "schema nested 5,000 levels": (CHAT, formatted(nested(5_000)), "nested more than 64 levels"),
    "tool nested": (
        CHAT,
        chat(tools=[{"type": "function", "function": {"name": "f", "parameters": nested(40)}}]),
        "64",
    ),
    "schema not an object": (CHAT, formatted("string"), "schema must be an object"),
    "schema missing": (CHAT, chat(response_format={"type": "json_schema"}), "needs json_schema"),
    "schema with a far $ref": (CHAT, formatted({"$ref": "http://127.0.0.1:9/s.json"}), "$ref"),
    "enum of 1,001": (CHAT, formatted({"enum": list(range(1001))}), "enum"),
    "pattern over 4 KiB": (CHAT, formatted({"type": "string", "pattern": "a" * 4097}), "pattern"),
    "choices 1,001": (CHAT, chat(structured_outputs={"choice": ["a"] * 1001}), "choice must have at most 1000"),
    "regex over 4 KiB": (CHAT, chat(structured_outputs={"regex": "é" * 2049}), "at most 4096 bytes"),
    "two constraints": (CHAT, chat(structured_outputs={"regex": "a", "choice": ["a"]}), "exactly one"),
    "no constraint": (CHAT, chat(structured_outputs={}), "exactly one"),
    "both ways": (
        CHAT,
        chat(structured_outputs={"regex": "a"}, response_format={"type": "json_object"}),
        "not both",
    ),
    "embedding of nothing": (EMBEDDINGS, {"model": "m", "input": ""}, "body.input"),
}


@pytest.mark.parametrize("endpoint, body, message", INVALID.values(), ids=INVALID.keys())
def test_a_wrong_body_is_an_invalid_request_that_says_what_to_do(endpoint: str, body: Any, message: str) -> None:
    with pytest.raises(Refusal) as refused:
        check_body(endpoint, body, TENANT)
    assert refused.value.code == ErrorCode.INVALID_REQUEST
    assert message in refused.value.message
    assert "\n" not in refused.value.message and len(refused.value.message) < 600


SECRET = "tell-nobody-4711"


@pytest.mark.parametrize(
    "body",
    [
        chat(temperature=SECRET),
        chat(tool_choice=SECRET),
        chat(reasoning_effort=SECRET),
        chat(messages=[{"role": SECRET, "content": SECRET}]),
        chat(messages=[{"role": "user", "content": [{"type": SECRET}]}]),
        chat(stop=[SECRET, 5]),
        chat(response_format={"type": SECRET}),
        chat(logprobs=SECRET),
        chat(seed=SECRET),
        image(f"https://{SECRET}/x"),
        chat(structured_outputs={"regex": SECRET * 500}),
    ],
)
def test_what_a_caller_sent_is_never_repeated(body: dict[str, Any]) -> None:
    with pytest.raises(Refusal) as refused:
        check_body(CHAT, body, TENANT)
    assert SECRET not in refused.value.message


VALID = {
    "smallest": (CHAT, chat()),
    "OpenAI's usual": (CHAT, chat(temperature=1, top_p=1.0, n=1, seed=-1, stop=None, user="u", logprobs=None)),
    "streamed": (CHAT, chat(stream=True, stream_options={"include_usage": True})),
    "engine's own": (CHAT, chat(top_k=-1, min_p=0, repetition_penalty=1.2, min_tokens=0, ignore_eos=True)),
    "a response's message": (
        CHAT,
        chat(
            messages=[
                *MESSAGES,
                {"role": "assistant", "content": "x", "refusal": None, "annotations": [], "audio": None},
            ]
        ),
    ),
    "tool round": (
        CHAT,
        chat(
            tools=[TOOL],
            tool_choice={"type": "function", "function": {"name": "f"}},
            messages=[
                {"role": "developer", "content": "x"},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
                },
                {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "4"}]},
            ],
        ),
    ),
    "inline image": (CHAT, image("data:image/png;base64,AAAA")),
    "defaults that ask for nothing": (
        CHAT,
        chat(echo=False, use_beam_search=False, functions=None, modalities=["text"]),
    ),
    "schema of 31 objects": (CHAT, formatted(nested(31))),
    "local $ref": (CHAT, formatted({"$defs": {"a": {"type": "string"}}, "properties": {"x": {"$ref": "#/$defs/a"}}})),
    "largest seed": (CHAT, chat(seed=2**63 - 1)),
    "token ids": (COMPLETIONS, plain(prompt=[1, 2, 3])),
    "plain": (COMPLETIONS, plain(logprobs=5, stop=["\n"], best_of=None)),
    "embeddings": (EMBEDDINGS, {"model": "m", "input": ["a", "b"], "user": "u"}),
    "embeddings of ids": (EMBEDDINGS, {"model": "m", "input": [[1, 2], [3]]}),
}


@pytest.mark.parametrize("endpoint, body", VALID.values(), ids=VALID.keys())
def test_what_openais_clients_send_passes(endpoint: str, body: dict[str, Any]) -> None:
    before = repr(body)
    clean = check_body(endpoint, body, TENANT)
    assert repr(body) == before, "the caller's document is not changed: its digest is taken from it"
    assert set(clean) <= set(BODIES[endpoint].model_fields), "only fields that the engine may see"
    assert None not in clean.values()
    for message in clean.get("messages", ()):
        assert None not in message.values() and "annotations" not in message


def test_limits_of_a_tenant_are_quota_exceeded_with_limit_and_value() -> None:
    tenant = Tenant(id="acme", limits=TenantLimits(n=2, output_tokens=100, schema_bytes=50))
    for body, parts in (
        (chat(n=3), ("3", "2")),
        (chat(max_tokens=101), ("101", "100")),
        (chat(max_completion_tokens=101, max_tokens=5), ("101", "100")),
        (formatted({"description": "x" * 60}), ("50",)),
        (chat(structured_outputs={"grammar": "x" * 51}), ("51", "50")),
    ):
        with pytest.raises(Refusal) as refused:
            check_body(CHAT, body, tenant)
        assert refused.value.code == ErrorCode.QUOTA_EXCEEDED
        assert all(part in refused.value.message for part in parts)


def test_a_limited_tenant_that_names_no_length_gets_its_limit() -> None:
    tenant = Tenant(id="acme", limits=TenantLimits(output_tokens=100))
    assert check_body(CHAT, chat(), tenant)["max_tokens"] == 100
    assert "max_tokens" not in check_body(COMPLETIONS, plain(), tenant), "OpenAI's default is 16 there"
    assert "max_tokens" not in check_body(CHAT, chat(max_completion_tokens=7), tenant)


def test_template_arguments_only_where_the_tenant_may() -> None:
    body = chat(chat_template_kwargs={"enable_thinking": False})
    with pytest.raises(Refusal) as refused:
        check_body(CHAT, body, TENANT)
    assert refused.value.code == ErrorCode.NOT_AUTHORIZED
    assert check_body(CHAT, body, Tenant(id="acme", chat_template_kwargs=True))["chat_template_kwargs"]


@pytest.mark.parametrize(
    "url, allowed",
    [
        ("https://images.example.com/x.png", True),
        ("https://images.example.com:443/x.png", True),
        ("https://images.example.com:8080/x.png", False),
        ("http://images.example.com/x.png", False),
        ("https://images.example.com.evil.org/x.png", False),
        ("https://images.example.com@evil.org/x.png", False),
        ("https://user@images.example.com/x.png", False),
        ("https://evil.org\\@images.example.com/x.png", False),
        ("https://[::1/x.png", False),
    ],
)
def test_media_is_fetched_only_from_hosts_of_the_registry(url: str, allowed: bool) -> None:
    tenant = Tenant(id="acme", media_domains=["images.example.com"])
    if allowed:
        check_body(CHAT, image(url), tenant)
    else:
        with pytest.raises(Refusal):
            check_body(CHAT, image(url), tenant)


def test_nesting_is_counted_as_the_engine_counts_it() -> None:
    assert nesting(5, 9) == 0
    assert nesting({"a": [1, {"b": 2}]}, 9) == 3
    assert nesting(nested(10_000), MAX_NESTING) == MAX_NESTING + 1
