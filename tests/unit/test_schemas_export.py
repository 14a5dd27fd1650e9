"""The exported documents: valid, complete, and resolvable by other languages' tools."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import orjson
import pytest
import typer
from typer.testing import CliRunner

from schemas import export, names
from service.cli import schema as command


@pytest.mark.parametrize("name", sorted(export.MODELS))
def test_every_json_schema_is_valid_and_describes_its_fields_strictly(name: str) -> None:
    schema = export.model_schema(name)
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["$id"].endswith(f":{name}")


def test_one_document_holds_all_models_and_its_references_resolve() -> None:
    document = export.json_schema()
    jsonschema.Draft202012Validator.check_schema(document)
    assert set(export.MODELS) <= set(document["$defs"])
    for reference in references(document):
        assert resolve(document, reference) is not None, reference


def test_asyncapi_has_an_operation_with_reply_and_correlation_for_every_tier() -> None:
    document = export.asyncapi("gpu", "kafka.example.com:9092")
    assert document["asyncapi"] == "3.0.0"
    for tier in names.TIERS:
        operation = document["operations"][f"run-{tier}"]
        assert operation["action"] == "receive"
        channel = resolve(document, operation["channel"]["$ref"])
        assert channel["address"] == f"inference.gpu.jobs.{tier}"
        assert operation["reply"]["address"]["location"] == "$message.payload#/reply/topic"
        answers = [resolve(document, resolve(document, m["$ref"])["$ref"]) for m in operation["reply"]["messages"]]
        assert len(answers) == 8
        assert {a["correlationId"]["location"] for a in answers} == {"$message.payload#/job_id"}


def test_every_reference_in_asyncapi_resolves_and_no_openapi_discriminator_is_left() -> None:
    document = export.asyncapi()
    found = list(references(document))
    assert len(found) > 50
    for reference in found:
        assert resolve(document, reference) is not None, reference
    assert b'"propertyName"' not in orjson.dumps(document)


def test_payload_schemas_inside_asyncapi_still_judge_records() -> None:
    document = export.asyncapi()
    example = Path(export.__file__).parent / "examples" / "event-completed.inline.json"
    event = orjson.loads(example.read_bytes())
    schema = {**document, "$ref": "#/components/schemas/event-completed"}
    jsonschema.validate(event, schema, jsonschema.Draft202012Validator)
    del event["usage"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(event, schema, jsonschema.Draft202012Validator)


def run(*arguments: str) -> Any:
    app = typer.Typer()
    app.callback()(lambda: None)
    command.register(app)
    return CliRunner().invoke(app, ["schema", *arguments])


def test_the_command_prints_one_line_of_json() -> None:
    for arguments in (["--json"], ["--format", "asyncapi", "--json"]):
        result = run(*arguments)
        assert result.exit_code == 0
        assert result.output.count("\n") == 1
        orjson.loads(result.output)


def test_the_command_writes_a_file_for_each_model(tmp_path: Path) -> None:
    result = run("--out", str(tmp_path / "a" / "b"), "--json")
    assert result.exit_code == 0
    files = orjson.loads(result.output)["files"]
    assert len(files) == len(export.MODELS)
    for name in files:
        orjson.loads((tmp_path / "a" / "b" / name).read_bytes())
    result = run("--format", "asyncapi", "--out", str(tmp_path))
    assert (tmp_path / "asyncapi.json").exists() and "1 file written" in result.output


def test_the_command_says_in_one_line_where_it_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = run("--out", str(tmp_path / "file" / "x"))
    assert result.exit_code == 1
    assert "cannot write" in result.output and result.output.count("\n") == 1


def references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        for key, child in node.items():
            if key == "$ref" and isinstance(child, str):
                yield child
            else:
                yield from references(child)
    elif isinstance(node, list):
        for child in node:
            yield from references(child)


def resolve(document: Any, reference: str) -> Any:
    assert reference.startswith("#/")
    node = document
    for part in reference[2:].split("/"):
        node = node.get(part)
        if node is None:
            return None
    return node
