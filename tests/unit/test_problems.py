"""What is wrong with a record is told at a bounded cost, however much is wrong with it."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, ValidationError

from schemas import problems


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")
    a: int = 0


def wrong(fields: int) -> ValidationError:
    with pytest.raises(ValidationError) as caught:
        Strict.model_validate({f"unknown{number}": 1 for number in range(fields)})
    return caught.value


def test_of_tens_of_thousands_of_unknown_keys_only_the_first_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    searches = 0

    def search(*_: Any) -> list[str]:
        nonlocal searches
        searches += 1
        return []

    monkeypatch.setattr(problems, "get_close_matches", search)
    told = problems.problem(wrong(20_000), "", ["a"])
    assert searches <= problems.LOOKED_AT
    assert told.startswith("unknown0 is not a known field") and told.endswith(f"and {20_000 - problems.LOOKED_AT} more")
    assert len(told) < 300


def test_a_few_faults_are_told_as_before() -> None:
    assert "more" not in problems.problem(wrong(2), "", ["a"])
