"""`headrace submit`: publishes one job and shows its answer as it comes."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Mapping
from json import JSONDecoder
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer

from client import BlobRef, Chunk, Client, ClientError, JobEnded, JobFailed, Result, ResultOnly, Started, Submitted
from client.record import new_id
from schemas.names import CHAT, COMPLETIONS, EMBEDDINGS, TIERS
from service.cli import session
from service.cli.terminal import say, write

ENDPOINTS = {"chat": CHAT, "completions": COMPLETIONS, "embeddings": EMBEDDINGS}
# What a job file may hold beside the fields that options set; `reply` gives the topic and whether to stream.
JOB_FIELDS = ("run", "input", "deadline", "not_before", "conversation", "metadata", "output")

# Seconds without any event after which the user is told what that may mean.
SILENCE_S = 10.0
NO_EVENT = "[no event yet: the job is queued; is a worker running? headrace status]"


def register(app: typer.Typer) -> None:
    app.command("submit")(submit)


def submit(
    prompt: Annotated[
        str | None, typer.Argument(help="Prompt text, JSON body or JSON job; - or nothing reads standard input.")
    ] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Prompt text, JSON body or JSON job.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Tenant; acme if neither the job nor this names one.")] = None,
    model: Annotated[str | None, typer.Option(help="Model; the worker's served name by default.")] = None,
    tier: Annotated[str | None, typer.Option(help="interactive, standard or bulk; the tenant's by default.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Output tokens at most.")] = None,
    endpoint: Annotated[str | None, typer.Option(help="chat, completions, embeddings, or a /v1/… path.")] = None,
    id: Annotated[str | None, typer.Option(help="Job id; the same one twice does not run twice.")] = None,
    run: Annotated[int | None, typer.Option(min=0, help="One more for each deliberate repetition of a job.")] = None,
    no_stream: Annotated[bool, typer.Option("--no-stream", help="Print the answer only when it is whole.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end.")] = False,
    timeout: Annotated[str, typer.Option(help="Give up waiting after this long; the job goes on.")] = "10m",
    pool: Annotated[str | None, typer.Option(help="The model's by default, as `headrace models` has it.")] = None,
    sign: session.Sign = None,
    kid: session.Kid = None,
    bootstrap: Annotated[str | None, typer.Option(help="Kafka address; the local stack's by default.")] = None,
) -> None:
    """Publishes a job and streams its answer.

    The job is a prompt text, an OpenAI request body (JSON), or a whole job (JSON with "body" or "input").
    Exit codes: 0 done, 1 the job failed, 2 wrong usage, 3 not reachable.
    """
    if tier is not None and tier not in TIERS:
        raise typer.BadParameter(f"must be one of {', '.join(TIERS)}", param_hint="--tier")
    asked_pool = pool or os.environ.get("HEADRACE_POOL") or None
    found = session.settings(bootstrap, pool)
    if file is not None and prompt is not None:
        raise typer.BadParameter("give the prompt or a file, not both", param_hint="--file")
    text = prompt if prompt not in (None, "-") else _read(file)
    job = read_job(text, endpoint=endpoint)
    body = job.get("body")
    if body is not None:
        body.setdefault("model", model or found.engine.served_name)
        if model is not None:
            body["model"] = model
        if max_tokens is not None:
            body["max_tokens"] = max_tokens
    job["id"] = id or job.get("id") or new_id()
    if run is not None:
        job["run"] = run
    job["tenant"] = tenant or job.get("tenant") or session.TENANT
    reply = job.pop("reply", {})
    stream = not no_stream and reply.get("stream", True)

    stage = "left; nothing was published"

    async def main() -> int:
        nonlocal stage
        async with Client(
            found.kafka.bootstrap,
            pool=asked_pool,
            tier=tier,
            reply_topic=reply.get("topic") or session.reply_topic(found, job["tenant"]),
            **session.client_options(found, job["tenant"], sign, kid),
            store=session.store_access(found),
            connect_timeout_s=5.0,
        ) as client:
            began = time.monotonic()
            stage = f"left; job {job['id']} may have been published: headrace job {job['id']}"
            submitted = await client.publish(**job, stream=stream)
            stage = f"left; job {job['id']} goes on: headrace job {job['id']}"
            if not json:  # at once, so that it can be cancelled from elsewhere
                typer.echo(f"[job {submitted.id} of {submitted.tenant}]", err=True)
            return await _show(submitted, began, session.seconds(timeout), as_json=json)

    session.run(main(), left=lambda: stage)


def _read(file: Path | None) -> str:
    try:
        if file is not None and str(file) != "-":
            return file.read_text(encoding="utf-8-sig")  # some editors begin every file with a mark
        if sys.stdin.isatty():
            typer.echo("(reading the prompt from the terminal; end with Ctrl-D)", err=True)
        return sys.stdin.buffer.read().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"cannot read the job: {error}", param_hint="--file") from None


def read_job(text: str, *, endpoint: str | None) -> dict[str, Any]:
    """The fields of `Client.publish` for a prompt, a JSON body or a JSON job. Raises typer.BadParameter."""
    given = ENDPOINTS.get(endpoint or "", endpoint)
    if not text.lstrip().startswith("{"):
        if not text.strip():
            raise typer.BadParameter("the prompt is empty")
        path = given or CHAT
        return {"endpoint": path, "body": prompt_body(path, text.rstrip("\n"))}
    content = _object(text)
    if not {"body", "input", "schema_version"} & content.keys():
        return {"endpoint": given or _endpoint_of(content), "body": content}
    unknown = content.keys() - {"schema_version", "id", "tenant", "endpoint", "body", "reply", *JOB_FIELDS}
    if unknown:
        raise typer.BadParameter(f"unknown field in the job: {', '.join(sorted(unknown))}")
    if not isinstance(content.get("body"), dict | None) or not isinstance(content.get("reply"), dict | None):
        raise typer.BadParameter("body and reply of a job are JSON objects")
    job = {name: value for name, value in content.items() if name != "schema_version" and value is not None}
    job["endpoint"] = given or job.get("endpoint") or CHAT
    if "input" in job:
        try:
            job["input"] = BlobRef.of(job["input"])
        except ClientError as error:
            raise typer.BadParameter(f"input: {error}") from None
    return job


def _object(text: str) -> dict[str, Any]:
    """The one JSON object that `text` is."""
    try:
        return dict(orjson.loads(text))
    except orjson.JSONDecodeError as error:
        if _several(text):
            raise typer.BadParameter('one job a file; for many see docs/client.md "Many jobs"') from None
        raise typer.BadParameter(
            f"looks like JSON, but is not: {error}; a prompt that begins with {{ goes through -f with a body"
        ) from None


def _several(text: str) -> bool:
    """Whether `text` begins with a whole JSON document and goes on with another."""
    try:
        _, end = JSONDecoder().raw_decode(text.lstrip())
    except ValueError:
        return False
    return text.lstrip()[end:].lstrip().startswith("{")


def prompt_body(endpoint: str, text: str) -> dict[str, Any]:
    match endpoint:
        case "/v1/completions":
            return {"prompt": text}
        case "/v1/embeddings":
            return {"input": text}
        case _:
            return {"messages": [{"role": "user", "content": text}]}


def _endpoint_of(body: Mapping[str, Any]) -> str:
    """The endpoint a body is for, by the field only that one has."""
    if "messages" in body:
        return CHAT
    return COMPLETIONS if "prompt" in body else EMBEDDINGS if "input" in body else CHAT


async def _show(job: Submitted, began: float, timeout_s: float, *, as_json: bool) -> int:
    """Prints the answer while it comes; returns the exit code."""
    first_token_s: float | None = None
    shown = ""
    attempts = 0
    trace_id = job.trace_id
    silence = asyncio.get_running_loop().call_later(SILENCE_S, typer.echo, NO_EVENT, None, True, True)
    try:
        async for item in job.events(timeout_s):
            silence.cancel()
            if isinstance(item, Chunk):
                if first_token_s is None:
                    first_token_s = time.monotonic() - began
                if as_json:
                    continue
                shown += item.text
                write(item.text)
            elif isinstance(item, Started):
                trace_id = item.trace_id or trace_id
                attempts += 1
                if shown:
                    write(newline(shown))
                    say(f"[attempt {attempts}: the job started over; what is above is void]", err=True)
                    shown = ""
            elif isinstance(item, ResultOnly) and not as_json:
                write(newline(shown))
                say(f"[{item.reason}: the whole answer follows with the result]", err=True)
                shown = ""
        result = await job.result(max(0.0, timeout_s - (time.monotonic() - began)))
    except JobEnded as ended:
        if as_json:
            session.print_json({**ended.event, "trace_id": trace_id})
        else:
            write(newline(shown))
            say(f"headrace: {ended}", err=True)
            if isinstance(ended, JobFailed) and ended.retriable:
                typer.echo(f"it may succeed when sent again with --id {job.id} --run {job.run + 1}", err=True)
        return session.FAILED
    finally:
        silence.cancel()
    if as_json:
        first_ms = None if first_token_s is None else round(first_token_s * 1e3, 1)
        event = {**result.event, "response": result.response, "first_token_ms": first_ms, "trace_id": trace_id}
        session.print_json(event)
    else:
        _print_rest(result, shown)
        say(summary(result, time.monotonic() - began, first_token_s), err=True)
    return 0


def newline(shown: str) -> str:
    return "\n" if shown and not shown.endswith("\n") else ""


def _print_rest(result: Result, shown: str) -> None:
    """What the stream has not shown: everything without one, further choices, tool calls."""
    response = result.response
    if "choices" not in response:  # embeddings
        vectors = response.get("data", [])
        typer.echo(
            f"{len(vectors)} embedding(s) of {len(vectors[0]['embedding']) if vectors else 0} numbers: see --json"
        )
        return
    texts = result.texts
    if texts[0].startswith(shown):
        write(texts[0][len(shown) :])
    else:
        write(newline(shown))
        say("[the whole answer, which differs from what is above]", err=True)
        write(texts[0])
    write(newline(texts[0]))
    for number, text in enumerate(texts[1:], 2):
        write(f"--- choice {number}\n{text}\n")
    for choice in response["choices"]:
        for call in (choice.get("message") or {}).get("tool_calls") or ():
            write(f"--- tool call {call['function']['name']}({call['function']['arguments']})\n")


def summary(result: Result, wall_s: float, first_token_s: float | None) -> str:
    """One line about the job, for people."""
    usage = result.usage
    again = ["of an earlier record of this job, not run again"] if result.event.get("duplicate") else []
    parts = [*again, f"{usage.prompt_tokens} + {usage.completion_tokens} tokens"]
    if usage.cached_tokens:
        parts.append(f"{usage.cached_tokens} cached")
    if first_token_s is not None:
        parts.append(f"first after {first_token_s * 1e3:.0f} ms")
    parts.append(f"{wall_s:.2f} s")
    if result.output is not None:
        parts.append(f"stored in {result.output.bucket}/{result.output.key}, digest checked")
    return f"[{result.job_id}: {', '.join(parts)}]"
