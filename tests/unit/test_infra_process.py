"""A part's process is never mixed up with another one, and ends whole."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from infra.process import Command, Identity, Process, end_strays, strays

# A leader that ignores SIGTERM and has a child in its group; it says when both are there.
STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = os.fork()
if child:
    open(sys.argv[1], "w").write(str(child))
time.sleep(60)
"""


def eventually(holds: Callable[[], object], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "did not come true in time"
        time.sleep(0.01)


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    end_strays(tmp_path, grace_s=0.0)


def sleeper(folder: Path) -> Command:
    return Command((sys.executable, "-c", "import time; time.sleep(60)"), cwd=folder)


def test_a_started_process_is_remembered_and_stopped(folder: Path) -> None:
    process = Process("part", folder)
    assert not process.alive and not process.stop(1.0)
    identity = process.start(sleeper(folder))
    assert Process("part", folder).identity() == identity  # another run reads the same
    assert process.alive
    assert process.stop(5.0)
    assert not process.alive and process.identity() is None and gone(identity.pid)


def test_a_pid_given_to_somebody_else_is_not_ours(folder: Path) -> None:
    process = Process("part", folder)
    identity = process.start(sleeper(folder))
    for other in ({"started": identity.started - 1}, {"boot": "another boot"}):
        stranger = dataclasses.replace(identity, **other)
        assert not stranger.alive and stranger.members() == []
        (folder / "run" / "part.json").write_text(json.dumps(dataclasses.asdict(stranger)))
        assert not process.stop(1.0)
        assert identity.alive  # untouched


def test_an_ended_process_is_not_alive_although_nobody_waited_for_it(folder: Path) -> None:
    process = Process("part", folder)
    process.start(Command((sys.executable, "-c", ""), cwd=folder))
    eventually(lambda: not process.alive)


def test_the_whole_group_ends_even_if_it_ignores_sigterm(folder: Path) -> None:
    process = Process("part", folder)
    told = folder / "child"
    identity = process.start(Command((sys.executable, "-c", STUBBORN, str(told)), cwd=folder))
    eventually(lambda: told.exists() and told.read_text())
    child = int(told.read_text())
    assert sorted(identity.members()) == sorted([identity.pid, child])
    assert process.stop(0.2)
    assert gone(identity.pid) and gone(child)


def test_what_a_killed_leader_left_behind_still_ends(folder: Path) -> None:
    process = Process("part", folder)
    told = folder / "child"
    identity = process.start(Command((sys.executable, "-c", STUBBORN, str(told)), cwd=folder))
    eventually(lambda: told.exists() and told.read_text())
    child = int(told.read_text())
    os.kill(identity.pid, signal.SIGKILL)
    eventually(lambda: not process.alive)
    assert identity.members() == [child]
    assert process.stop(0.2)
    assert gone(child)


def test_a_process_without_its_pid_file_is_found_by_its_marker(folder: Path) -> None:
    process = Process("part", folder)
    identity = process.start(sleeper(folder))
    (folder / "run" / "part.json").unlink()
    # Between fork and exec it still shows our own environment.
    eventually(lambda: strays(folder) == [identity.pid])
    assert strays(folder / "other") == []
    assert end_strays(folder, grace_s=5.0) == [identity.pid]
    assert gone(identity.pid)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": 1}', '{"pid": 1, "other": 2}'])
def test_an_unreadable_pid_file_counts_as_none(folder: Path, content: str) -> None:
    (folder / "run").mkdir()
    (folder / "run" / "part.json").write_text(content)
    assert Process("part", folder).identity() is None


def test_the_log_of_the_run_before_is_kept(folder: Path) -> None:
    process = Process("part", folder)
    for word in ("first", "second"):
        process.start(Command((sys.executable, "-c", f"print('{word}')"), cwd=folder))
        eventually(lambda: not process.alive)
    assert process.log.read_text() == "second\n"
    assert process.log.with_suffix(".log.1").read_text() == "first\n"


def test_the_callers_environment_does_not_leak_into_a_part(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAFKA_OPTS", "-Dsurprise=1")
    process = Process("part", folder)
    show = "import os; print(os.environ.get('KAFKA_OPTS'), os.environ['OWN'])"
    process.start(Command((sys.executable, "-c", show), cwd=folder, env={"OWN": "yes"}))
    eventually(lambda: not process.alive)
    assert process.log.read_text() == "None yes\n"


def test_identity_of_this_process() -> None:
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert Identity(os.getpid(), int(stat[19]), boot).alive
