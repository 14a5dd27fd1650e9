"""The contract as documents that other languages read: a JSON Schema per model, and one AsyncAPI 3 document.

Both are made from the models, so they cannot say anything else. Pure: writes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import TypeAdapter

from schemas import blob, bodies, events, job, names, records, tenants

# Where a schema says which one it is; not a place on the net.
ID_BASE = "urn:headrace:schema:1"
DIALECT = "https://json-schema.org/draft/2020-12/schema"
ASYNCAPI = "3.0.0"

# File name → what it describes. `event` is the union that a reader of a reply topic meets.
MODELS: Mapping[str, Any] = {
    "job": job.Job,
    "reply": job.Reply,
    "output-options": job.OutputOptions,
    "blob-ref": blob.BlobRef,
    "input-ref": blob.InputRef,
    "body-chat-completions": bodies.ChatBody,
    "body-completions": bodies.CompletionBody,
    "body-embeddings": bodies.EmbeddingBody,
    "event": events.Event,
    "event-waiting": events.Waiting,
    "event-started": events.Started,
    "event-chunk": events.Chunk,
    "event-completed": events.Completed,
    "event-failed": events.Failed,
    "event-cancelled": events.Cancelled,
    "event-expired": events.Expired,
    "event-abandoned": events.Abandoned,
    "status": records.StatusRecord,
    "usage": records.UsageRecord,
    "cancel": records.CancelRecord,
    "tenant": tenants.Tenant,
    "model": tenants.ModelEntry,
}
_ENDPOINT_OF = {
    "body-chat-completions": names.CHAT,
    "body-completions": names.COMPLETIONS,
    "body-embeddings": names.EMBEDDINGS,
}
_EVENTS = ("waiting", "started", "chunk", "completed", "failed", "cancelled", "expired", "abandoned")


def model_schema(name: str) -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of one of `MODELS`. Raises KeyError for another name."""
    # Validation mode throughout: in serialisation mode, fields with defaults would be said to be always there.
    schema = TypeAdapter(MODELS[name]).json_schema(mode="validation", by_alias=True)
    if name in _ENDPOINT_OF:
        for ignored in sorted(bodies.IGNORED[_ENDPOINT_OF[name]]):
            schema["properties"][ignored] = {"description": "accepted and ignored"}
    return {"$schema": DIALECT, "$id": f"{ID_BASE}:{name}", **schema}


def json_schemas() -> dict[str, dict[str, Any]]:
    """A document for each of `MODELS`."""
    return {name: model_schema(name) for name in MODELS}


def json_schema() -> dict[str, Any]:
    """One document with all of `MODELS` under `$defs`."""
    return {"$schema": DIALECT, "$id": ID_BASE, "title": "Headrace", "$defs": _lifted(MODELS, "#/$defs/")}


def asyncapi(pool: str = "default", bootstrap: str = "localhost:9092") -> dict[str, Any]:
    """The AsyncAPI 3 document of one pool: channels, messages, and operations with their reply and correlation id."""
    components = _components()
    channels = {f"jobs-{tier}": _jobs_channel(pool, tier) for tier in names.TIERS}
    channels["replies"] = {
        "address": None,
        "title": "reply topic",
        "description": f"The topic that a job names; `{names.REPLIES}` or the tenant's default if it names none.",
        "messages": {f"event-{kind}": _ref("messages", f"event-{kind}") for kind in _EVENTS},
        "bindings": {"kafka": {"bindingVersion": "0.5.0"}},
    }
    channels["cancels"] = _plain_channel(names.CANCEL, "cancel", compact=True)
    channels["status"] = _plain_channel(names.status_topic(pool), "status", compact=True)
    channels["usage"] = _plain_channel(names.USAGE, "usage")
    channels["dead-letters"] = _plain_channel(names.DEAD_LETTERS, "dead-letter")
    operations: dict[str, Any] = {
        f"run-{tier}": {
            "action": "receive",
            "title": f"run a job ({tier})",
            "channel": {"$ref": f"#/channels/jobs-{tier}"},
            "messages": [{"$ref": f"#/channels/jobs-{tier}/messages/job"}],
            "reply": {
                "address": {
                    "description": "The topic the job names; else the header `reply_to`; else the tenant's default.",
                    "location": "$message.payload#/reply/topic",
                },
                "channel": {"$ref": "#/channels/replies"},
                "messages": [{"$ref": f"#/channels/replies/messages/event-{kind}"} for kind in _EVENTS],
            },
        }
        for tier in names.TIERS
    }
    operations["cancel"] = {
        "action": "receive",
        "channel": {"$ref": "#/channels/cancels"},
        "messages": [{"$ref": "#/channels/cancels/messages/cancel"}],
    }
    for name, message in (("status", "status"), ("usage", "usage"), ("dead-letters", "dead-letter")):
        operations[f"write-{name}"] = {
            "action": "send",
            "channel": {"$ref": f"#/channels/{name}"},
            "messages": [{"$ref": f"#/channels/{name}/messages/{message}"}],
        }
    return {
        "asyncapi": ASYNCAPI,
        "info": {
            "title": "Headrace",
            "version": str(names.SCHEMA_VERSION),
            "description": "Inference jobs on Kafka: a job record in, numbered events and one terminal event out.",
            "license": {"name": "Apache-2.0"},
        },
        "defaultContentType": "application/json",
        "servers": {"kafka": {"host": bootstrap, "protocol": "kafka"}},
        "channels": channels,
        "operations": operations,
        "components": components,
    }


def _jobs_channel(pool: str, tier: str) -> dict[str, Any]:
    return {
        "address": names.jobs_topic(pool, tier),
        "messages": {"job": _ref("messages", "job")},
        "bindings": {"kafka": {"bindingVersion": "0.5.0"}},
    }


def _plain_channel(topic: str, message: str, *, compact: bool = False) -> dict[str, Any]:
    binding: dict[str, Any] = {"bindingVersion": "0.5.0"}
    if compact:
        binding["topicConfiguration"] = {"cleanup.policy": ["compact"]}
    return {
        "address": topic,
        "messages": {message: _ref("messages", message)},
        "bindings": {"kafka": binding},
    }


def _ref(kind: str, name: str) -> dict[str, str]:
    return {"$ref": f"#/components/{kind}/{name}"}


def _components() -> dict[str, Any]:
    messages: dict[str, Any] = {
        "job": _message(
            "job",
            key="the tenant's id, or `tenant|k` with k = murmur2(id or conversation) mod spread",
            headers=_header_schema(
                {
                    names.H_TRACEPARENT: "W3C trace context",
                    names.H_TRACESTATE: "W3C trace state",
                    names.H_BAGGAGE: "W3C baggage",
                    names.H_CORRELATION: "the caller's; events are correlated by job_id",
                    names.H_REPLY_TO: "reply topic, if the job names none",
                    names.H_REPLY_PARTITION: "reply partition, decimal text",
                    names.H_AUTHORIZATION: "a JWT over the value, where the service believes signed jobs only",
                }
            ),
            correlation="$message.payload#/id",
        ),
        "cancel": _message(
            "cancel",
            key="`tenant|job id`",
            headers=_header_schema({names.H_AUTHORIZATION: "a JWT over the value, as for jobs"}),
            correlation="$message.payload#/job_id",
        ),
        "status": _message("status", key="`tenant|job id|run`", correlation="$message.payload#/job_id"),
        "usage": _message("usage", key="the tenant's id", correlation="$message.payload#/job_id"),
        "dead-letter": {
            "name": "dead-letter",
            "summary": "The original record whole: its value, key and headers, and these headers beside them.",
            "headers": _header_schema(
                {
                    names.H_REASON: "error code",
                    names.H_MESSAGE: "what is wrong and what to do",
                    names.H_ATTEMPTS: "unclean starts, decimal text",
                    names.H_ORIGIN: "topic/partition/offset of the record's first place",
                    names.H_FAILED_AT: "RFC 3339",
                }
            ),
            "payload": {},
        },
    }
    for kind in _EVENTS:
        messages[f"event-{kind}"] = _message(
            f"event-{kind}",
            key="the job's id",
            headers=_header_schema(
                {names.H_TYPE: "event type", names.H_ATTEMPT: "attempt", names.H_SEQ: "number in the attempt"}
            ),
            correlation="$message.payload#/job_id",
        )
    schemas = _lifted((name for name in MODELS if name != "event"), "#/components/schemas/")
    return {"messages": messages, "schemas": _without_discriminators(schemas)}


def _message(name: str, *, key: str, correlation: str, headers: dict[str, Any] | None = None) -> dict[str, Any]:
    message: dict[str, Any] = {
        "name": name,
        "contentType": "application/json",
        "payload": _ref("schemas", name),
        "correlationId": {"location": correlation},
        "bindings": {"kafka": {"key": {"type": "string", "description": key}, "bindingVersion": "0.5.0"}},
    }
    if headers is not None:
        message["headers"] = headers
    return message


def _header_schema(described: Mapping[str, str]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {name: {"type": "string", "description": text} for name, text in described.items()},
    }


def _lifted(chosen: Iterable[str], prefix: str) -> dict[str, Any]:
    """The schemas of `chosen` and of all they refer to, side by side; references begin with `prefix`."""
    lifted: dict[str, Any] = {}
    for name in chosen:
        schema = model_schema(name)
        definitions = schema.pop("$defs", {})
        del schema["$schema"], schema["$id"]
        for title, definition in {name: schema, **definitions}.items():
            definition = _relocated(definition, prefix)
            if lifted.setdefault(title, definition) != definition:
                raise RuntimeError(f"two models of the contract are called {title}: rename one")
    return lifted


def _relocated(node: Any, prefix: str) -> Any:
    if isinstance(node, dict):
        return {key: _relocated(child, prefix) for key, child in node.items()}
    if isinstance(node, list):
        return [_relocated(child, prefix) for child in node]
    if isinstance(node, str) and node.startswith("#/$defs/"):
        return node.replace("#/$defs/", prefix, 1)
    return node


def _without_discriminators(node: Any) -> Any:
    """OpenAPI's discriminator is an object, AsyncAPI's a string: left out, since the alternatives tell themselves."""
    if isinstance(node, dict):
        kept = ((key, child) for key, child in node.items() if key != "discriminator" or not isinstance(child, dict))
        return {key: _without_discriminators(child) for key, child in kept}
    if isinstance(node, list):
        return [_without_discriminators(child) for child in node]
    return node
