"""`headrace worker`: one worker process, until SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import fcntl
import logging
import os
import re
import sys
import traceback
from typing import Annotated

import orjson
import typer

from service.cli.errors import FAILED, UNREACHABLE, USAGE, told
from service.settings import Misconfigured, Settings
from service.stray_settings import strays

# After the drain and the bound for the worker's parts (service/app.py), seconds: then this process ends whatever holds
# it up, and says which call that was (R19).
BACKSTOP_S = 5.0


def register(app: typer.Typer) -> None:
    app.command("worker")(worker)


def worker(
    pool: Annotated[str | None, typer.Option(help="Pool to serve; the model's set of workers.")] = None,
    name: Annotated[str | None, typer.Option(help="Worker name, unique on this machine.")] = None,
    engine: Annotated[str | None, typer.Option(help="vllm, or simulated (no weights; for scale and faults).")] = None,
    http_port: Annotated[int | None, typer.Option(help="Port of /livez, /readyz, /metrics; 0 = any free one.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON line when ready.")] = False,
) -> None:
    """Runs a worker: joins the pool's group once its engine is ready, drains on SIGTERM.

    Settings come from HEADRACE_… variables (docs/operations.md). After `headrace up` the local stack's are used.
    """
    settings = load(pool=pool, worker=name, http_port=http_port)
    if engine is not None:
        if engine not in ("vllm", "simulated"):
            raise typer.BadParameter("must be vllm or simulated", param_hint="--engine")
        settings.engine.kind = engine  # type: ignore[assignment]
    try:
        code = serve(settings, announce_json=json)
    except Exception:
        traceback.print_exc()
        code = 1
    # Not by way of the interpreter's end: it would wait for threads that hang (a dead engine's, a store's), and the
    # worker has stopped all the same.
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


def load(**overrides: object) -> Settings:
    """Settings from the environment, with the local stack's addresses where the environment is silent."""
    from infra.errors import StackError
    from infra.progress import Quiet
    from infra.stack import Stack

    if "HEADRACE_KAFKA__BOOTSTRAP" not in os.environ:  # a named broker has a store and a registry of its own
        with contextlib.suppress(StackError):  # no stack here: the defaults say where things are
            for name, value in Stack(show=Quiet()).environment().items():
                os.environ.setdefault(name, value)
    try:
        return Settings.read(**{k: v for k, v in overrides.items() if v is not None})
    except Misconfigured as problem:
        raise typer.Exit(told("; ".join(str(problem).splitlines()), USAGE)) from None


def serve(settings: Settings, *, announce_json: bool) -> int:
    """Runs the worker on uvloop; returns the exit code. The caller ends the process: the loop is left open.

    Closing it would wait for every thread that still works for it, however long (R19).
    """
    import uvloop
    from aiokafka.errors import KafkaError

    from consumers.follower import TopicUnread
    from service.app import PARTS_STOP_S, EngineGone, Superseded, Worker
    from service.delivery.link import DeliveryDown
    from service.delivery.lock import NameTaken
    from service.engine.protocol import StartFailure
    from service.telemetry import logs
    from service.tenants import RegistryError
    from service.topics import BrokerUnreachable, TopicsRefused

    logs.configure(settings)
    for line in strays(os.environ):
        logging.getLogger("service.settings").warning("%s", line)

    def ready(worker: Worker) -> None:
        line = {"event": "ready", "worker": settings.worker, "pool": settings.pool, "http": worker.health.url}
        with contextlib.suppress(OSError):  # that nobody reads along must not end a worker
            if announce_json:
                sys.stdout.write(orjson.dumps(line).decode() + "\n")
                sys.stdout.flush()
            elif sys.stderr.isatty():
                served = settings.engine.served_name
                typer.echo(
                    f"ready: pool {settings.pool}, model {served} ({settings.engine.kind}), {worker.health.url}\n"
                    f'next, in another terminal: headrace submit "Name three rivers." --model {served}'
                    "   (Ctrl-C drains and stops)",
                    err=True,
                )

    def stopping() -> None:  # a thread of C, which needs neither the loop nor the interpreter's lock
        faulthandler.dump_traceback_later(settings.drain_s + PARTS_STOP_S + BACKSTOP_S, exit=True)

    async def main() -> None:
        await Worker(settings).run(ready, stopping)

    try:
        asyncio.Runner(loop_factory=uvloop.new_event_loop).run(main())
    except (BrokerUnreachable, TopicUnread, KafkaError, DeliveryDown) as problem:
        return told(str(problem), UNREACHABLE)
    except TopicsRefused as problem:
        other = f" --pool {settings.pool}" if settings.pool != Settings.model_fields["pool"].default else ""
        return told(f"{problem}{other}", FAILED)
    except (
        StartFailure,
        RegistryError,
        NameTaken,
        EngineGone,
        Superseded,
        OSError,
        ValueError,
    ) as problem:
        return told(str(problem), FAILED)
    finally:
        _forget_lock(settings)
    return 0


def _forget_lock(settings: Settings) -> None:
    """A name that nobody gave holds this process's id and is never taken again: its lock would lie there for ever.

    A lock that is still held, by a delivery process that lives on, stays.
    """
    if "worker" in settings.model_fields_set:
        return
    path = settings.state_dir / f"{re.sub(r'[^A-Za-z0-9._-]', '_', settings.worker)}.lock"
    with contextlib.suppress(OSError), path.open("rb") as lock:  # BlockingIOError is an OSError
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
