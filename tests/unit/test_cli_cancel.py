"""What `headrace cancel` refuses before it talks to anybody."""

from __future__ import annotations

import orjson
import pytest
import typer
from typer.testing import CliRunner

from service.cli import build


@pytest.mark.parametrize(
    "arguments",
    [
        ["--tenant", "acme"],
        ["--all"],
        ["x", "--tenant", "acme", "--all"],
        ["--tenant", "acme", "--all", "--run", "1"],
        ["x", "--tenant", "acme", "--run", "-1"],
    ],
)
def test_a_wish_that_names_too_little_or_too_much_is_wrong_usage(arguments: list[str]) -> None:
    assert CliRunner().invoke(build(), ["cancel", *arguments]).exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["submit", "hi", "--bootstrap", "localhost:abc"],
            "'localhost:abc' is no address of a broker: write host:port",
        ),
        (["tail", "--bootstrap", "a..b:9"], "'a..b:9' is no address"),
        (["worker", "--http-port", "99999"], "HEADRACE_HTTP_PORT"),
        (["models", "set", "m", "--pool", "p q", "--yes"], "pool"),
    ],
)
def test_what_no_command_could_use_is_wrong_usage_in_words(arguments: list[str], says: str) -> None:
    told = CliRunner().invoke(build(), [*arguments, "--json"])
    document = orjson.loads(told.stdout)
    assert told.exit_code == 2 and document["error"] == "wrong_usage" and says in document["message"]


def test_a_single_job_is_of_the_tenant_that_submit_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def options(_: object, tenant: str, *__: object) -> dict[str, str]:
        asked.append(tenant)
        raise typer.BadParameter("far enough")

    monkeypatch.setattr("service.cli.session.client_options", options)
    CliRunner().invoke(build(), ["cancel", "x", "--bootstrap", "127.0.0.1:9"])
    assert asked == ["acme"]
