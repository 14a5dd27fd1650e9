"""A process of ours ends when it has stopped, whatever its threads still do (R19)."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

THREAD_S = 120  # what the thread would take; far beyond every bound below
BOUND_S = 60.0  # for imports on a busy machine; the end itself takes no time

WORKER = """
    import asyncio, time
    import service.app, service.cli.worker as command

    class Worker:
        def __init__(self, settings):
            pass

        async def run(self, on_ready, on_stopping):
            asyncio.ensure_future(asyncio.to_thread(time.sleep, {thread}))
            await asyncio.sleep(0.2)
            on_stopping()
            {end}

    service.app.Worker = Worker
    command.BACKSTOP_S = {backstop} - 20.0 - service.app.PARTS_STOP_S
    command.worker(pool=None, name="w", engine="simulated", http_port=0, json=False)
"""

DELIVERY = """
    import asyncio, time
    from service.delivery import process

    async def serve(descriptor):
        asyncio.ensure_future(asyncio.to_thread(time.sleep, {thread}))
        await asyncio.sleep(0.2)
        {end}

    process.serve = serve
    process.run(0)
"""


def ended(script: str, end: str, backstop: float = BOUND_S) -> tuple[int, str]:
    """The exit code and what was said. Fails if the process outlives its bound."""
    code = textwrap.dedent(script).format(thread=THREAD_S, end=end, backstop=backstop)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=BOUND_S)
    return done.returncode, done.stderr


@pytest.mark.parametrize("script", [WORKER, DELIVERY], ids=["worker", "delivery process"])
def test_a_thread_that_works_on_does_not_hold_up_the_end(script: str) -> None:
    code, said = ended(script, "return")
    assert (code, said) == (0, "")


@pytest.mark.parametrize("script", [WORKER, DELIVERY], ids=["worker", "delivery process"])
def test_whoever_fails_ends_too_and_says_why(script: str) -> None:
    code, said = ended(script, "raise RuntimeError('a bug')")
    assert code == 1 and "RuntimeError: a bug" in said


def test_a_stop_that_hangs_is_cut_off_and_names_the_call() -> None:
    code, said = ended(WORKER, "time.sleep(120)  # not even the loop turns", backstop=0.5)
    assert code == 1 and "Timeout" in said and "in run" in said
