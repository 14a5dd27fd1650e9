"""All that is slow before the first run, made side by side, with nothing but the system's Python.

`python3 -m infra.prepare UV [environment]`: the locked environment (then the model, which needs it), Kafka's jars,
Zipkin, the Collector; with `environment` only the first. What is there already costs nothing. Exit code 1 if the
environment, the model or Kafka cannot be had; the stack goes on without the others.
"""

from __future__ import annotations

import hashlib
import signal
import sys
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from types import FrameType

from infra import collector, kafka, model, zipkin
from infra.cache import Artefact, Workshop
from infra.errors import BuildFailed, Cancelled, Missing, StackError
from infra.lock import locked
from infra.progress import for_terminal
from infra.state import default_folder, project

ENVIRONMENT = project() / ".venv"
PYTHON = ENVIRONMENT / "bin" / "python"
# Exactly what is locked, with the CPU engine: `uv run` afterwards adds and removes nothing.
SYNC = ("sync", "--frozen", "--extra", "cpu")


class Preparation:
    def __init__(self, uv: str) -> None:
        self._uv = uv
        self._show = for_terminal()
        self._workshop = Workshop(default_folder() / "logs", self._show)

    def everything(self) -> None:
        """Raises StackError for what the stack cannot do without."""
        tasks: tuple[Callable[[], object], ...] = (
            self._environment_and_model,
            lambda: kafka.JARS.ensure(self._workshop),
            lambda: self._optional(zipkin.JAR),
            lambda: self._optional(collector.BINARY),
        )
        with ThreadPoolExecutor(len(tasks)) as pool:
            begun = [pool.submit(task) for task in tasks]
            try:
                wait(begun, return_when=FIRST_EXCEPTION)
                for task in begun:
                    if task.done():
                        task.result()
            except BaseException:
                self._workshop.cancelled.set()
                raise

    def environment(self) -> None:
        lock = default_folder() / "environment.lock"
        with locked(lock, wait_s=900, waiting=self._wait, cancelled=self._workshop.cancelled):
            # Not on every call: where a wheel's tag does not fit the interpreter, uv installs it again each time,
            # under the feet of running workers.
            stamp = ENVIRONMENT / "headrace-synced"
            state = hashlib.sha256()
            for name in ("pyproject.toml", "uv.lock"):
                state.update((project() / name).read_bytes())
            wanted = f"{' '.join(SYNC)} {state.hexdigest()}"
            engine = any(ENVIRONMENT.glob("lib/python3*/site-packages/vllm/__init__.py"))
            if engine and stamp.exists() and stamp.read_text() == wanted:
                return
            self._workshop.log("environment").unlink(missing_ok=True)
            with self._show.step("python", "installing the locked environment (the first time 2 GB)"):
                self._workshop.run(
                    "environment",
                    [self._uv, *SYNC],
                    cwd=project(),
                    remedy="read the log, then run the same command again",
                )
            stamp.write_text(wanted)

    def _environment_and_model(self) -> None:
        self.environment()
        model.artefact(str(PYTHON)).ensure(self._workshop)

    def _optional(self, artefact: Artefact) -> None:
        try:
            artefact.ensure(self._workshop)
        except (Missing, BuildFailed) as error:
            self._show.say(artefact.name, f"going on without traces: {error}")

    def _wait(self) -> None:
        self._show.say("python", "another run is installing the environment; waiting")


def main(uv: str, only: str = "") -> int:
    def end(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, end)
    preparation = Preparation(uv)
    try:
        if only == "environment":
            preparation.environment()
        else:
            preparation.everything()
    except (Cancelled, KeyboardInterrupt):
        return 130
    except StackError as error:
        print(f"headrace: {error}\n{error.detail}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
