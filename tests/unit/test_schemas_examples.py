"""The example records are the contract's own tests: models, JSON Schema and readers agree on each of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import orjson
import pytest
from pydantic import TypeAdapter, ValidationError

from schemas import export
from schemas.bodies import check_body
from schemas.events import read_event
from schemas.tenants import Tenant

EXAMPLES = sorted((Path(export.__file__).parent / "examples").glob("*.json"))
IDS = [path.stem for path in EXAMPLES]


def model_name(path: Path) -> str:
    return path.name.split(".")[0]


@pytest.mark.parametrize("path", EXAMPLES, ids=IDS)
def test_every_example_is_what_its_model_and_its_json_schema_accept(path: Path) -> None:
    text = path.read_bytes()
    name = model_name(path)
    adapter: TypeAdapter[Any] = TypeAdapter(export.MODELS[name])
    record = adapter.validate_json(text)
    jsonschema.Draft202012Validator(
        export.model_schema(name), format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    ).validate(orjson.loads(text))
    again = adapter.dump_json(record, by_alias=True)
    assert adapter.validate_json(again) == record


def test_every_model_has_an_example() -> None:
    assert {model_name(path) for path in EXAMPLES} == set(export.MODELS)


@pytest.mark.parametrize("path", [path for path in EXAMPLES if model_name(path) == "job"], ids=lambda path: path.stem)
def test_the_bodies_of_example_jobs_pass_the_allow_list(path: Path) -> None:
    job = orjson.loads(path.read_bytes())
    if "body" in job:
        check_body(job["endpoint"], job["body"], Tenant(id="acme"))


@pytest.mark.parametrize(
    "path", [path for path in EXAMPLES if model_name(path).startswith("event")], ids=lambda path: path.stem
)
def test_an_old_reader_survives_new_fields_in_events(path: Path) -> None:
    event = orjson.loads(path.read_bytes())
    event["from_the_future"] = {"deep": [1, 2]}
    assert read_event(orjson.dumps(event)).type == event["type"]


@pytest.mark.parametrize("name", ["job", "reply", "output-options", "cancel", "tenant", "model", "body-completions"])
def test_a_typo_in_what_callers_and_operators_write_is_refused(name: str) -> None:
    path = next(path for path in EXAMPLES if model_name(path) == name)
    record = {**orjson.loads(path.read_bytes()), "prioritty": 3}
    with pytest.raises(ValidationError):
        TypeAdapter(export.MODELS[name]).validate_python(record)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(record, export.model_schema(name), jsonschema.Draft202012Validator)


@pytest.mark.parametrize("name", ["job", "event-completed"])
@pytest.mark.parametrize("both", [True, False])
def test_json_schema_also_says_that_exactly_one_of_two_fields_is_given(name: str, both: bool) -> None:
    first, second = ("body", "input") if name == "job" else ("response", "output")
    path = next(path for path in EXAMPLES if model_name(path) == name and first in orjson.loads(path.read_bytes()))
    record = orjson.loads(path.read_bytes())
    filler = orjson.loads(
        next(p for p in EXAMPLES if model_name(p) == ("input-ref" if name == "job" else "blob-ref")).read_bytes()
    )
    if both:
        record[second] = filler
    else:
        record[first] = None
    with pytest.raises(ValidationError):
        TypeAdapter(export.MODELS[name]).validate_json(orjson.dumps(record))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(record, export.model_schema(name), jsonschema.Draft202012Validator)


def test_numbers_are_not_taken_for_times() -> None:
    path = next(path for path in EXAMPLES if model_name(path) == "event-started")
    with pytest.raises(ValidationError):
        read_event(orjson.dumps({**orjson.loads(path.read_bytes()), "at": 1896091203.25}))
