"""Tokens are checked off the event loop, in batches, and answered in order; new tenants' topics are sorted rightly."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
import typer

from client import Client, Signer
from schemas import names
from service.cli import session
from service.credentials.verifier import BATCH, Verifier
from service.frames import Unanswered
from service.settings import Settings
from service.telemetry.spans import JobSpans
from tests.unit.credentials_kit import KEYS


async def test_checks_run_in_another_thread_in_batches_and_answer_in_order() -> None:
    seen: list[int] = []
    threads: set[int] = set()

    def check(number: int) -> int:
        threads.add(threading.get_ident())
        seen.append(number)
        return number * 2

    verifier = Verifier(check)
    ended: list[int] = []

    async def ask(number: int) -> None:
        assert await verifier.ask(number) == number * 2
        ended.append(number)

    await asyncio.gather(*(ask(number) for number in range(5 * BATCH)))
    assert seen == ended == list(range(5 * BATCH))
    assert len(threads) == 1 and threading.get_ident() not in threads
    verifier.close()


async def test_a_check_that_breaks_breaks_its_batch_alone() -> None:
    def check(number: int) -> int:
        if number == 1:
            raise RuntimeError("a fault of ours")
        return number

    verifier = Verifier(check)
    with pytest.raises(RuntimeError, match="a fault of ours"):
        await verifier.ask(1)
    assert await verifier.ask(2) == 2
    verifier.close()


async def test_what_waits_at_the_end_is_given_up_at_once() -> None:
    go = threading.Event()
    verifier = Verifier(lambda number: go.wait(5))
    questions = [asyncio.ensure_future(verifier.ask(number)) for number in range(2 * BATCH)]
    await asyncio.sleep(0.01)
    verifier.close()
    go.set()
    async with asyncio.timeout(2):
        done = await asyncio.gather(*questions, return_exceptions=True)
    assert all(isinstance(answer, asyncio.CancelledError) for answer in done[BATCH:])


async def test_one_who_gives_up_does_not_take_the_answer_from_others() -> None:
    go = threading.Event()
    verifier = Verifier(lambda number: go.wait(5) and number)
    first, second = (asyncio.ensure_future(verifier.ask(number)) for number in (1, 2))
    await asyncio.sleep(0.01)
    first.cancel()
    go.set()
    assert await second == 2
    verifier.close()


# -- what refusals look like in a trace


def test_a_record_that_nobody_is_told_about_has_its_span_in_its_publishers_trace() -> None:
    record = Unanswered(
        topic=names.CANCEL,
        partition=1,
        offset=7,
        tenant="acme",
        job_id="job-1",
        code="not_authorized",
        trace={names.H_TRACEPARENT: f"00-{'a' * 32}-{'b' * 16}-01"},
        broker_time=10.0,
        at=12.0,
    )
    span = JobSpans(Settings()).unanswered(record)
    assert span.context is not None and f"{span.context.trace_id:032x}" == "a" * 32
    assert span.parent is not None and f"{span.parent.span_id:016x}" == "b" * 16
    attributes: Any = span.attributes
    assert (span.name, attributes["error.type"], span.status.description) == (
        "process inference.cancel",
        "not_authorized",
        "not_authorized",
    )
    assert (attributes["headrace.tenant.id"], attributes["headrace.job.id"]) == ("acme", "job-1")
    assert span.end_time is not None and span.start_time is not None and span.end_time - span.start_time == 2 * 10**9


def test_without_a_publishers_trace_it_gets_one_of_its_own() -> None:
    record = Unanswered(
        topic="t", partition=0, offset=1, tenant="", job_id="", code="invalid_job", trace={}, broker_time=1.0, at=1.0
    )
    span = JobSpans(Settings()).unanswered(record)
    assert span.context is not None and span.context.trace_id and span.parent is None
    assert "headrace.tenant.id" not in (span.attributes or {})


# -- commands and client


def test_commands_sign_with_the_key_file_that_is_named(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    file = tmp_path / "acme.pem"
    file.write_bytes(KEYS["acme"].private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    options = session.client_options(Settings(), "acme", file, "2026-11")
    assert options["signer"].kid == "2026-11" and options["tenant"] == "acme"
    for content in (b"nonsense", KEYS["acme"].public_key().public_bytes_raw(), b"{}", b'{"kty":"OKP"}'):
        file.write_bytes(content)
        with pytest.raises(typer.BadParameter, match="private"):
            session.client_options(Settings(), "acme", file)
    with pytest.raises(typer.BadParameter, match="cannot be read"):
        session.client_options(Settings(), "acme", tmp_path / "none")


def test_a_private_jwk_is_taken_too(tmp_path: Path) -> None:
    import jwt

    file = tmp_path / "acme.jwk"
    algorithm = jwt.algorithms.OKPAlgorithm
    file.write_text(algorithm.to_jwk(KEYS["acme"]).replace("{", '{"kid": "from-the-file", ', 1))
    assert Signer.from_file(file).kid == "from-the-file"


def test_answers_are_looked_for_where_the_mode_sends_them() -> None:
    trusted, signed = Settings(), Settings(identity="signed", service_secret="s")
    assert session.reply_topic(trusted, "acme") == session.reply_topic(signed, None) == names.REPLIES
    assert session.reply_topic(signed, "acme") == "inference.replies.acme"


def test_a_signer_and_own_topics_are_one_tenants() -> None:
    with pytest.raises(ValueError, match="tenant="):
        Client("b:1", signer=Signer(KEYS["acme"]))
    with pytest.raises(ValueError, match="tenant="):
        Client("b:1", own_topics=True)
    with pytest.raises(ValueError, match="life_s"):
        Signer(KEYS["acme"], life_s=4000)


# -- tenants' topics


async def test_only_topics_with_the_pools_partitions_are_read(caplog: pytest.LogCaptureFixture) -> None:
    from consumers.tenant_topics import TenantTopics

    found: list[list[str]] = []

    async def extend(topics: list[str]) -> None:
        found.append(topics)

    topics = TenantTopics(Settings(pool="p", partitions=6), lambda: ["acme", "late"], extend)
    there = {
        "inference.p.jobs.bulk.acme": 6,
        "inference.p.jobs.bulk": 6,
        "inference.other.jobs.bulk.acme": 6,
        "inference.p.jobs.standard.wrong": 7,
        "inference.cancel.acme": 1,
        "inference.cancel": 6,
        "acme.answers": 6,
    }
    asked: list[list[str] | None] = []

    async def ask(names: list[str] | None) -> dict[str, int]:
        asked.append(names)
        return {name: there[name] for name in names if name in there} if names is not None else there

    topics._ask = ask  # type: ignore[method-assign]
    topics._sort(there)
    assert topics.jobs == {"inference.p.jobs.bulk.acme"} and topics.cancels == {"inference.cancel.acme": 1}
    assert "inference.p.jobs.standard.wrong" in caplog.text
    await topics.run_once()
    assert not found
    there |= {"inference.p.jobs.bulk.late": 6, "inference.cancel.late": 1}
    await topics.run_once()
    assert found == [["inference.p.jobs.bulk.late"]] and "inference.cancel.late" in topics.cancels
    await topics.run_once()
    assert len(found) == 1
    assert asked[-1] is not None and "inference.p.jobs.bulk.late" not in asked[-1]
