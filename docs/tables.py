"""Writes the tables of docs/operations.md that come from the code: `python docs/tables.py [--check]`.

A unit test runs the check, so that the page cannot say anything else than the code.
"""

from __future__ import annotations

import ast
import inspect
import io
import sys
import tokenize
from pathlib import Path
from typing import Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from service import settings as source
from service.telemetry import families

PAGE = Path(__file__).with_name("operations.md")


def settings_table() -> str:
    """Every variable with its default and what its comment in settings.py says."""
    comments = _comments()
    rows = ["| variable | default | says |", "| --- | --- | --- |"]
    rows += _rows(source.Settings, "HEADRACE_", comments)
    return "\n".join(rows)


def _rows(model: type[BaseModel], prefix: str, comments: dict[tuple[str, str], str]) -> list[str]:
    rows, nested = [], []
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            nested += _rows(kind, f"{prefix}{name.upper()}__", comments)
        else:
            says = comments.get((model.__name__, name), "")
            if get_origin(kind) is Literal:
                says = f"{' / '.join(get_args(kind))}{'; ' if says else ''}{says}"
            says = says.replace("|", "\\|").replace("<", "&lt;")
            rows.append(f"| `{prefix}{name.upper()}` | {_default(field)} | {says} |")
    return rows + nested


def _default(field: FieldInfo) -> str:
    if field.default_factory is not None:
        return "host name and process id"
    value = field.default
    if value in ("", (), None):
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value:_}`" if isinstance(value, int) and value >= 10_000 else f"`{value}`"


def _comments() -> dict[tuple[str, str], str]:
    """(class, field) → the comment beside the field."""
    text = inspect.getsource(source)
    by_line = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT and text.splitlines()[token.start[0] - 1].lstrip()[0] != "#"
    }
    found = {}
    classes = [item for item in ast.parse(text).body if isinstance(item, ast.ClassDef)]
    for item in classes:
        for line in item.body:
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                lines = range(line.lineno, (line.end_lineno or line.lineno) + 1)
                found[item.name, line.target.id] = " ".join(by_line[n] for n in lines if n in by_line)
    return found


def rendered(page: str) -> str:
    """The page with its generated parts made anew."""
    for name, table in (("metrics", families.table()), ("settings", settings_table())):
        begin, end = f"<!-- {name}: generated -->", f"<!-- {name}: end -->"
        head, _, rest = page.partition(begin)
        _, mark, tail = rest.partition(end)
        if not mark:
            raise ValueError(f"docs/operations.md has no marks for {name}")
        page = f"{head}{begin}\n\n{table}\n\n{end}{tail}"
    return page


def main() -> int:
    now = PAGE.read_text(encoding="utf-8")
    wanted = rendered(now)
    if "--check" not in sys.argv:
        PAGE.write_text(wanted, encoding="utf-8")
        return 0
    if now != wanted:
        print("docs/operations.md is behind the code: run `python docs/tables.py`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
