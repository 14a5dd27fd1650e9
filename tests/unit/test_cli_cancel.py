"""What `headrace cancel` refuses before it talks to anybody."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from service.cli import build


@pytest.mark.parametrize(
    "arguments",
    [
        ["x"],
        ["--tenant", "acme"],
        ["--all"],
        ["x", "--tenant", "acme", "--all"],
        ["--tenant", "acme", "--all", "--run", "1"],
        ["x", "--tenant", "acme", "--run", "-1"],
    ],
)
def test_a_wish_that_names_too_little_or_too_much_is_wrong_usage(arguments: list[str]) -> None:
    assert CliRunner().invoke(build(), ["cancel", *arguments]).exit_code == 2
