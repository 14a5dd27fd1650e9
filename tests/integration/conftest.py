"""The real parts that integration tests run against: one stack for the whole run, on free ports, stopped again at the end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class TestStack:
    """Addresses of the running parts; `model` is a folder in Hugging Face layout."""

    __test__ = False

    bootstrap: str
    store_endpoint: str
    otlp_endpoint: str
    zipkin: str
    model: Path


@pytest.fixture(scope="session")
def stack() -> Iterator[TestStack]:
    bootstrap = os.environ.get("HEADRACE_TEST_BOOTSTRAP")
    if not bootstrap:
        pytest.skip("no stack")
    yield TestStack(
        bootstrap=bootstrap,
        store_endpoint=os.environ.get("HEADRACE_TEST_STORE", ""),
        otlp_endpoint=os.environ.get("HEADRACE_TEST_OTLP", ""),
        zipkin=os.environ.get("HEADRACE_TEST_ZIPKIN", ""),
        model=Path(os.environ.get("HEADRACE_TEST_MODEL", "")),
    )
