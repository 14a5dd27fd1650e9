"""Every example of docs/client.md runs as it stands, against a double of the worker's side."""

from __future__ import annotations

import asyncio
import json
import re
import textwrap
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import TestStack
from tests.integration.reply_double import Double, Job, double, ordinary

PAGE = (Path(__file__).parents[2] / "docs" / "client.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^## (.*?)\n(?:(?!^## ).*\n)*?```python\n((?:.*\n)*?)```", PAGE, re.MULTILINE)


@pytest.fixture
async def wire(stack: TestStack) -> AsyncIterator[Double]:
    async def cancellable(job: Job) -> None:
        if "million" not in job.fields["body"]["messages"][0]["content"]:
            await ordinary(job)
            return
        await job.started()
        while not any(wish["job_id"] == job.fields["id"] for _, wish in made.cancels):
            await asyncio.sleep(0.02)
        await job.event("cancelled", seq=1, partial={"choices": [{"index": 0, "text": "1 2 3"}]})

    async with double(stack.bootstrap) as made:
        made.script = cancellable
        yield made


def test_the_page_has_its_examples() -> None:
    assert len(EXAMPLES) == PAGE.count("```python") == 8


@pytest.mark.parametrize(("title", "code"), EXAMPLES, ids=[title for title, _ in EXAMPLES])
async def test_the_example_runs(
    title: str, code: str, wire: Double, stack: TestStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_KAFKA__BOOTSTRAP", wire.bootstrap)
    monkeypatch.setenv("HEADRACE_STORE__ENDPOINT", stack.store_endpoint)
    monkeypatch.setenv("HEADRACE_STORE__ACCESS_KEY", "headrace")
    monkeypatch.setenv("HEADRACE_STORE__SECRET_KEY", "headrace-secret")
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"Number {n}."} for n in range(150)]
    write(tmp_path / "rows.jsonl", [*rows, rows[0]])
    address = 'os.environ["HEADRACE_KAFKA__BOOTSTRAP"]'
    code = code.replace(address, f'{address}, pool="{wire.pool}", reply_topic="{wire.replies}"')
    found = await run(code)
    match title:
        case "Publish and read the stream":
            assert found["text"] == "Hello Why does a water wheel turn?"
            assert found["result"].metadata == {"page": "17"}
        case "Many at once":
            assert found["answers"][7] == "Hello What is 7 plus 7?"
        case "Many jobs":
            await many_jobs(code, wire, rows, tmp_path / "results.jsonl")
        case "Cancel":
            assert found["job"].done


async def many_jobs(code: str, wire: Double, rows: list[dict[str, str]], results: Path) -> None:
    """Every row once; a second call does what is left, and lists what fails."""
    lines = read(results)
    assert sorted(line["text"] for line in lines) == sorted(f"Hello {row['prompt']}" for row in rows)
    published = wire.jobs.qsize()
    assert published == len(rows)

    async def fails(job: Job) -> None:
        await job.event("failed", error={"code": "internal", "message": "no", "retriable": True})

    wire.script = fails
    write(results, lines[1:])
    found = await run(code)
    assert list(found["failures"]) == [lines[0]["id"]] and wire.jobs.qsize() == published + 1


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


async def run(code: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec("async def main():\n" + textwrap.indent(code, "    ") + "    return locals()\n", names)
    found: dict[str, Any] = await asyncio.wait_for(names["main"](), 60)
    return found
