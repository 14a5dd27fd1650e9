"""One process of the stack: started detached in a group of its own, remembered by pid and start time, ended whole.

Linux only (/proc). It never decides when a process should run: infra/startup.py does.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

# Every process of a stack carries this variable with the stack's folder: what lost its pid file is still found.
MARKER = "HEADRACE_STACK"
# What a part may need from the caller's environment. The rest stays out: Zipkin and Kafka read many variables.
INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "JAVA_HOME", "LD_LIBRARY_PATH")

PROC = Path("/proc")

_children: set[int] = set()  # started by this very process and not reaped yet


@dataclass(frozen=True)
class Command:
    argv: tuple[str, ...]
    cwd: Path
    env: Mapping[str, str] = field(default_factory=dict)  # beside INHERITED


@dataclass(frozen=True)
class Stat:
    """What /proc/<pid>/stat says; `started` in clock ticks since boot."""

    state: str
    group: int
    threads: int
    started: int

    @property
    def running(self) -> bool:
        # A zombie has ended and its parent has not asked yet; but its first thread alone may have ended, while others,
        # on their way out, still hold its ports.
        return self.state not in "ZX" or self.threads > 1


@dataclass(frozen=True)
class Identity:
    """A process for ever: a pid alone is given again, together with start time and boot it is not."""

    pid: int
    started: int
    boot: str

    @property
    def alive(self) -> bool:
        _reap(self.pid)
        stat = _stat(self.pid)
        return stat is not None and stat.running and stat.started == self.started and self.boot == _boot()

    def members(self) -> list[int]:
        """Running processes of this process's group, itself included; also when the first one has ended."""
        if self.boot != _boot():
            return []
        _reap(self.pid)
        leader = _stat(self.pid)
        if leader is not None and leader.started != self.started:
            return []  # the pid was given again, which the kernel does only when the whole group is gone
        return [pid for pid, stat in _processes() if stat.group == self.pid and stat.running]


class Process:
    """The process `name` of the stack in `folder`: pid file in run/, output in logs/."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.log = folder / "logs" / f"{name}.log"
        self._folder = folder
        self._file = folder / "run" / f"{name}.json"

    def identity(self) -> Identity | None:
        """Who was started last; None after a clean stop. An unreadable file is none (the marker finds strays)."""
        try:
            return Identity(**json.loads(self._file.read_text()))
        except (OSError, ValueError, TypeError):
            return None

    @property
    def alive(self) -> bool:
        identity = self.identity()
        return identity is not None and identity.alive

    def start(self, command: Command) -> Identity:
        """Starts it detached from this process and its terminal. Raises OSError when the program cannot be run."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        if self.log.exists():
            self.log.replace(self.log.with_suffix(".log.1"))  # the run before, for whoever looks into a crash
        env = {name: os.environ[name] for name in INHERITED if name in os.environ}
        env |= command.env
        env[MARKER] = str(self._folder)
        with self.log.open("wb") as log:
            child = subprocess.Popen(
                command.argv,
                cwd=command.cwd,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        _children.add(child.pid)
        child.returncode = 0  # it outlives this object, which must neither wait for it nor warn about it
        stat = _stat(child.pid)
        assert stat is not None  # not reaped yet, so it is there, if only as a zombie
        identity = Identity(child.pid, stat.started, _boot())
        partial = self._file.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(identity)))
        partial.replace(self._file)
        return identity

    def stop(self, grace_s: float) -> bool:
        """SIGTERM to the whole group, SIGKILL after `grace_s` seconds. True if there was something to stop."""
        identity = self.identity()
        stopped = False
        if identity is not None:
            stopped = end(identity.members, identity.pid, grace_s)
        self._file.unlink(missing_ok=True)
        return stopped


def strays(folder: Path) -> list[int]:
    """Running processes that carry this stack's marker, whatever the pid files say."""
    return list(_marked(folder))


def end_strays(folder: Path, grace_s: float, spare: Collection[int] = ()) -> list[int]:
    """Ends them, but for `spare`; returns whom."""
    found: dict[int, int] = {}

    def members() -> list[int]:
        found.update((pid, started) for pid, started in _marked(folder).items() if pid not in spare)
        # A process on its way out has lost its environment before it has gone.
        return [pid for pid, started in found.items() if (now := _stat(pid)) and now.running and now.started == started]

    end(members, None, grace_s)
    return list(found)


def _marked(folder: Path) -> dict[int, int]:
    """pid → start time of the running processes with the marker."""
    wanted = f"{MARKER}={folder}".encode()
    found = {}
    for pid, stat in _processes():
        if not stat.running or pid == os.getpid():
            continue
        try:
            environment = (PROC / str(pid) / "environ").read_bytes()
        except OSError:  # ended meanwhile, or somebody else's
            continue
        if wanted in environment.split(b"\0"):
            found[pid] = stat.started
    return found


def end(members: Callable[[], list[int]], group: int | None, grace_s: float) -> bool:
    """SIGTERM, then after `grace_s` seconds SIGKILL, until `members()` is empty. True if there were any.

    Raises RuntimeError if some live on after SIGKILL (uninterruptible I/O).
    """
    if not (now := members()):
        return False
    for number, patience in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 10.0)):
        _signal(now, group, number)
        _signal(now, group, signal.SIGCONT)  # a stopped process does not see SIGTERM before it goes on
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            if not (now := members()):
                for pid in tuple(_children):
                    _reap(pid)
                return True
            time.sleep(0.02)
    raise RuntimeError(f"processes {now} do not end, not even by SIGKILL")


def _signal(pids: list[int], group: int | None, number: signal.Signals) -> None:
    for pid in pids:
        try:
            if group is not None:
                os.killpg(group, number)
                return
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _stat(pid: int) -> Stat | None:
    try:
        text = (PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    # The name in brackets may itself hold spaces and brackets; the fields after the last one are fixed (proc(5)).
    fields = text.rpartition(")")[2].split()
    return Stat(state=fields[0], group=int(fields[2]), threads=int(fields[17]), started=int(fields[19]))


def _processes() -> Iterator[tuple[int, Stat]]:
    for entry in os.scandir(PROC):
        if entry.name.isdigit():
            pid = int(entry.name)
            stat = _stat(pid)
            if stat is not None:
                yield pid, stat


def _boot() -> str:
    return (PROC / "sys/kernel/random/boot_id").read_text().strip()


def _reap(pid: int) -> None:
    """Takes the exit status of a process that this one started, so that no zombie stays."""
    if pid in _children:
        try:
            ended, _ = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            ended = pid
        if ended:
            _children.discard(pid)
