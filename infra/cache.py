"""What is slow to make is made once, in one folder for all checkouts: `$HEADRACE_CACHE`, else `~/.cache/headrace`.

An artefact is a folder `<name>-<key>`; the key is a digest of all that goes into it: a changed input makes a new one.
It is made beside its place and renamed when whole: what a killed run left is never used. One lock file an artefact.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from infra.errors import BuildFailed, Cancelled
from infra.lock import locked
from infra.progress import Progress

# How long one run waits for another that makes the same artefact: the slowest takes about 3 minutes on 2 cores.
WAIT_S = 1800.0
# A build command that takes longer hangs.
COMMAND_S = 1500.0


def root() -> Path:
    given = os.environ.get("HEADRACE_CACHE")
    return Path(given).expanduser().absolute() if given else Path.home() / ".cache" / "headrace"


class Workshop:
    """Runs the commands that make artefacts: output to logs, ended with their children when the run is cancelled."""

    def __init__(self, logs: Path, progress: Progress) -> None:
        self.logs = logs
        self.progress = progress
        self.cancelled = threading.Event()

    def log(self, name: str) -> Path:
        return self.logs / f"make-{name}.log"

    def run(
        self, name: str, argv: list[str], *, cwd: Path | None = None, env: Mapping[str, str] | None = None, remedy: str
    ) -> None:
        """One command; its output is appended to the log of artefact `name`. Raises BuildFailed, Cancelled."""
        log = self.log(name)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            output.write(f"$ {' '.join(argv)}\n".encode())
            output.flush()
            try:
                child = subprocess.Popen(
                    argv,
                    cwd=cwd,
                    env={**os.environ, **(env or {})},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    process_group=0,
                )
            except OSError as error:
                raise BuildFailed(f"{argv[0]} cannot be run ({error})", remedy=remedy, log=log) from error
            code = self._wait(child)
        if code is None:
            raise BuildFailed(f"making {name} took longer than {COMMAND_S:.0f} s", remedy=remedy, log=log)
        if code != 0:
            raise BuildFailed(f"making {name} failed (exit status {code})", remedy=remedy, log=log)

    def _wait(self, child: subprocess.Popen[bytes]) -> int | None:
        """The exit status, None if it ran out of time; whatever happens, the child's group has ended afterwards."""
        try:
            waited = 0.0
            while waited < COMMAND_S:
                try:
                    return child.wait(0.2)
                except subprocess.TimeoutExpired:
                    waited += 0.2
                if self.cancelled.is_set():
                    raise Cancelled
            return None
        finally:
            if child.returncode is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()


@dataclass(frozen=True)
class Artefact:
    name: str
    what: str  # shown while it is made, with what to expect: "downloading … (once, 43 MB)"
    inputs: tuple[str, ...]  # all that decides its content
    make: Callable[[Path, Workshop], None]  # fills an empty folder; raises StackError
    needs: Callable[[], object] = lambda: None  # raises Missing for a tool that is not installed

    @property
    def folder(self) -> Path:
        """Where it lies once it is made."""
        key = hashlib.sha256("\0".join(self.inputs).encode()).hexdigest()[:10]
        return root() / f"{self.name}-{key}"

    @property
    def ready(self) -> bool:
        return self.folder.is_dir()

    def ensure(self, workshop: Workshop) -> Path:
        """Its folder, made now if it is not there. Raises StackError."""
        if self.ready:
            return self.folder
        self.needs()
        lock = root() / "locks" / self.name
        with locked(lock, wait_s=WAIT_S, waiting=self._waiting(workshop), cancelled=workshop.cancelled):
            if self.ready:  # by the run that we waited for
                return self.folder
            for left in root().glob(f"{self.name}-*.partial"):  # ours is the lock, so whoever wrote it is gone
                shutil.rmtree(left, ignore_errors=True)
            partial = self.folder.with_name(self.folder.name + ".partial")
            partial.mkdir(parents=True)
            workshop.log(self.name).unlink(missing_ok=True)
            try:
                with workshop.progress.step(self.name, self.what):
                    self.make(partial, workshop)
                partial.rename(self.folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
        return self.folder

    def _waiting(self, workshop: Workshop) -> Callable[[], None]:
        return lambda: workshop.progress.say(self.name, "another run is making it; waiting")
