"""Who is believed in each identity mode, and what becomes of those who are not (tenancy.md §2)."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import jwt
import orjson
import pytest
from pydantic import ValidationError

from client.signing import Signer
from schemas import names
from schemas.errors import ErrorCode
from schemas.tenants import Tenant
from schemas.verification import LEEWAY_S, MAX_LIFE_S, PublicKey, digest_of
from service.credentials import Doubt, Proof, Reason, build
from service.credentials.seal import Seal, Sealer, seal_in
from service.dead_letters import Letter, NotReplayable, replay
from service.deferred.transfer import Transfer, first_time
from service.intake.verdict import Refused, Undeliverable, Unverified
from service.job import Job, Place, Record
from tests.unit.credentials_kit import (
    DEFERRED,
    JOBS,
    KEYS,
    REGISTRY,
    SECRET,
    SIGNERS,
    intake,
    job,
    judge,
    public,
    record,
    settings,
    signed,
)

SEALER = Sealer(SECRET)


def unverified(verdict: Any, reason: Reason, code: ErrorCode = ErrorCode.NOT_AUTHORIZED) -> Unverified:
    """Nobody is believed: one event on the common reply topic and a dead letter, with nothing of the record in it."""
    assert isinstance(verdict, Unverified), verdict
    assert (verdict.doubt.reason, verdict.doubt.code) == (reason, code)
    head = verdict.head
    assert (head.reply_topic, head.reply_partition) == (names.REPLIES, None)
    assert (head.metadata, head.model, head.endpoint, head.stream) == (None, "", "", False)
    assert "secret" not in verdict.doubt.message
    assert (verdict.dead.code, verdict.dead.value) == (code, verdict.record.value)
    assert seal_in(tuple(verdict.dead.headers)) in (None, seal_in(verdict.record.headers)), "vouched for all the same"
    return verdict


# -- signed


def test_a_signed_job_is_believed_and_answered_on_its_tenants_own_topic() -> None:
    value = job()
    verdict = judge(intake("signed"), record(value, signed(value)))
    assert isinstance(verdict, Job)
    assert (verdict.head.tenant, verdict.head.reply_topic) == ("acme", "inference.replies.acme")


def test_bearer_may_stand_before_the_token() -> None:
    value = job()
    name, token = signed(value)
    assert isinstance(judge(intake("signed"), record(value, (name, b"Bearer " + token))), Job)


def test_a_large_signed_job_is_believed_too() -> None:
    value = job()
    value["body"]["messages"][0]["content"] = "x" * 200_000
    assert isinstance(judge(intake("signed"), record(value, signed(value))), Job)


@pytest.mark.parametrize("signer", ["acme", "acme-next"])
def test_every_key_of_the_tenant_is_good_while_keys_change(signer: str) -> None:
    value = job()
    assert isinstance(judge(intake("signed"), record(value, signed(value, signer))), Job)


def test_a_token_without_kid_is_checked_against_all_keys_of_the_tenant() -> None:
    value = orjson.dumps(job())
    now = int(time.time())
    claims = {"sub": "acme", "jti": "job-1", "aud": "default", "iat": now, "exp": now + 60, "sha256": digest_of(value)}
    token = jwt.encode(claims, KEYS["acme-next"], algorithm="EdDSA")
    assert isinstance(judge(intake("signed"), record(value, (names.H_AUTHORIZATION, token.encode()))), Job)


FORGED: dict[str, tuple[dict[str, Any], str, dict[str, Any], Reason]] = {
    "another tenant's job, signed with one's own key": (
        job(tenant="acme"),
        "globex",
        {"tenant": "globex"},
        Reason.TENANT,
    ),
    "another tenant's name over one's own key": (job(tenant="acme"), "globex", {}, Reason.UNKNOWN_KEY),
    "a key of nobody": (job(), "stranger", {}, Reason.UNKNOWN_KEY),
    "a token for another job": (job(), "acme", {"job_id": "job-2"}, Reason.JOB),
    "a token for another pool": (job(), "acme", {"pool": "other"}, Reason.AUDIENCE),
    "a tenant without keys": (job(tenant="keyless"), "acme", {}, Reason.UNKNOWN_KEY),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_sender_is_refused(name: str) -> None:
    value, signer, claims, reason = FORGED[name]
    unverified(judge(intake("signed"), record(value, signed(value, signer, **claims))), reason)


def test_a_signature_that_is_not_of_the_named_key_is_refused() -> None:
    value = job()
    thief = Signer(KEYS["stranger"], kid=SIGNERS["acme"].kid)
    token = thief.job(tenant="acme", job_id="job-1", pool="default", value=orjson.dumps(value))
    unverified(judge(intake("signed"), record(value, (names.H_AUTHORIZATION, token.encode()))), Reason.SIGNATURE)


def test_a_token_moved_to_another_body_is_refused() -> None:
    other = job()
    other["body"]["max_tokens"] = 4000
    unverified(judge(intake("signed"), record(other, signed(job()))), Reason.CONTENT)


def test_a_job_without_a_token_is_refused() -> None:
    unverified(judge(intake("signed"), record(job())), Reason.NO_TOKEN)


def test_a_tenant_that_nobody_knows_is_refused() -> None:
    value = job(tenant="ghost")
    unverified(judge(intake("signed"), record(value, signed(value))), Reason.TENANT, ErrorCode.UNKNOWN_TENANT)


BAD = [b"", b"x", b"a.b.c", b"Bearer ", b"e30.e30.e30", b"\xff\xfe", b"." * 300, b"e30." + b"A" * 5000 + b".AA"]


@pytest.mark.parametrize("token", BAD)
def test_what_is_no_token_is_refused_and_breaks_nothing(token: bytes) -> None:
    verdict = judge(intake("signed"), record(job(), (names.H_AUTHORIZATION, token)))
    unverified(verdict, Reason.BAD_TOKEN if token else Reason.NO_TOKEN)


@pytest.mark.parametrize("algorithm", ["none", "HS256"])
def test_another_algorithm_is_refused_also_with_the_public_key_as_secret(algorithm: str) -> None:
    value = orjson.dumps(job())
    now = int(time.time())
    claims = {"sub": "acme", "jti": "job-1", "aud": "default", "iat": now, "exp": now + 60, "sha256": digest_of(value)}
    secret = None if algorithm == "none" else KEYS["acme"].public_key().public_bytes_raw()
    token = jwt.encode(claims, secret, algorithm=algorithm, headers={"kid": SIGNERS["acme"].kid})
    unverified(judge(intake("signed"), record(value, (names.H_AUTHORIZATION, token.encode()))), Reason.BAD_TOKEN)


# -- times: the broker's, never this machine's


def token_of(value: bytes, issued: float, expires: float, **claims: Any) -> tuple[str, bytes]:
    said = {"sub": "acme", "jti": "job-1", "aud": "default", "iat": issued, "exp": expires, "sha256": digest_of(value)}
    wanted = {name: claim for name, claim in {**said, **claims}.items() if claim is not None}
    text = jwt.encode(wanted, KEYS["acme"], algorithm="EdDSA", headers={"kid": SIGNERS["acme"].kid})
    return names.H_AUTHORIZATION, text.encode()


def test_a_job_that_queued_longer_than_its_token_lived_is_accepted() -> None:
    value = orjson.dumps(job())
    written = time.time() - 5 * 3600
    assert isinstance(
        judge(intake("signed"), record(value, token_of(value, written - 1, written + 60), at=written)), Job
    )


def test_a_token_that_had_expired_when_the_record_was_written_is_refused() -> None:
    value = orjson.dumps(job())
    written = time.time()
    token = token_of(value, written - 600, written - LEEWAY_S - 1)
    unverified(judge(intake("signed"), record(value, token, at=written)), Reason.EXPIRED)


def test_a_replayed_token_is_refused_once_it_has_expired() -> None:
    """Until then it is the same job again, which the duplicate rule answers: same identity, same content."""
    value = orjson.dumps(job())
    first = time.time() - 2 * 3600
    token = token_of(value, first, first + 300)
    one = judge(intake("signed"), record(value, token, at=first, offset=1))
    two = judge(intake("signed"), record(value, token, at=first + 200, offset=2))
    assert isinstance(one, Job) and isinstance(two, Job)
    assert (one.identity, one.head.digest) == (two.identity, two.head.digest)
    unverified(judge(intake("signed"), record(value, token, at=first + 400, offset=3)), Reason.EXPIRED)


def test_a_token_lives_no_longer_than_copies_of_its_job_are_recognised() -> None:
    value = orjson.dumps(job())
    now = time.time()
    token = token_of(value, now, now + MAX_LIFE_S + 1)
    unverified(judge(intake("signed"), record(value, token)), Reason.LIFE)
    assert settings("signed").duplicates.window_s >= MAX_LIFE_S


def test_a_token_from_the_future_of_the_broker_is_refused() -> None:
    value = orjson.dumps(job())
    now = time.time()
    unverified(judge(intake("signed"), record(value, token_of(value, now + LEEWAY_S + 5, now + 300))), Reason.NOT_YET)


@pytest.mark.parametrize("claim", ["sub", "jti", "iat", "exp"])
@pytest.mark.parametrize("wrong", [None, True, [], float("inf")])
def test_a_claim_that_is_missing_or_of_another_kind_is_refused(claim: str, wrong: Any) -> None:
    value = orjson.dumps(job())
    now = time.time()
    header = token_of(value, now, now + 60, **{claim: wrong})
    unverified(judge(intake("signed"), record(value, header)), Reason.BAD_TOKEN)


# -- reply addresses in the modes with own topics


def test_reply_headers_are_ignored_in_signed_mode_since_nobody_signs_them() -> None:
    value = job()
    headers = (signed(value), (names.H_REPLY_TO, b"acme.stolen"), (names.H_REPLY_PARTITION, b"2"))
    verdict = judge(intake("signed"), record(value, *headers))
    assert isinstance(verdict, Job)
    assert (verdict.head.reply_topic, verdict.head.reply_partition) == ("inference.replies.acme", None)


@pytest.mark.parametrize("topic", [names.REPLIES, "inference.replies.acme", "globex.answers", JOBS])
def test_a_foreign_reply_topic_is_refused_also_where_the_registry_allows_any(topic: str) -> None:
    tenant, signer = ("globex", "globex") if topic != "globex.answers" else ("acme", "acme")
    value = job(tenant=tenant, reply={"topic": topic})
    verdict = judge(intake("signed"), record(value, signed(value, signer)))
    assert isinstance(verdict, Undeliverable)
    assert verdict.dead.code == ErrorCode.REPLY_TOPIC_REFUSED


def test_a_job_may_name_a_topic_of_its_tenants_pattern() -> None:
    value = job(reply={"topic": "acme.answers", "partition": 3})
    verdict = judge(intake("signed"), record(value, signed(value)))
    assert isinstance(verdict, Job)
    assert (verdict.head.reply_topic, verdict.head.reply_partition) == ("acme.answers", 3)


def test_the_registrys_own_default_topic_stands_in_every_mode() -> None:
    tenant = Tenant(id="acme", reply_topic="answers-of-acme")
    assert tenant.own_reply_topic == "answers-of-acme"
    assert Tenant(id="acme").own_reply_topic == "inference.replies.acme"


# -- topic


ACMES = names.jobs_topic("default", "bulk", "acme")


def test_the_topic_says_whose_the_job_is() -> None:
    verdict = judge(intake("topic"), record(job(), topic=ACMES))
    assert isinstance(verdict, Job)
    assert (verdict.head.tenant, verdict.head.tier, verdict.head.reply_topic) == (
        "acme",
        "bulk",
        "inference.replies.acme",
    )


def test_a_job_that_names_another_tenant_than_its_topics_is_refused_as_its_writers() -> None:
    value = job(tenant="globex", reply={"topic": "inference.replies.globex"})
    verdict = judge(intake("topic"), record(value, topic=ACMES))
    assert isinstance(verdict, Undeliverable), "it may not be answered on another tenant's topic"
    verdict = judge(intake("topic"), record(job(tenant="globex"), topic=ACMES))
    assert isinstance(verdict, Refused)
    assert isinstance(verdict.refusal, Doubt)
    assert (verdict.refusal.code, verdict.refusal.reason) == (ErrorCode.NOT_AUTHORIZED, Reason.TENANT)
    assert (verdict.head.tenant, verdict.head.reply_topic) == ("acme", "inference.replies.acme")
    assert seal_in(verdict.record.headers) is None, "a dead letter of it must not be replayed as believed"


def test_a_topic_that_all_write_to_proves_nobody() -> None:
    unverified(judge(intake("topic"), record(job())), Reason.TOPIC)


def test_a_topic_of_a_tenant_that_the_registry_does_not_know() -> None:
    verdict = judge(intake("topic"), record(job(tenant="ghost"), topic=names.jobs_topic("default", "bulk", "ghost")))
    assert isinstance(verdict, Refused)
    assert verdict.refusal.code == ErrorCode.UNKNOWN_TENANT


# -- the service's mark


def copy_of(verdict: Job) -> Record:
    """The job's record as it comes back from `deferred`."""
    transfer = Transfer.of(verdict.record, verdict.head, DEFERRED, starts=1, due=time.time())
    place = Place(DEFERRED, transfer.partition, 99)
    return first_time(Record(place, transfer.key, transfer.value, transfer.headers, int(time.time() * 1000)))


@pytest.mark.parametrize("mode", ["topic", "signed"])
def test_what_the_service_publishes_again_is_believed_by_its_mark(mode: str) -> None:
    value = job()
    written = time.time() - 10 * 3600
    topic = ACMES if mode == "topic" else JOBS
    raw = orjson.dumps(value)
    first = judge(intake(mode), record(raw, token_of(raw, written, written + 60), topic=topic, at=written))
    assert isinstance(first, Job)
    again = judge(intake(mode), copy_of(first))
    assert isinstance(again, Job)
    assert (again.head.origin, again.head.tenant, again.starts) == (str(first.place), "acme", 1)
    assert round(again.head.broker_time) == round(written)


@pytest.mark.parametrize("mode", ["topic", "signed"])
def test_a_forged_mark_is_refused(mode: str) -> None:
    value = job()
    first = judge(intake(mode), record(value, signed(value), topic=ACMES if mode == "topic" else JOBS))
    assert isinstance(first, Job)
    copy = copy_of(first)
    forged = {
        "none": [pair for pair in copy.headers if pair[0] != names.H_SEAL],
        "by another secret": [
            (name, Sealer("guessed").mark(Seal("copy", copy.timestamp_ms, str(first.place)), copy.value))
            if name == names.H_SEAL
            else (name, text)
            for name, text in copy.headers
        ],
        "another origin": [
            (name, b"inference.default.jobs.standard/4/18" if name == names.H_ORIGIN else text)
            for name, text in copy.headers
        ],
        "garbage": [(name, b"copy;1;x;zz" if name == names.H_SEAL else text) for name, text in copy.headers],
    }
    for what, headers in forged.items():
        verdict = judge(intake(mode), replace(copy, headers=tuple(headers)))
        assert isinstance(verdict, Unverified), what
        assert verdict.doubt.reason is Reason.SEAL, what
    later = replace(copy, timestamp_ms=copy.timestamp_ms + 1)  # as a forged first time would make it
    unverified(judge(intake(mode), later), Reason.SEAL)
    other = replace(copy, value=orjson.dumps(job(tenant="globex")))
    unverified(judge(intake(mode), other), Reason.SEAL)


def test_a_mark_of_the_secret_before_the_present_one_is_good_and_of_others_not() -> None:
    value = job()
    first = judge(intake("signed"), record(value, signed(value)))
    assert isinstance(first, Job)
    changed = {"service_secret": "new", "service_secret_former": SECRET}
    config = settings("signed")
    for fields, believed in ((changed, True), ({"service_secret": "new"}, False)):
        credentials = build(config.model_copy(update=fields), REGISTRY)
        assert isinstance(credentials.at_once(copy_of(first)), Proof) is believed


def test_a_mark_of_a_copy_is_worth_nothing_on_a_jobs_topic() -> None:
    value = job()
    first = judge(intake("signed"), record(value, signed(value)))
    assert isinstance(first, Job)
    moved = replace(copy_of(first), place=Place(JOBS, 4, 200))
    unverified(judge(intake("signed"), moved), Reason.SEAL)


def test_trusted_mode_marks_too_once_it_has_a_secret_so_that_the_mode_can_change() -> None:
    config = settings("trusted")
    config.service_secret = SECRET
    credentials = build(config, REGISTRY)
    one = record(job())
    proof = credentials.at_once(one)
    assert isinstance(proof, Proof)
    marked = credentials.marked(one, proof)
    assert SEALER.check(seal_in(marked.headers) or b"", one.value) == Seal("copy", one.timestamp_ms, str(one.place))


def test_trusted_mode_takes_foreign_marks_for_any_other_header() -> None:
    verdict = judge(intake("trusted"), record(job(), (names.H_SEAL, b"\xff"), (names.H_AUTHORIZATION, b"x.y.z")))
    assert isinstance(verdict, Job)


# -- dead letters


def letter_of(verdict: Any, code: str = "internal") -> Letter:
    dead = verdict.record.dead(verdict.ticket, verdict.record.place, code, "why")
    headers = [*dead.headers, (names.H_ORIGIN, dead.origin.encode()), (names.H_REASON, code.encode())]

    class Raw:
        partition, offset, timestamp = 1, 5, 0
        key, value = dead.key, dead.value

    raw: Any = Raw()
    raw.headers = headers
    return Letter.of(raw)


def test_the_service_vouches_for_the_replay_of_a_believed_job_for_an_hour() -> None:
    value = job()
    letter = letter_of(judge(intake("signed"), record(value, signed(value))))
    now = time.time()
    again = replay(letter, sealer=SEALER, now=now)
    sent = Record(Place(JOBS, 4, 300), again.key, again.value, again.headers, int(now * 1000))
    verdict = judge(intake("signed"), sent)
    assert isinstance(verdict, Job)
    assert verdict.identity == ("acme", "job-1", 1)
    late = replace(sent, timestamp_ms=int((now + MAX_LIFE_S + LEEWAY_S) * 1000))
    unverified(judge(intake("signed"), late), Reason.EXPIRED)
    other = replace(sent, value=again.value.replace(b'"acme"', b'"globex"'))
    unverified(judge(intake("signed"), other), Reason.SEAL)


def test_a_letter_whose_sender_was_not_believed_is_not_replayed() -> None:
    letter = letter_of(judge(intake("signed"), record(job())), "not_authorized")
    with pytest.raises(NotReplayable, match="not believed"):
        replay(letter, sealer=SEALER, now=time.time())


# -- keys in the registry


def test_keys_are_taken_as_jwk_and_as_pem() -> None:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    pem = KEYS["acme"].public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()
    assert PublicKey.parse(pem) == PublicKey.parse(public("acme"))
    assert PublicKey.parse(public("acme")).kid == SIGNERS["acme"].kid
    assert PublicKey.parse(public("acme", "2026-11")).kid == "2026-11"


BAD_KEYS = {
    "text": "nonsense",
    "not JSON": "{",
    "another kind": '{"kty":"RSA","n":"x"}',
    "too short": '{"kty":"OKP","crv":"Ed25519","x":"AAAA"}',
    "the private key": '{"kty":"OKP","crv":"Ed25519","x":"AAAA","d":"AAAA"}',
    "an RSA PEM": "-----BEGIN PUBLIC KEY-----\nMIIB\n-----END PUBLIC KEY-----",
}


@pytest.mark.parametrize("name", BAD_KEYS)
def test_a_key_that_is_none_never_gets_into_the_registry(name: str) -> None:
    with pytest.raises(ValidationError, match="verification key 1"):
        Tenant(id="acme", verification_keys=[BAD_KEYS[name]])


def test_two_keys_of_one_name_are_refused() -> None:
    with pytest.raises(ValidationError, match="same kid"):
        Tenant(id="acme", verification_keys=[public("acme", "a"), public("globex", "a")])
