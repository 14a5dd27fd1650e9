from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_test_that_the_reliability_page_names_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "reliability.md").read_text()))
    there = set(re.findall(r"def (test_\w+)", "\n".join(p.read_text() for p in (ROOT / "tests").rglob("*.py"))))
    assert len(named) > 40 and named <= there, sorted(named - there)
