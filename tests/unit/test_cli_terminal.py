"""Nothing that came over the wire steers the user's terminal, and broken standard streams are told in a line."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from rich.table import Table
from rich.text import Text

from service.cli import errors
from service.cli.dead_letters import picture, table
from service.cli.terminal import Screen, plain, write
from service.dead_letters import Letter

HOSTILE = "a\x1b[31mred\x1b]0;title\x07\x9b2J\u202egnp.exe\u2066b\x7f\r"
SEEN = "a[31mred]0;title2Jgnp.exeb"
OBEYED = set("\x1b\x07\x9b\u202e\u2066\x7f\r")


def shown(renderable: Any) -> str:
    out = io.StringIO()
    Screen(file=out, force_terminal=True, color_system=None, width=200).print(renderable)
    return out.getvalue()


def test_text_is_kept_and_what_a_terminal_obeys_is_not() -> None:
    assert plain(HOSTILE) == SEEN
    assert plain("سلام\u200c 👩\u200d🚀\tx\n") == "سلام\u200c 👩\u200d🚀\tx\n"


def test_tables_lines_and_markup_show_nothing_that_is_obeyed() -> None:
    made = Table()
    made.add_column(HOSTILE)
    made.add_row(Text(HOSTILE), end_section=True)
    made.add_row(HOSTILE)
    for renderable in (made, Text(HOSTILE), HOSTILE):
        assert not OBEYED & set(shown(renderable)) and SEEN[:8] in shown(renderable)


def test_dead_letters_show_nothing_that_is_obeyed_and_no_markup() -> None:
    name = HOSTILE + "[/red][bold]"
    named = [f"headrace-{one}" for one in ("reason", "message", "origin", "failed-at")]
    headers = tuple((header, name.encode()) for header in (*named, name))
    value = orjson.dumps({"id": name, "tenant": name})
    record = SimpleNamespace(partition=0, offset=0, timestamp=0, key=name.encode(), value=value, headers=headers)
    letter = Letter.of(record)
    for made in (table([letter], {}, 200), picture(letter, None, content=True)):
        assert not OBEYED & set(shown(made))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_models_text_is_plain_on_a_terminal_and_as_it_is_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream, written in ((Terminal(), SEEN), (io.StringIO(), HOSTILE)):
        monkeypatch.setattr(sys, "stdout", stream)
        write(HOSTILE)
        assert stream.getvalue() == written


def test_an_error_is_told_without_what_is_obeyed(capsys: pytest.CaptureFixture[str]) -> None:
    errors.told(HOSTILE, 1)
    assert not OBEYED & set(capsys.readouterr().err)


# Whatever goes wrong


def guarded(monkeypatch: pytest.MonkeyPatch, work: Callable[[], None], *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["headrace", *arguments])
    monkeypatch.setattr("service.cli.terminal.open_streams", lambda: None)  # those of the test run stay as they are
    return errors.guarded(work)


def raising(error: BaseException) -> Callable[[], None]:
    def work() -> None:
        raise error

    return work


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (KeyboardInterrupt(), 130, "left by Ctrl-C"),
        (BrokenPipeError(), 0, ""),
        (OSError(28, "No space left on device"), 1, "No space left on device"),
        (FileNotFoundError(2, "No such file", "/x"), 1, "/x: No such file"),
        (TimeoutError(), 1, "TimeoutError"),
        (ValueError("several\nlines " + "x" * 999), 1, "ValueError: several lines xxx"),
        (KeyError(), 1, "KeyError (not expected"),
        (SystemExit(3), 3, ""),
        (SystemExit("text"), 1, ""),
    ],
)
def test_whatever_ends_a_command_is_one_line_and_an_exit_code(
    error: BaseException, code: int, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert guarded(monkeypatch, raising(error)) == code
    out, err = capsys.readouterr()
    assert out == "" and says in err and err.count("\n") == bool(says) and len(err) < 500
    assert guarded(monkeypatch, raising(error), "--json") == code
    assert bool(capsys.readouterr().out) == bool(says)


def test_arguments_that_are_no_text_are_wrong_usage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert guarded(monkeypatch, raising(AssertionError()), "job", os.fsdecode(b"\xff")) == 2
    assert capsys.readouterr().err == "headrace: argument 2 is not UTF-8\n"


def test_a_full_output_is_told_even_if_only_the_last_flush_finds_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert guarded(monkeypatch, lambda: print("x")) == 1
        assert capsys.readouterr().err == "headrace: No space left on device\n"
    # closed without an error: what was left in it went nowhere


def headrace(arguments: str, streams: str, **more: Any) -> subprocess.CompletedProcess[str]:
    command = f"set -o pipefail; '{sys.executable}' -m service.cli {arguments} {streams}"
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, **more)


def test_closed_full_and_narrow_streams_leave_no_traceback() -> None:
    said = headrace("schema", "| head -c 1")
    assert (said.returncode, said.stdout, said.stderr) == (0, "{", "")
    said = headrace("schema", ">/dev/full")
    assert (said.returncode, said.stderr) == (1, "headrace: No space left on device\n")
    said = headrace("submit --bootstrap localhost:abc hi", ">&- <&-")
    assert said.returncode == 2 and "'localhost:abc' is no address" in said.stderr


def test_ctrl_c_while_the_command_line_is_being_built_is_one_line() -> None:
    """As early as Python lets us know: nothing large is imported before `main` can catch it."""
    code = "import sys, service.cli; sys.exit('typer' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
    code = """if True:
        import os, signal, sys, service.cli
        signal.signal(signal.SIGINT, signal.default_int_handler)
        class Interrupt:
            def find_spec(self, name, *_):
                if name == "typer":
                    os.kill(os.getpid(), signal.SIGINT)
        sys.meta_path.insert(0, Interrupt())
        service.cli.main()
    """
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (said.returncode, said.stderr) == (130, "headrace: left by Ctrl-C\n")


def test_a_worker_whose_ready_line_nobody_reads_serves_on() -> None:
    code = """if True:
        import types, service.app, service.cli.worker as command
        class Worker:
            def __init__(self, settings):
                self.health = types.SimpleNamespace(url="http://x")
            async def run(self, on_ready, on_stopping):
                on_ready(self)
                command.told("serves on", 0)
        service.app.Worker = Worker
        command.worker(pool=None, name="w", engine="simulated", http_port=0, json=True)
    """
    with Path("/dev/full").open("w") as full:
        said = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (said.returncode, said.stderr) == (0, "headrace: serves on\n")
