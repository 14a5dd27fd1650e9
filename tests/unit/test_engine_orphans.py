"""Children of a killed process end with it."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import psutil

PARENT = """
import multiprocessing, time
from service.engine.orphans import install
from tests.unit.test_engine_orphans import child
if __name__ == "__main__":
    install()  # nothing in the process that holds the engine
    process = multiprocessing.get_context("spawn").Process(target=child)
    process.start()
    print(process.pid, flush=True)
    time.sleep(60)
"""


def child() -> None:
    from service.engine.orphans import install

    install()
    print("installed", flush=True)
    time.sleep(60)


def test_a_child_dies_with_its_killed_parent_and_leaves_its_terminal_group() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        process = psutil.Process(int(parent.stdout.readline()))
        assert parent.stdout.readline().strip() == "installed"
        assert os.getpgid(process.pid) == process.pid != os.getpgid(parent.pid)
    finally:
        parent.kill()
        parent.wait()
    _, alive = psutil.wait_procs([process], timeout=5)
    for left in alive:
        left.kill()
    assert not alive
