"""What the commands that talk to a running service share: its addresses, and errors as one line and an exit code.

Exit codes: 0 done, 1 the job failed, 2 wrong usage, 3 not reachable, 130 left by Ctrl-C.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Coroutine
from typing import Any

import typer
from pydantic import ValidationError

from client import ClientError, InvalidJob, StoreAccess, UnknownTopic, Unreachable
from service.settings import Settings

BOOTSTRAP = "HEADRACE_KAFKA__BOOTSTRAP"
FAILED, USAGE, UNREACHABLE, INTERRUPTED = 1, 2, 3, 130


def settings(bootstrap: str | None = None, pool: str | None = None) -> Settings:
    """Settings of the environment; what it leaves out comes from the local stack, unless another broker is named."""
    broker = bootstrap or os.environ.get(BOOTSTRAP)
    local = _local_stack()
    if broker is None or broker == local.get(BOOTSTRAP):
        for name, value in local.items():
            os.environ.setdefault(name, value)
    try:
        found = Settings() if pool is None else Settings(pool=pool)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        name = "__".join(str(part) for part in first["loc"]).upper()
        raise typer.BadParameter(f"HEADRACE_{name}: {first['msg']}") from None
    if bootstrap is not None:
        found.kafka.bootstrap = bootstrap
    return found


def _local_stack() -> dict[str, str]:
    """The HEADRACE_… variables of the stack that `headrace up` left running; none if it is down."""
    from infra.errors import StackError
    from infra.stack import Stack

    try:
        return Stack().environment()
    except StackError:
        return {}


def store_access(found: Settings) -> StoreAccess:
    store = found.store
    return StoreAccess(
        endpoint=store.endpoint,
        access_key=store.access_key,
        secret_key=store.secret_key,
        secure=store.secure,
        region=store.region,
        bucket=store.bucket,
        prefix=store.prefix,
        ttl_days=store.ttl_days,
        deadline_s=store.deadline_s,
    )


def run(main: Coroutine[Any, Any, int], left: str = "") -> None:
    """Runs a command to its exit code. `left` is what Ctrl-C tells the user, beside leaving cleanly."""
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)  # hundreds of lines a minute while a broker is away
    try:
        code = asyncio.run(main)
    except KeyboardInterrupt:
        if left:
            typer.echo(f"\n{left}", err=True)
        code = INTERRUPTED
    except BrokenPipeError:  # whoever read our output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except ClientError as error:
        typer.echo(f"headrace: {error}{hint(error)}", err=True)
        code = exit_code(error)
    raise typer.Exit(code)


def exit_code(error: ClientError) -> int:
    match error:
        case Unreachable() | UnknownTopic():
            return UNREACHABLE
        case InvalidJob():
            return USAGE
        case _:
            return FAILED


def hint(error: ClientError) -> str:
    return " (the local stack: headrace up; another broker: --bootstrap)" if isinstance(error, Unreachable) else ""


def seconds(text: str) -> float:
    """`90`, `90s`, `15m`, `2h`, `1d` in seconds. Raises typer.BadParameter."""
    units = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
    number, unit = (text[:-1], units[text[-1]]) if text[-1:] in units else (text, 1.0)
    try:
        value = float(number) * unit
    except ValueError:
        value = -1.0
    if not 0 <= value <= 3.2e9:
        raise typer.BadParameter(f"{text!r} is no span of time: write 90s, 15m, 2h or 1d")
    return value
