"""A test process that is killed leaves nothing running."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil

DOOMED = """
import subprocess, sys, time
from pathlib import Path
from tests.watchdog import watched
with watched(Path(sys.argv[1])):
    print(subprocess.Popen(["sleep", "600"], start_new_session=True).pid, flush=True)
    time.sleep(600)
"""


def test_what_a_killed_test_process_started_ends_with_it(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", DOOMED, str(tmp_path)], stdout=subprocess.PIPE, text=True) as doomed:
        assert doomed.stdout is not None
        sleeper = psutil.Process(int(doomed.stdout.readline()))
        doomed.kill()
    deadline = time.monotonic() + 30
    while sleeper.is_running() and sleeper.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the sleeper lives on"
        time.sleep(0.05)
