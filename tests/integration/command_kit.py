"""Commands as a user calls them: in a process of their own, with the addresses of the test's stack."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Any

import orjson

LIMIT_S = 90.0


async def headrace(bootstrap: str, pool: str, *arguments: str) -> tuple[int | None, str, str]:
    """(exit code, standard output, standard error) of `headrace …`. No `pool`: none is set."""
    given = {"HEADRACE_KAFKA__BOOTSTRAP": bootstrap, "COLUMNS": "200"} | ({"HEADRACE_POOL": pool} if pool else {})
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "service.cli", *arguments),
        stdout=PIPE,
        stderr=PIPE,
        env={**os.environ, **given},
        cwd=Path(__file__).parents[2],
    )
    out, err = await asyncio.wait_for(process.communicate(), LIMIT_S)
    assert b"Traceback" not in err, err.decode()
    return process.returncode, out.decode(), err.decode()


async def told(bootstrap: str, pool: str, *arguments: str) -> tuple[int | None, dict[str, Any]]:
    """The same with --json: (exit code, the object)."""
    code, out, err = await headrace(bootstrap, pool, *arguments, "--json")
    assert out.startswith("{"), err
    return code, orjson.loads(out)
