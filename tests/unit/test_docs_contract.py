"""The contract's page names everything that is on the wire, so that it cannot fall behind the models."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest
from aiokafka.partitioner import murmur2

from schemas import bodies, events, job, names, records
from schemas.errors import RETRIABLE, ErrorCode

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "contract.md").read_text(encoding="utf-8")
STATES = (DOCS / "states.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("code", list(ErrorCode))
def test_every_error_code_is_there_with_its_retriability(code: ErrorCode) -> None:
    (row,) = re.findall(rf"^\| `{code}` \| (.*?) ?\|", PAGE, re.MULTILINE)
    assert (row.strip() == "yes") == (code in RETRIABLE)


def test_every_field_of_a_job_and_of_the_bodies_is_there() -> None:
    wanted = set(job.Job.model_fields) | set(job.Reply.model_fields) | set(job.OutputOptions.model_fields)
    for endpoint in bodies.BODIES:
        wanted |= bodies.fields_of(endpoint)
    assert not {name for name in wanted if f"`{name}`" not in PAGE}


def test_every_event_and_its_own_fields_are_there() -> None:
    for model in get_args(get_args(events.Event)[0]):
        kind = get_args(model.model_fields["type"].annotation)[0]
        assert f"`{kind}`" in PAGE
        for name in set(model.model_fields) - {"reason", "metadata", "timings", "duplicate"}:
            assert f"`{name}`" in PAGE or f"`{name}" in PAGE, (kind, name)
    for name in (*events.Timings.model_fields, *get_args(events.Waiting.model_fields["reason"].annotation)):
        assert f"`{name}`" in PAGE, name


def test_every_header_a_caller_or_reader_meets_is_there() -> None:
    between_workers = {names.H_STARTS, names.H_PUBLISHED, names.H_DUE, names.H_JOB, names.H_HOP, names.H_SEAL}
    for name in (value for key, value in vars(names).items() if key.startswith("H_")):
        assert f"`{name}`" in PAGE or name in between_workers, name


def test_the_hash_examples_are_what_kafka_computes() -> None:
    rows = re.findall(r"^\| `(\S+)` \| (\d+) \| (\d+) \| (\d+) \|$", PAGE, re.MULTILINE)
    assert len(rows) == 5
    for key, value, of_6, of_48 in rows:
        hashed = murmur2(key.replace("\\", "").encode()) & 0x7FFFFFFF
        assert (int(value), int(of_6), int(of_48)) == (hashed, hashed % 6, hashed % 48)


def test_every_status_has_its_row_among_the_states() -> None:
    for kind in get_args(records.StatusRecord.model_fields["kind"].annotation):
        assert f"`{kind}`" in STATES
