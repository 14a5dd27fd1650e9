"""Hostile records: mutated jobs, broken JSON, random bytes, headers that no sane producer writes. Pure, by seed.

What a record would do to a well-behaved service is not judged here; that every one is answered or kept is (fuzz.py).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import orjson

from load.flood import Item
from schemas.names import CHAT, COMPLETIONS, DEAD_LETTERS, REPLIES, SCHEMA_VERSION, USAGE

# Placeholder in a header's name; on the wire (flood's `change`) it becomes bytes that are no UTF-8.
BROKEN_NAME = b"no-utf8!"
BROKEN_BYTES = b"\xff\xfe\xc0\x80\xed\xa0\x80\xf5"
assert len(BROKEN_NAME) == len(BROKEN_BYTES)

# Shares of the kinds of record; the rest is mutated jobs.
VALID, SPLICED, NOISE, LARGE = 0.05, 0.30, 0.10, 0.0005
HEADERS = 0.5
LARGE_BYTES = (70_000, 900_000)

TEXTS = (
    *("", " ", "\x00", "a", "A" * 129, "A" * 5000, "../../etc/passwd", "a|b", "a/b/0", "naïve", "ключ", "🌊" * 40),
    *("\ud800", "\udfff\ud800", "null", "true", "-1", "1e999", "NaN", "{{}}", "%s%n", "'; drop table jobs; --"),
    *("acme", "globex", "inference.replies", "inference.faults.status", "__consumer_offsets", "no-such-topic"),
    *(REPLIES, USAGE, DEAD_LETTERS, CHAT, COMPLETIONS, "/v1/embeddings", "/v1/audio/speech"),
    *("2020-01-01T00:00:00Z", "2020-01-01", "9999-12-31T23:59:59+14:00", "0000-00-00T00:00:00Z", "tomorrow"),
)
NUMBERS = (0, -1, 1, 2, 7, 1.5, -0.0, 2**31, 2**53 + 1, 2**63 - 1, -(2**63), 1e308, 1e-320)
NAMES = (
    *("schema_version", "id", "run", "tenant", "endpoint", "body", "input", "reply", "topic", "partition", "stream"),
    *("deadline", "not_before", "conversation", "metadata", "output", "store", "inline_max_bytes", "ttl_days"),
    *("model", "messages", "prompt", "max_tokens", "n", "role", "content", "tools", "logprobs", "stop", "seed"),
    *("response_format", "structured_outputs", "priority", "cache_salt", "vllm_xargs", "request_id", "__proto__"),
)
# Text that JSON readers differ on, spliced into a document's bytes.
SPLICES = (
    *(b"NaN", b"Infinity", b"-Infinity", b"1e9999", b"123456789012345678901234567890", b"0x10", b"01", b"+1", b"\xff"),
    *(b"\xed\xa0\x80", b"\\ud800", b"\\u0000", b"\x00", b'"', b"{", b"}", b"[", b"]", b",", b":", b"\\", b"/*x*/"),
    *(b'"id":"again",', b'"tenant":"globex",', b"null", b"true", b"[" * 2000, b'{"a":' * 1500, b"\xef\xbb\xbf"),
)
HEADER_NAMES = (
    *("traceparent", "tracestate", "baggage", "correlation_id", "content-type", "reply_to", "reply_partition"),
    *("kafka_replyTopic", "kafka_replyPartition", "kafka_correlationId", "headrace-origin", "headrace-starts"),
    *(
        "headrace-reason",
        "headrace-message",
        "headrace-attempts",
        "authorization",
        "",
        "t",
        "a",
        "s",
        "ключ",
        "x" * 300,
    ),
)
HEADER_VALUES = (
    *(None, b"", b"\x00", b"\xff\xfe", b"0", b"-1", b"99999999999", b"\x00\x00\x00\x07", b"\xff\xff\xff\xff"),
    *(b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", b"00-" + b"0" * 32 + b"-" + b"0" * 16 + b"-00"),
    *(b"inference.faults.jobs.bulk/0/0", b"/0/0", b"a/b/c", b"x" * 4000, b"a=b,c=d", b"k=v;p=q" * 50),
    *(REPLIES.encode(), b"no-such-topic", DEAD_LETTERS.encode(), b"Bearer ey.ey.ey"),
)


def items(count: int, seed: int, run: str, model: str) -> Iterator[Item]:
    """`count` records, the same for the same arguments."""
    chance = random.Random(f"hostile/{seed}")
    for number in range(count):
        yield _item(chance, f"{run}-{number}", model)


def _item(chance: random.Random, id: str, model: str) -> Item:
    draw = chance.random()
    value: bytes | None
    if draw < VALID:
        value = orjson.dumps(_document(chance, id, model))
    elif draw < VALID + SPLICED:
        value = _splice(chance, orjson.dumps(_document(chance, id, model)))
    elif draw < VALID + SPLICED + NOISE:
        value = chance.choice((None, b"", b"null", b"[]", b'"text"', chance.randbytes(chance.randrange(1, 2000))))
    elif draw < VALID + SPLICED + NOISE + LARGE:
        value = _large(chance, id, model)
    else:
        value = _dumps(_mutate(chance, _document(chance, id, model)))
    key = chance.choice((None, b"", b"acme", b"acme|7", b"\xff\x00", chance.randbytes(8), id.encode()))
    if key is None and value is None:
        key = b""  # the client library writes no record of neither
    return Item(key, value, _headers(chance) if chance.random() < HEADERS else ())


def _document(chance: random.Random, id: str, model: str) -> dict[str, Any]:
    body: dict[str, Any] = {"model": model, "max_tokens": chance.randint(1, 6), "temperature": 0}
    chat = chance.random() < 0.5
    if chat:
        body["messages"] = [{"role": "user", "content": "Name a river."}]
    else:
        body["prompt"] = "river water mill"
    document: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "id": id,
        "tenant": chance.choice(("acme", "globex", "initech")),
        "endpoint": CHAT if chat else COMPLETIONS,
        "body": body,
        "reply": {"topic": REPLIES, "stream": chance.random() < 0.5},
    }
    if chance.random() < 0.2:
        document["metadata"] = {"a": "b"}
    if chance.random() < 0.2:
        document["output"] = {"inline_max_bytes": 1000}
    return document


# ── mutations of a document ──────────────────────────────────────────────────────────────────────────────────────────


def _mutate(chance: random.Random, document: dict[str, Any]) -> Any:
    root = {"": document}
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        nodes: list[tuple[Any, Any]] = []
        _walk(root, nodes)
        if not nodes:
            break
        holder, key = chance.choice(nodes)
        chance.choice(MUTATIONS)(chance, holder, key)
    return root.get("")


def _walk(node: Any, nodes: list[tuple[Any, Any]]) -> None:
    children = list(node.items()) if isinstance(node, dict) else list(enumerate(node))
    for key, child in children:
        nodes.append((node, key))
        if isinstance(child, dict | list):
            _walk(child, nodes)


def _replace(chance: random.Random, holder: Any, key: Any) -> None:
    holder[key] = _anything(chance, 0)


def _remove(chance: random.Random, holder: Any, key: Any) -> None:
    del holder[key]


def _rename(chance: random.Random, holder: Any, key: Any) -> None:
    if isinstance(holder, dict) and key:
        holder[chance.choice((key.upper(), key + "s", key[:-1], chance.choice(NAMES)))] = holder.pop(key)


def _add(chance: random.Random, holder: Any, key: Any) -> None:
    target = holder[key]
    if isinstance(target, dict):
        target[chance.choice(NAMES)] = _anything(chance, 0)
    elif isinstance(target, list):
        target.append(_anything(chance, 0))
    else:
        holder[key] = [target]


MUTATIONS: tuple[Callable[[random.Random, Any, Any], None], ...] = (_replace, _replace, _remove, _rename, _add, _add)


def _anything(chance: random.Random, depth: int) -> Any:
    draw = chance.random()
    if draw < 0.35:
        return chance.choice(TEXTS)
    if draw < 0.60:
        return chance.choice(NUMBERS)
    if draw < 0.75:
        return chance.choice((None, True, False))
    if depth > 2:
        return {}
    size = chance.choice((0, 1, 2, 20))
    if draw < 0.88:
        return [_anything(chance, depth + 1) for _ in range(size)]
    return {chance.choice(NAMES) + str(n or ""): _anything(chance, depth + 1) for n in range(size)}


def _dumps(document: Any) -> bytes:
    """Lone surrogates, which JSON can spell and a strict writer does not write, as escapes."""
    try:
        return orjson.dumps(document)
    except TypeError:
        import json

        return json.dumps(document).encode()


# ── mutations of bytes ───────────────────────────────────────────────────────────────────────────────────────────────


def _splice(chance: random.Random, value: bytes) -> bytes:
    data = bytearray(value)
    for _ in range(chance.choice((1, 1, 2, 5))):
        at = chance.randrange(len(data) + 1)
        match chance.randrange(4):
            case 0:
                data[at:at] = chance.choice(SPLICES)
            case 1:
                del data[at : at + chance.randint(1, 40)]
            case 2 if at < len(data):
                data[at] ^= 1 << chance.randrange(8)
            case _:
                data[at : at + chance.randint(1, 8)] = chance.choice(SPLICES)
    return bytes(data)


def _large(chance: random.Random, id: str, model: str) -> bytes:
    document = _document(chance, id, model)
    size = chance.randint(*LARGE_BYTES)
    match chance.randrange(4):
        case 0:
            document["body"] = {**document["body"], "prompt": "x" * size}
        case 1:
            document["metadata"] = {f"k{n}": "v" * 60 for n in range(size // 70)}
        case 2:
            return chance.randbytes(size)
        case _:
            return orjson.dumps(document) + b" " * size
    return orjson.dumps(document)


def _headers(chance: random.Random) -> list[tuple[str, bytes | None]]:
    found: list[tuple[str, bytes | None]] = []
    for _ in range(chance.choice((1, 1, 2, 3, 40))):
        name = chance.choice(HEADER_NAMES) if chance.random() < 0.9 else BROKEN_NAME.decode()
        value = chance.choice(HEADER_VALUES) if chance.random() < 0.9 else chance.randbytes(chance.randrange(60))
        found.append((name, value))
    return found
