"""Every example of docs/client.md runs as it stands, against a double of the worker's side."""

from __future__ import annotations

import asyncio
import re
import textwrap
from collections.abc import AsyncIterator
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
    assert len(EXAMPLES) == PAGE.count("```python") == 6


@pytest.mark.parametrize(("title", "code"), EXAMPLES, ids=[title for title, _ in EXAMPLES])
async def test_the_example_runs(title: str, code: str, wire: Double, stack: TestStack) -> None:
    code = code.replace('"localhost:9092"', f'"{wire.bootstrap}", pool="{wire.pool}", reply_topic="{wire.replies}"')
    code = code.replace("localhost:8333", stack.store_endpoint)
    names: dict[str, Any] = {}
    exec("async def main():\n" + textwrap.indent(code, "    ") + "    return locals()\n", names)
    found = await asyncio.wait_for(names["main"](), 60)
    match title:
        case "Publish and read the stream":
            assert found["text"] == "Hello Why does a water wheel turn?"
            assert found["result"].metadata == {"page": "17"}
        case "Many at once":
            assert found["answers"][7] == "Hello What is 7 plus 7?"
        case "Cancel":
            assert found["job"].done
