"""The operator's page says what the code does."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from service.settings import Settings
from service.telemetry.families import FAMILIES

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_tables", DOCS / "tables.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_generated_tables_are_those_of_the_code(tables: ModuleType) -> None:
    page = (DOCS / "operations.md").read_text(encoding="utf-8")
    assert tables.rendered(page) == page, "run `python docs/tables.py`"


def test_every_setting_is_in_the_table_with_its_comment(tables: ModuleType) -> None:
    table = tables.settings_table()
    assert table.count("\n| `HEADRACE_") == sum(
        len(getattr(field.annotation, "model_fields", {"": ""})) for field in Settings.model_fields.values()
    )
    assert (
        "| `HEADRACE_TELEMETRY__BAGGAGE_KEYS` |  | W3C baggage that is copied to process spans; never trusted |"
        in table
    )
    row = next(line for line in table.splitlines() if "MAX_UNACKNOWLEDGED_BYTES" in line)
    assert "`268_435_456`" in row and "R10" in row


def test_metrics_named_in_the_text_exist() -> None:
    page = (DOCS / "operations.md").read_text(encoding="utf-8")
    known = {family.full_name for family in FAMILIES}
    named = {
        word.split("{")[0].strip("`,.:;)") for word in page.replace("(", " ").split() if word.startswith("`headrace_")
    }
    assert named - known - {"headrace_*"} == set()


def test_a_page_without_marks_is_refused(tables: ModuleType) -> None:
    with pytest.raises(ValueError, match="marks for metrics"):
        tables.rendered("# Operations")
