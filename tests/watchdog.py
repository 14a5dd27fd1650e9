"""Ends what a test process leaves running when it dies before its fixtures end: killed, or `pytest -n` interrupted.

A process of its own that reads a pipe from the test process until that one is gone. What belongs to the run is known by
its environment, which children inherit: the run's name, or a stack's folder below the run's.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil

from infra.process import MARKER

RUN = "HEADRACE_TEST_RUN"
GONE_S = 10.0


@contextlib.contextmanager
def watched(folder: Path) -> Iterator[None]:
    """Whatever this process starts ends with the block, or with this process."""
    run = uuid.uuid4().hex
    command = [sys.executable, "-m", "tests.watchdog", str(folder), run]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as dog:
        os.environ[RUN] = run
        try:
            yield
        finally:
            del os.environ[RUN]
            assert dog.stdin is not None
            dog.stdin.close()
            dog.wait(2 * GONE_S)


def left(folder: str, run: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["environ"]):
        environment = process.info["environ"] or {}
        if environment.get(RUN) == run or environment.get(MARKER, "").startswith(f"{folder}/"):
            found.append(process)
    return found


def main(folder: str, run: str) -> None:
    sys.stdin.read()
    until = time.monotonic() + GONE_S
    while (processes := left(folder, run)) and time.monotonic() < until:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, timeout=1.0)


if __name__ == "__main__":
    main(*sys.argv[1:])
