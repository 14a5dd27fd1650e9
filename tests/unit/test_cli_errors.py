"""What a command says when it cannot do what was asked: to people in a line, to programs in one shape."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import orjson
import pytest
import typer
from typer.testing import CliRunner

from client import Unreachable
from service.cli import build, session
from service.cli.dead_letter_topic import Survey
from service.cli.errors import Commands
from service.dead_letters import Spot


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["submit", "--tier", "fast", "hi"], "interactive"),
        (["submit", '{"messages": '], "looks like JSON, but is not"),
        (["dead-letters", "list", "--code", "nonsense"], "poison_job"),
        (["dead-letters", "replay", "--code", "nonsense"], "poison_job"),
        (["tail", "--no-such-option"], "no-such-option"),
        (["no-such-command"], "no-such-command"),
    ],
)
def test_wrong_usage_is_an_object_with_json(arguments: list[str], says: str) -> None:
    told = CliRunner().invoke(build(), [*arguments, "--json"])
    assert told.exit_code == 2
    document = orjson.loads(told.stdout)
    assert document["error"] == "wrong_usage" and says in document["message"]
    plain = CliRunner().invoke(build(), arguments)
    assert (plain.exit_code, plain.stdout) == (2, "") and plain.stderr


def failing() -> typer.Typer:
    app = typer.Typer(cls=Commands)

    @app.command()
    def away(json: bool = False) -> None:
        async def main() -> int:
            raise Unreachable("nobody answers")

        session.run(main())

    app.command("other")(lambda: None)
    return app


def test_a_failure_is_an_object_with_json_and_keeps_its_exit_code() -> None:
    told = CliRunner().invoke(failing(), ["away", "--json"])
    assert told.exit_code == 3
    assert orjson.loads(told.stdout) == {
        "error": "not_reachable",
        "message": "nobody answers (another broker: --bootstrap)",
    }
    plain = CliRunner().invoke(failing(), ["away"])
    assert (plain.exit_code, plain.stdout) == (3, "") and "nobody answers" in plain.stderr


def test_the_version_is_told() -> None:
    told = CliRunner().invoke(build(), ["--version"])
    assert told.exit_code == 0 and told.stdout.startswith("headrace 0.")


def test_the_readme_names_every_command() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    app = typer.main.get_command(build())
    assert isinstance(app, Commands)
    assert not [
        name for name in app.commands if f"headrace {name} " not in readme and f"headrace {name}\n" not in readme
    ]


def test_open_letters_are_those_without_a_note_and_the_newest_of_them() -> None:
    letters: list[Any] = [SimpleNamespace(at_ms=n, spot=Spot(0, n)) for n in range(4)]
    seen = Survey(letters=letters, notes={Spot(0, 3): cast(Any, object())}, matched=4)
    seen.keep_open(2)
    assert [letter.spot.offset for letter in seen.letters] == [1, 2] and seen.matched == 3
