"""The identity modes on a broker with TLS, logins and access lists: who is believed, and what becomes of the others."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import TopicAuthorizationFailedError
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from client import JobFailed, UnknownTopic, Unreachable
from schemas import names
from schemas.verification import LEEWAY_S
from tests.integration.delivery_kit import until
from tests.integration.identity_kit import KEYS, MODES, SIGNERS, Site, authorization, own, plain, traced

MESSAGES = [{"role": "user", "content": "Name three rivers in Europe."}]
LIFE_S = 300


@pytest.fixture(scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    made = Site(tmp_path_factory.mktemp("identity"))
    try:
        await made.open()
        yield made
    finally:
        await made.close()


def new(what: str) -> str:
    return f"{what}-{uuid.uuid4().hex[:8]}"


async def refused(site: Site, mode: str, reason: str, before: float, record: str = "job") -> None:
    """It was counted."""
    now = await site.counts(mode, "headrace_unverified_total", record=record, reason=reason)
    assert now == before + 1, (reason, before, now)


async def counted(site: Site, mode: str, reason: str, record: str = "job") -> float:
    return await site.counts(mode, "headrace_unverified_total", record=record, reason=reason)


async def failing(site: Site, trace_id: str, code: str) -> None:
    """It is in the trace of whoever published it."""
    assert (await site.span(trace_id))["tags"]["error.type"] == code


# -- this one first: it needs the pool without a worker


async def test_a_job_that_queued_for_longer_than_its_token_lived_is_run(site: Site) -> None:
    id = new("patient")
    value = orjson.dumps(plain(id, "acme"))
    async with site.producer() as producer, site.reading(own("acme")) as read:
        # Expired by now but for the clocks' leeway, of which seconds are left.
        header = authorization(value, "acme", id, age_s=LIFE_S + LEEWAY_S - 6)
        await producer.send_and_wait(names.jobs_topic("signed", "standard"), value, key=b"acme", headers=[header])
        gone = time.time() + 8
        await until(lambda: time.time() > gone, "the token's end")
        await site.worker("signed")
        assert (await read.ended(id))["type"] == "completed"
        # A record that is written now with the same token comes too late.
        late = await counted(site, "signed", "expired")
        await producer.send_and_wait(names.jobs_topic("signed", "standard"), value, key=b"acme", headers=[header])
        await until_counted(site, "expired", late)


async def until_counted(site: Site, reason: str, before: float, record: str = "job", mode: str = "signed") -> None:
    ends = time.monotonic() + 20
    while await counted(site, mode, reason, record) == before:
        assert time.monotonic() < ends, f"nothing was refused for {reason}"
        await asyncio.sleep(0.1)


# -- every mode


@pytest.mark.parametrize("mode", MODES)
async def test_a_tenant_gets_its_answer_over_the_secured_broker(site: Site, mode: str) -> None:
    await site.worker(mode)
    async with site.client(mode, "acme") as client:
        result = await client.chat(MESSAGES, max_tokens=8, timeout_s=30)
        assert result.usage.completion_tokens == 8


@pytest.mark.parametrize("mode", MODES)
async def test_a_cancel_of_ones_own_job_is_heeded(site: Site, mode: str) -> None:
    await site.worker(mode)
    async with site.client(mode, "acme") as client:
        job = await client.publish({"messages": MESSAGES, "max_tokens": 2000})
        async for _ in job:
            break
        await job.cancel()
        with pytest.raises(Exception, match="cancelled"):
            await job.result(30)


@pytest.mark.parametrize("mode", ["topic", "signed"])
async def test_another_tenants_salt_and_blob_are_out_of_reach(site: Site, mode: str) -> None:
    await site.worker(mode)
    async with site.client(mode, "globex") as client:
        with pytest.raises(JobFailed, match="cache_salt") as salted:
            await client.chat(MESSAGES, cache_salt="of acme", timeout_s=30)
        assert salted.value.code == "invalid_request"
        foreign = {"bucket": "outputs", "key": "v1/acme/input.json", "size": 10, "sha256": "0" * 64}
        id = new("blob")
        trace_id, trace = traced()
        value = {**plain(id, "globex"), "input": foreign}
        del value["body"]
        raw = orjson.dumps(value)
        headers = [trace, *([authorization(raw, "globex", id)] if mode == "signed" else [])]
        topic = names.jobs_topic(mode, "standard", "globex" if mode == "topic" else None)
        async with site.producer("globex") as producer, site.reading(own("globex")) as read:
            await producer.send_and_wait(topic, raw, key=b"globex", headers=headers)
            end = await read.ended(id)
        assert (end["type"], end["error"]["code"]) == ("failed", "not_authorized")
        assert await site.counts(mode, "headrace_job_errors_total", code="not_authorized") >= 1
        await failing(site, trace_id, "not_authorized")


@pytest.mark.parametrize("mode", MODES)
async def test_the_self_test_of_the_cache_works_in_every_mode(site: Site, mode: str, tmp_path: Path) -> None:
    await site.worker(mode)
    keys: list[str] = []
    for tenant, key in KEYS.items() if mode == "signed" else ():
        file = tmp_path / f"{tenant}.pem"
        file.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        keys += ["--sign", f"{tenant}={file}"]
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "service.cli", "selftest", "cache-isolation", "--json", *keys],
        env={**os.environ, **site.environment(mode, "admin")},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()
    assert len([one for one in orjson.loads(done.stdout)["checks"] if one["name"] == "isolated"]) == 4


# -- the broker itself


async def test_a_wrong_password_and_an_unknown_authority_are_told_as_such(site: Site) -> None:
    from client import Client
    from schemas.security import KafkaSecurity

    good = site.secured.security("acme")
    address = site.stack.addresses.bootstrap
    wrong = KafkaSecurity(protocol="SASL_SSL", username="acme", password="guessed", ca_file=good.ca_file)
    with pytest.raises(Unreachable, match="password"):
        async with Client(address, security=wrong, connect_timeout_s=3):
            pass
    stranger = KafkaSecurity(protocol="SASL_SSL", username="acme", password=good.password)
    with pytest.raises(Unreachable, match="CA"):
        async with Client(address, security=stranger, connect_timeout_s=3):
            pass
    nowhere = KafkaSecurity(protocol="SSL", ca_file=site.folder / "none.pem")
    with pytest.raises(Unreachable, match=r"none\.pem"):
        async with Client(address, security=nowhere, connect_timeout_s=3):
            pass


async def test_no_tenant_writes_as_another_or_reads_anothers_answers(site: Site) -> None:
    """By the broker's access lists alone, as `headrace topics acls` gives them. (The common topics are shared with the
    other modes' pools of this broker.)"""
    await site.worker("topic")
    async with site.producer("acme") as producer:
        for topic in (
            names.jobs_topic("topic", "standard", "globex"),
            names.jobs_topic("topic", "standard"),
            names.cancel_topic("globex"),
            names.deferred_topic("topic"),
            names.status_topic("topic"),
            names.TENANTS,
        ):
            with pytest.raises(TopicAuthorizationFailedError):
                await producer.send_and_wait(topic, b"{}", key=b"k", partition=0)
    connection = site.secured.settings(site.stack.addresses.bootstrap, "acme").connection()
    async with AIOKafkaConsumer(**connection, enable_auto_commit=False) as consumer:
        hidden = {own("globex"), names.DEAD_LETTERS, names.USAGE, names.jobs_topic("topic", "standard", "globex")}
        consumer.assign([TopicPartition(topic, 0) for topic in hidden])
        await until(lambda: consumer._client.cluster.unauthorized_topics >= hidden, "the broker's refusals", 10)
        assert not hidden & await consumer.topics()
        consumer.assign([TopicPartition(names.jobs_topic("topic", "standard", "acme"), 0)])
        with pytest.raises(TopicAuthorizationFailedError):  # its own jobs it may write, and nobody's read
            await asyncio.wait_for(consumer.getone(), 10)
    async with site.client("topic", "acme", own_topics=False, reply_topic=own("acme")) as client:
        with pytest.raises(UnknownTopic, match="may not see it"):
            await client.publish({"messages": MESSAGES})


# -- topic


async def test_a_job_on_ones_own_topic_cannot_be_another_tenants(site: Site) -> None:
    await site.worker("topic")
    id = new("forged")
    trace_id, trace = traced()
    before = await counted(site, "topic", "tenant")
    async with site.producer("acme") as producer, site.reading(own("acme"), own("globex"), names.REPLIES) as read:
        topic = names.jobs_topic("topic", "standard", "acme")
        await producer.send_and_wait(topic, orjson.dumps(plain(id, "globex")), key=b"globex", headers=[trace])
        end = await read.ended(id, own("acme"))
        assert (end["type"], end["error"]["code"], end["tenant"]) == ("failed", "not_authorized", "acme")
        assert not read.events(id, own("globex")) and not read.events(id, names.REPLIES)
    await refused(site, "topic", "tenant", before)
    await failing(site, trace_id, "not_authorized")


async def test_a_cancel_on_ones_own_topic_does_not_stop_another_tenants_job(site: Site) -> None:
    await site.worker("topic")
    trace_id, trace = traced()
    before = await counted(site, "topic", "tenant", "cancel")
    async with site.client("topic", "globex") as client, site.producer("acme") as producer:
        job = await client.publish({"messages": MESSAGES, "max_tokens": 100})
        wish = orjson.dumps({"schema_version": 1, "tenant": "globex", "job_id": job.id})
        await producer.send_and_wait(names.cancel_topic("acme"), wish, key=f"globex|{job.id}".encode(), headers=[trace])
        await until_counted(site, "tenant", before, "cancel", "topic")
        assert (await job.result(30)).usage.completion_tokens == 100
    await failing(site, trace_id, "not_authorized")


async def test_a_tenant_that_is_added_is_served_without_a_restart(site: Site) -> None:
    await site.worker("topic")
    async with site.client("topic", "acme") as client:
        running = await client.publish({"messages": MESSAGES, "max_tokens": 1500, "ignore_eos": True})
        async for _ in running:
            break
        site.enlist("acme", "globex", "initech")
        await site.equip("topic")
        async with site.client("topic", "initech") as fresh:
            result = await fresh.chat(MESSAGES, max_tokens=4, timeout_s=45)
            assert result.usage.completion_tokens == 4
        attempt = running.attempt
        assert (await running.result(60)).usage.completion_tokens == 1500
        assert running.attempt == attempt, "the rebalance ran a job again that need not"
    log = (await site.worker("topic")).log.read_text()
    assert "tenants' topics found" in log
    assert "last commit" not in log, "what was finished was not committed before the rebalance"


# -- signed


SIGNED = names.jobs_topic("signed", "standard")

FORGED = {
    "another tenant's job under one's own key": ("tenant", {"tenant": "globex", "signer": "globex"}),
    "another tenant's name under one's own key": ("unknown_key", {"tenant": "acme", "signer": "globex"}),
    "a token for another job": ("job", {"job_id": "another"}),
    "a token of another pool": ("audience", {"pool": "default"}),
    "a token that had expired": ("expired", {"age_s": LIFE_S + LEEWAY_S + 5}),
}


@pytest.mark.parametrize("what", FORGED)
async def test_a_forged_job_ends_nowhere_but_in_the_dead_letters_and_the_common_topic(site: Site, what: str) -> None:
    await site.worker("signed")
    reason, said = FORGED[what]
    id = new("forged")
    trace_id, trace = traced()
    before = await counted(site, "signed", reason)
    value = orjson.dumps(plain(id, "acme", metadata={"note": "a secret"}))
    header = authorization(value, **{"tenant": "acme", "job_id": id, **said})
    async with (
        site.producer("globex") as producer,
        site.reading(own("acme"), own("globex"), names.REPLIES, names.DEAD_LETTERS) as read,
    ):
        await producer.send_and_wait(SIGNED, value, key=b"acme", headers=[header, trace])
        end = await read.ended(id, names.REPLIES)
        assert (end["type"], end["error"]["code"]) == ("failed", "not_authorized")
        told = orjson.dumps(end)
        assert b"secret" not in told and b"rivers" not in told and b"metadata" not in told
        assert not read.events(id, own("acme")) and not read.events(id, own("globex"))
        (letter,) = read.letters(id)
        assert dict(letter.headers)[names.H_REASON] == b"not_authorized"
    await refused(site, "signed", reason, before)
    assert await site.counts("signed", "headrace_dead_letters_total", code="not_authorized") >= 1
    await failing(site, trace_id, "not_authorized")


async def test_a_token_moved_to_another_body_is_refused_and_the_real_job_runs(site: Site) -> None:
    """Also under the same identity: what a forger claims must not answer for the tenant's own job (R7)."""
    await site.worker("signed")
    id = new("moved")
    real = orjson.dumps(plain(id, "acme"))
    forged = real.replace(b'"max_tokens":16', b'"max_tokens":1999')
    assert forged != real
    header = authorization(real, "acme", id)
    before = await counted(site, "signed", "content")
    async with site.producer() as producer, site.reading(own("acme"), names.REPLIES) as read:
        await producer.send_and_wait(SIGNED, forged, key=b"acme", headers=[header])
        await read.ended(id, names.REPLIES)
        await refused(site, "signed", "content", before)
        await site.stop("signed")  # the next worker knows of it by its status record alone
        await site.worker("signed")
        await producer.send_and_wait(SIGNED, real, key=b"acme", headers=[header])
        end = await read.ended(id, own("acme"))
        assert (end["type"], end["usage"]["completion_tokens"]) == ("completed", 16)
        # The same token and body once more: the same job, answered from the first.
        await producer.send_and_wait(SIGNED, real, key=b"acme", headers=[header])
        await until(lambda: len(read.ends(id, own("acme"))) == 2, "the copy's answer")
        assert read.ends(id, own("acme"))[1]["duplicate"] is True


async def test_a_foreign_reply_topic_is_refused_counted_and_traced(site: Site) -> None:
    await site.worker("signed")
    id = new("foreign")
    trace_id, trace = traced()
    value = orjson.dumps(plain(id, "globex", reply={"topic": own("acme")}))
    before = await site.counts("signed", "headrace_dead_letters_total", code="reply_topic_refused")
    headers = [authorization(value, "globex", id), trace, (names.H_REPLY_TO, own("acme").encode())]
    async with site.producer("globex") as producer, site.reading(own("acme"), names.DEAD_LETTERS) as read:
        await producer.send_and_wait(SIGNED, value, key=b"globex", headers=headers)
        await until(lambda: read.letters(id), "the dead letter")
        assert dict(read.letters(id)[0].headers)[names.H_REASON] == b"reply_topic_refused"
        assert not read.events(id)
    assert await site.counts("signed", "headrace_dead_letters_total", code="reply_topic_refused") == before + 1
    await failing(site, trace_id, "reply_topic_refused")


async def test_another_tenants_cancel_is_not_heeded(site: Site) -> None:
    await site.worker("signed")
    async with site.client("signed", "acme") as client, site.producer("globex") as producer:
        job = await client.publish({"messages": MESSAGES, "max_tokens": 150})
        wish = orjson.dumps({"schema_version": 1, "tenant": "acme", "job_id": job.id})
        forged = {
            "no_token": [],
            "tenant": [SIGNERS["globex"].cancel(tenant="globex", job_id=job.id, value=wish)],
            "unknown_key": [SIGNERS["globex"].cancel(tenant="acme", job_id=job.id, value=wish)],
            # The token of the tenant's own job, which anybody who reads jobs could copy.
            "audience": [SIGNERS["acme"].job(tenant="acme", job_id=job.id, pool="signed", value=wish)],
        }
        for reason, tokens in forged.items():
            trace_id, trace = traced()
            before = await counted(site, "signed", reason, "cancel")
            headers = [trace, *((names.H_AUTHORIZATION, token.encode()) for token in tokens)]
            await producer.send_and_wait(names.CANCEL, wish, key=f"acme|{job.id}".encode(), headers=headers)
            await until_counted(site, reason, before, "cancel")
            await failing(site, trace_id, "not_authorized")
        assert (await job.result(30)).usage.completion_tokens == 150


async def test_a_timed_job_comes_back_from_the_services_topic_and_a_forged_one_does_not(site: Site) -> None:
    await site.worker("signed")
    async with site.client("signed", "acme") as client:
        job = await client.publish({"messages": MESSAGES, "max_tokens": 4}, not_before=7.0)
        await until_moved(site)
        assert (await job.result(30)).usage.completion_tokens == 4
    id = new("planted")
    before = await counted(site, "signed", "seal")
    value = orjson.dumps(plain(id, "acme"))
    async with site.producer() as producer, site.reading(own("acme"), names.REPLIES, names.DEAD_LETTERS) as read:
        headers = [authorization(value, "acme", id)]
        await producer.send_and_wait(names.deferred_topic("signed"), value, key=b"acme", headers=headers)
        assert (await read.ended(id, names.REPLIES))["error"]["code"] == "not_authorized"
        assert not read.events(id, own("acme"))
    await refused(site, "signed", "seal", before)


async def until_moved(site: Site) -> None:
    ends = time.monotonic() + 20
    while not await site.counts("signed", "headrace_deferred_total"):
        assert time.monotonic() < ends, "the job was not moved to `deferred`"
        await asyncio.sleep(0.1)


async def test_believed_dead_letters_are_replayed_and_others_are_not(site: Site) -> None:
    await site.worker("signed")
    good, bad = new("believed"), new("doubted")
    async with site.producer() as producer, site.reading(own("acme"), names.REPLIES, names.DEAD_LETTERS) as read:
        value = orjson.dumps(plain(good, "acme", reply={"topic": own("acme"), "partition": 999}))
        header = authorization(value, "acme", good)
        await producer.send_and_wait(SIGNED, value, key=b"acme", headers=[header])
        await producer.send_and_wait(SIGNED, orjson.dumps(plain(bad, "acme")), key=b"acme")
        await until(lambda: read.letters(good) and read.letters(bad), "both dead letters")
        spots = {id: f"{letter.partition}/{letter.offset}" for id in (good, bad) for letter in read.letters(id)[:1]}
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-m", "service.cli", "dead-letters", "replay", *spots.values(), "--json"],
            env={**site.environment("signed", "admin"), "PATH": "/usr/bin:/bin"},
            capture_output=True,
            timeout=60,
        )
        said = orjson.loads(done.stdout)
        assert [one["letter"] for one in said["replayed"]] == [spots[good]], (said, done.stderr)
        assert [one["letter"] for one in said["refused"]] == [spots[bad]]
        # The same address is refused again, so the replay became a second letter: it was read, and believed.
        await until(lambda: len(read.letters(good)) == 2, "the replayed record's own dead letter")
        assert dict(read.letters(good)[1].headers)[names.H_REASON] == b"reply_topic_refused"
        assert not read.events(good, names.REPLIES)


# -- commands


async def test_keys_are_made_added_and_dropped_from_the_command_line(site: Site, tmp_path: Path) -> None:
    """On the registry topic, which `up --secure` filled as it does an open one."""
    environment = {**os.environ, **site.environment("signed", "admin")}
    del environment["HEADRACE_TENANTS_FILE"]

    async def headrace(*words: str, code: int = 0) -> bytes:
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-m", "service.cli", "tenants", *words],
            env=environment,
            capture_output=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == code, (words, done.stdout, done.stderr)
        return done.stdout

    file = tmp_path / "globex.pem"
    public = (await headrace("keygen", str(file), "--kid", "2026-11")).decode().strip()
    assert file.stat().st_mode & 0o777 == 0o600 and b"PRIVATE KEY" not in public.encode()
    await headrace("keygen", str(file), code=1)
    assert (await headrace("add-key", "globex", public, "--yes", "--json")).startswith(b"{")
    await headrace("add-key", "globex", public, "--yes", code=2)  # the same name twice
    entry = orjson.loads(await headrace("show", "globex", "--json"))
    assert [orjson.loads(key)["kid"] for key in entry["verification_keys"]] == ["2026-11"]
    await headrace("drop-key", "globex", "another", "--yes", code=2)
    await headrace("drop-key", "globex", "2026-11", "--yes")
    assert orjson.loads(await headrace("show", "globex", "--json"))["verification_keys"] == []


async def test_a_job_submitted_and_cancelled_from_the_command_line_is_signed(site: Site, tmp_path: Path) -> None:
    await site.worker("signed")
    file = tmp_path / "acme.pem"
    file.write_bytes(KEYS["acme"].private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    environment = {**os.environ, **site.environment("signed", "acme")}

    async def headrace(*words: str) -> Any:
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-m", "service.cli", *words, "--tenant", "acme", "--json"],
            env=environment,
            capture_output=True,
            timeout=60,
            check=False,
        )
        assert done.stdout, done.stderr
        return orjson.loads(done.stdout)

    ended = await headrace("submit", "Name three rivers.", "--max-tokens", "4", "--sign", str(file), "--timeout", "30s")
    assert (ended["type"], ended["tenant"]) == ("completed", "acme")
    before = await counted(site, "signed", "no_token", "cancel")
    await headrace("cancel", new("nothing"), "--sign", str(file))
    await headrace("cancel", new("nothing"))
    await until_counted(site, "no_token", before, "cancel")
    assert await counted(site, "signed", "no_token", "cancel") == before + 1


# -- last: what all of the above left on the logs


@pytest.mark.parametrize("mode", ["topic", "signed"])
async def test_every_job_was_answered_once_as_reconcile_sees_it(site: Site, mode: str) -> None:
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "service.cli", "reconcile", "--json"],
        env={**site.environment(mode, "admin"), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        timeout=100,
    )
    said = orjson.loads(done.stdout)
    assert done.returncode == 0 and said["lost"] == said["doubled"] == 0 and said["jobs"] > 3, (said, done.stderr)
