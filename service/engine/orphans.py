"""Loaded by vLLM in each of its processes (entry point `vllm.general_plugins`): a child dies with its parent.

Without it EngineCore and Worker outlive a `kill -9` of the worker, idle and holding all their memory, and a Ctrl-C in
a terminal stops the engine under the jobs that are still to be drained. The same entry point brings the bound on masks
(service/engine/vllm/masks.py) into EngineCore.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def install() -> None:
    """No-op in the process that holds the engine, and on systems without prctl."""
    parent = multiprocessing.parent_process()
    if parent is None or not sys.platform.startswith("linux"):
        return
    # The kernel sends the signal when the *thread* that started this process ends: see VllmEngine's own thread.
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent.pid:  # it died before the call
        os._exit(1)
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)  # out of the terminal's foreground group
    if "vllm" in sys.modules:
        from service.engine.vllm import masks

        masks.install()
