"""`headrace schema`: the contract as JSON Schema or AsyncAPI 3, printed or written into a folder."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer

from schemas import export
from service.cli import session


class Format(StrEnum):
    JSON_SCHEMA = "json-schema"
    ASYNCAPI = "asyncapi"


def register(app: typer.Typer) -> None:
    app.command("schema")(schema)


def schema(
    format: Annotated[Format, typer.Option("--format", help="Which document.")] = Format.JSON_SCHEMA,
    out: Annotated[Path | None, typer.Option(help="A folder to write to; without it the document is printed.")] = None,
    pool: Annotated[str, typer.Option(help="The pool whose topics the AsyncAPI document names.")] = "default",
    bootstrap: Annotated[
        str | None, typer.Option(help="The broker it names; the configured one or the local stack's by default.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON on standard output.")] = False,
) -> None:
    """The wire contract, for other languages: a JSON Schema per model, or one AsyncAPI 3 document."""
    broker = ""
    if format is Format.ASYNCAPI:
        broker = bootstrap or os.environ.get(session.BOOTSTRAP) or session.local_stack().get(session.BOOTSTRAP, "")
        broker = broker or "localhost:9092"
    if out is None:
        document = export.json_schema() if format is Format.JSON_SCHEMA else export.asyncapi(pool, broker)
        typer.echo(_text(document, indent=not as_json))
        return
    if format is Format.JSON_SCHEMA:
        files = {f"{name}.schema.json": document for name, document in export.json_schemas().items()}
    else:
        files = {"asyncapi.json": export.asyncapi(pool, broker)}
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, document in files.items():
            (out / name).write_text(_text(document, indent=True) + "\n", encoding="utf-8")
    except OSError as error:
        message = f"cannot write to {out}: {error.strerror or type(error).__name__}; name another folder"
        raise typer.Exit(session.told(message, session.FAILED)) from None
    if as_json:
        typer.echo(_text({"format": str(format), "folder": str(out), "files": sorted(files)}, indent=False))
    else:
        typer.echo(f"{len(files)} file{'s' if len(files) != 1 else ''} written to {out}")


def _text(document: dict[str, Any], *, indent: bool) -> str:
    return orjson.dumps(document, option=orjson.OPT_INDENT_2 if indent else 0).decode()
