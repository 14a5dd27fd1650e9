"""What the commands that talk to a running service share: its addresses, and errors as one line and an exit code.

Exit codes: 0 done, 1 the job failed, 2 wrong usage, 3 not reachable, 130 left by Ctrl-C.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer

from client import ClientError, InvalidJob, Signer, StoreAccess, UnknownTopic, Unreachable
from client.connection import address_fault
from schemas.names import REPLIES, reply_topic_of
from service.cli import errors
from service.settings import Misconfigured, Settings

Options = dict[str, Any]
# Options of the commands that publish.
Sign = Annotated[
    Path | None,
    typer.Option("--sign", envvar="HEADRACE_SIGN_KEY", help="The tenant's private key; signs what is published."),
]
Kid = Annotated[
    str | None,
    typer.Option(envvar="HEADRACE_SIGN_KID", help="The key's name in the registry; its thumbprint by default."),
]
FAILED, USAGE, UNREACHABLE, INTERRUPTED = errors.FAILED, errors.USAGE, errors.UNREACHABLE, errors.INTERRUPTED
TENANT = "acme"  # of one job when nobody names one
BOOTSTRAP = "HEADRACE_KAFKA__BOOTSTRAP"


def settings(bootstrap: str | None = None, pool: str | None = None) -> Settings:
    """Settings of the environment; what it leaves out comes from the local stack, unless another broker is named."""
    broker = bootstrap or os.environ.get(BOOTSTRAP)
    local = local_stack()
    if broker is None or broker == local.get(BOOTSTRAP):
        for name, value in local.items():
            os.environ.setdefault(name, value)
    try:
        found = Settings.read() if pool is None else Settings.read(pool=pool)
    except Misconfigured as problem:
        raise typer.BadParameter(str(problem).splitlines()[0]) from None
    if bootstrap is not None:
        found.kafka.bootstrap = bootstrap
    if fault := address_fault(found.kafka.bootstrap):
        raise typer.BadParameter(fault, param_hint="--bootstrap")
    return found


def local_stack() -> dict[str, str]:
    """The HEADRACE_… variables of the stack that `headrace up` left running; none if it is down."""
    from infra.errors import StackError
    from infra.stack import Stack

    try:
        return Stack().environment()
    except StackError:
        return {}


def viewer(trace_id: str) -> str:
    """Where a trace can be looked at; empty without a local trace viewer."""
    from infra.errors import StackError
    from infra.stack import Stack

    try:
        zipkin = Stack().addresses.zipkin
    except StackError:
        return ""
    return f"{zipkin}/zipkin/traces/{trace_id}" if zipkin else ""


def client_options(found: Settings, tenant: str | None, sign: Path | None = None, kid: str | None = None) -> Options:
    """How `Client` must be made for this service: connection security, and what its identity mode asks for.

    Raises typer.BadParameter for a key file that cannot be used, or a key without its tenant.
    """
    options: Options = {"security": found.kafka.security}
    try:
        if sign is not None:
            options["signer"] = Signer.from_file(sign, kid)
    except ClientError as error:
        raise typer.BadParameter(str(error), param_hint="--sign") from None
    if found.identity == "topic":
        options["own_topics"] = True
    if tenant is not None:
        options["tenant"] = tenant
    elif len(options) > 1:
        raise typer.BadParameter("name the tenant: signed jobs and own topics are one tenant's", param_hint="--tenant")
    return options


def reply_topic(found: Settings, tenant: str | None) -> str:
    """Where a tenant's events go by default."""
    return REPLIES if found.identity == "trusted" or tenant is None else reply_topic_of(tenant)


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


def run(main: Coroutine[Any, Any, int], left: Callable[[], str] = str) -> None:
    """Runs a command to its exit code. `left` says what Ctrl-C tells the user, beside leaving cleanly."""
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)  # hundreds of lines a minute while a broker is away
    try:
        code = asyncio.run(main)
    except KeyboardInterrupt:
        if message := left():
            typer.echo(f"\n{message}", err=True)
        code = INTERRUPTED
    except ClientError as error:
        code = errors.told(f"{error}{hint(error)}", exit_code(error))
    except OSError as error:
        code = errors.ended_by(error)
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
    return " (another broker: --bootstrap)" if isinstance(error, Unreachable) else ""


def told(message: str, code: int) -> int:
    """Says what went wrong, to programs too; returns the exit code."""
    return errors.told(message, code)


def print_json(value: Mapping[str, Any]) -> None:
    """One object on one line; whoever reads along has it at once."""
    sys.stdout.write(orjson.dumps(value).decode() + "\n")
    sys.stdout.flush()


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


def answerable(*, yes: bool, dry_run: bool, json: bool) -> None:
    """A program cannot be asked whether a change is right. Raises typer.BadParameter."""
    if json and not (yes or dry_run):
        raise typer.BadParameter("asks nothing: give --yes or --dry-run with it", param_hint="--json")


def agreed() -> bool:
    """Asks whether what was shown is to be applied. Raises typer.BadParameter if there is no terminal."""
    if not sys.stdin.isatty():
        raise typer.BadParameter("there is nobody to ask: give --yes to apply, or --dry-run to look")
    answer = typer.confirm("apply?", default=False)
    if not answer:
        typer.echo("nothing was changed", err=True)
    return answer
