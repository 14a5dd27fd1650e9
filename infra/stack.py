"""The whole local stack of one folder: `up`, `down`, `status`, and the addresses for those who use it.

`up` is idempotent: it leaves alone what answers, starts what does not, and ends what it started if it fails.
It starts no worker and holds no job.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from infra import model, progress, store
from infra.errors import PartFailed
from infra.lock import locked
from infra.part import NotReady, Part
from infra.process import Process, end_strays
from infra.secured import ADMIN, Secured
from infra.startup import ESSENTIAL, PARTS, TRACES, Startup, traces_ready
from infra.state import State, default_folder
from schemas.security import PLAINTEXT, KafkaSecurity

PARTITIONS = 6  # of a development pool (design.md §4)
# Another `up` in the same folder may be building what takes minutes.
LOCK_S = 1800.0


@dataclass(frozen=True)
class Addresses:
    bootstrap: str
    store_endpoint: str  # without a scheme
    otlp_endpoint: str  # empty if there is no Collector
    zipkin: str  # empty if there is no Zipkin
    model: Path | None  # None if it is not prepared
    security: KafkaSecurity = PLAINTEXT  # an operator's


@dataclass(frozen=True)
class PartStatus:
    name: str
    state: str  # running | not answering | crashed | stopped | not installed
    pid: int | None
    address: str
    log: str
    detail: str = ""


class Stack:
    """One stack, in `folder`. HEADRACE_ENGINE__MODEL, if set, is used instead of the development model."""

    def __init__(
        self,
        folder: Path | None = None,
        *,
        partitions: int | None = None,
        pool: str = "default",
        with_model: bool = True,
        secure: bool = False,
        show: progress.Progress | None = None,
    ) -> None:
        self.folder = (folder or default_folder()).absolute()
        self._pool = pool
        self._partitions = partitions  # None = HEADRACE_PARTITIONS, else as before
        self.notes: list[str] = []  # what the last `up` had to do without, and what would install it
        self.changed: list[str] = []  # what the last `up` started, created or changed; empty = it was all there
        self._with_model = with_model
        self._secure = secure  # False: as it was made
        self._show = show or progress.for_terminal()
        self._state = State.read(self.folder)

    # ── up ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def up(self) -> Addresses:
        """Brings every part to readiness and applies the topics. Blocks; not for an event loop's thread.

        Raises StackError, TopicsRefused, BrokerUnreachable. Then, and on Ctrl-C, the processes it started have ended.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._locked():
            state = self._state = State.read(self.folder)
            state.pool = self._pool
            state.partitions = self._partitions or _asked_partitions() or state.partitions or PARTITIONS
            if self._secure:
                self._make_secure()
            start = Startup(self.folder, state, self._show, with_model=self._with_model)
            try:
                start.run()
            finally:
                self.notes, self.changed = start.notes, start.changed
            state.addresses = {part.name: part.address(state.ports) for part in (PARTS if state.traces else ESSENTIAL)}
            state.write(self.folder)
        return self.addresses

    # ── down and status ─────────────────────────────────────────────────────────────────────────────────────────────

    def down(self) -> list[str]:
        """Ends every process of this stack, also of an `up` that was killed. Returns what was running; data stays."""
        if not self.folder.exists():
            return []
        with self._locked():
            stopped = self._stop(PARTS)
            if end_strays(self.folder, grace_s=5.0):
                stopped.append("strays")
            self._state = State.read(self.folder)
            self._state.addresses = {}
            if self._state.ports:
                self._state.write(self.folder)
        return stopped

    def status(self) -> list[PartStatus]:
        self._state = State.read(self.folder)
        with ThreadPoolExecutor(len(PARTS)) as pool:
            return list(pool.map(self._status, PARTS))

    @property
    def running(self) -> bool:
        """Whether an `up` came to its end and its essential parts still run."""
        self._state = State.read(self.folder)
        return bool(self._state.addresses) and all(self.process(part.name).alive for part in ESSENTIAL)

    # ── for those who use it ────────────────────────────────────────────────────────────────────────────────────────

    @property
    def addresses(self) -> Addresses:
        """Raises StackError if the stack is down."""
        known = self._state.addresses
        if not known:
            raise PartFailed("the local stack is down", remedy="headrace up")
        return Addresses(
            bootstrap=known["kafka"],
            store_endpoint=known["store"],
            otlp_endpoint=known.get("collector", ""),
            zipkin=known.get("zipkin", ""),
            model=Path(self._state.model) if self._state.model else None,
            security=PLAINTEXT if self.secured is None else self.secured.security(ADMIN),
        )

    @property
    def secured(self) -> Secured | None:
        """The users of a broker that asks who one is; None: it is open."""
        return Secured.read(self.folder)

    def environment(self) -> dict[str, str]:
        """The HEADRACE_… variables that tie a worker or a client to this stack. Raises StackError if it is down."""
        at = self.addresses
        variables = {
            "HEADRACE_POOL": self._state.pool,
            "HEADRACE_PARTITIONS": str(self._state.partitions),
            "HEADRACE_STATE_DIR": str(self.folder),
            "HEADRACE_KAFKA__BOOTSTRAP": at.bootstrap,
            "HEADRACE_STORE__ENDPOINT": at.store_endpoint,
            "HEADRACE_STORE__ACCESS_KEY": store.ACCESS_KEY,
            "HEADRACE_STORE__SECRET_KEY": store.SECRET_KEY,
            "HEADRACE_STORE__BUCKET": store.BUCKET,
            "HEADRACE_TELEMETRY__OTLP_ENDPOINT": at.otlp_endpoint,
        }
        if at.model is not None:
            variables["HEADRACE_ENGINE__MODEL"] = str(at.model)
            variables["HEADRACE_ENGINE__SERVED_NAME"] = model.SERVED_NAME
        if (secured := self.secured) is not None:
            variables |= secured.environment()
        return variables

    def process(self, part: str) -> Process:
        """The process of a part (kafka, store, collector, zipkin): fault tests kill by it."""
        return Process(part, self.folder)

    def _make_secure(self) -> None:
        """Raises StackError for a stack whose broker was made open: its data knows no users."""
        if self.secured is None and (self.folder / "kafka" / "data" / "meta.properties").exists():
            raise PartFailed("this stack was made without --secure", remedy="headrace down && make clean, then again")
        Secured.make(self.folder)

    # ── inside ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _locked(self) -> AbstractContextManager[None]:
        return locked(
            self.folder / "lock",
            wait_s=LOCK_S,
            waiting=lambda: self._show.say("stack", "another command is at work on this stack; waiting"),
        )

    def _stop(self, parts: tuple[Part, ...]) -> list[str]:
        """Ends them all at the same time; returns which ran."""
        with ThreadPoolExecutor(len(PARTS)) as pool:
            ended = list(pool.map(lambda part: self.process(part.name).stop(part.stop_s), parts))
        return [part.name for part, ran in zip(parts, ended, strict=True) if ran]

    def _status(self, part: Part) -> PartStatus:
        process = self.process(part.name)
        identity = process.identity()
        state, detail = "stopped", ""
        if identity is not None and not identity.alive:
            state, detail = "crashed", "headrace up starts it again"
        elif identity is not None:
            state = "running"
            try:
                part.probe(self._state.ports, self.folder)
            except (NotReady, OSError, KeyError) as error:
                state, detail = "not answering", f"{error}; headrace up starts it again"
        elif part in TRACES and self._state.ports and not traces_ready():
            state, detail = "not installed", "headrace up says what is missing"
        known = all(name in self._state.ports for name in part.ports)
        return PartStatus(
            name=part.name,
            state=state,
            pid=identity.pid if identity is not None and identity.alive else None,
            address=part.address(self._state.ports) if known else "",
            log=str(process.log),
            detail=detail,
        )


def _asked_partitions() -> int:
    """0 = not asked for. Raises StackError."""
    given = os.environ.get("HEADRACE_PARTITIONS", "0")
    if not given.isdigit():
        raise PartFailed(f"HEADRACE_PARTITIONS is {given!r}", remedy="set it to a number, or leave it out")
    return int(given)
