"""Every connection to Kafka is made from one set of settings, and what cannot work is said before it is tried."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import pytest
from faststream.security import BaseSecurity, SASLPlaintext, SASLScram512
from pydantic import ValidationError

from consumers.security import security_of
from infra.secured import ADMIN, WORKER, Secured
from schemas.security import PLAINTEXT, KafkaSecurity, SecurityError
from service.delivery.wire import encode
from service.settings import KafkaSettings, Settings

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Secured:
    return Secured.make(tmp_path_factory.mktemp("stack"))


def test_an_open_broker_needs_nothing() -> None:
    assert KafkaSettings(bootstrap="b:1").connection() == {"bootstrap_servers": "b:1", "security_protocol": "PLAINTEXT"}
    assert security_of(PLAINTEXT).ssl_context is None


def test_a_login_over_tls_becomes_the_client_librarys_arguments(secured: Secured) -> None:
    found = secured.settings("b:1", WORKER).connection()
    context = found.pop("ssl_context")
    assert isinstance(context, ssl.SSLContext)
    assert context.verify_mode is ssl.CERT_REQUIRED and context.check_hostname
    assert found == {
        "bootstrap_servers": "b:1",
        "security_protocol": "SASL_SSL",
        "sasl_mechanism": "SCRAM-SHA-512",
        "sasl_plain_username": WORKER,
        "sasl_plain_password": secured.passwords[WORKER],
    }


def test_faststream_gets_the_same(secured: Secured) -> None:
    login = security_of(secured.security(WORKER))
    assert isinstance(login, SASLScram512) and login.use_ssl and login.username == WORKER
    plain = security_of(KafkaSecurity(protocol="SASL_PLAINTEXT", mechanism="PLAIN", username="u", password="p"))
    assert isinstance(plain, SASLPlaintext) and not plain.use_ssl
    tls = security_of(KafkaSecurity(protocol="SSL", ca_file=secured.ca))
    assert type(tls) is BaseSecurity and tls.use_ssl


def test_a_client_certificate_is_loaded_with_its_key(secured: Secured) -> None:
    security = KafkaSecurity(protocol="SSL", ca_file=secured.ca, cert_file=secured.identity)
    assert isinstance(security.context(), ssl.SSLContext)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a login without its password": ({"protocol": "SASL_SSL", "username": "u"}, "username and a password"),
    "a login without a user": ({"protocol": "SASL_PLAINTEXT", "password": "p"}, "username and a password"),
    "a CA without TLS": ({"ca_file": "x"}, "uses no certificates"),
    "a key without its certificate": ({"protocol": "SSL", "key_file": "x"}, "certificate file"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_combination_that_no_broker_takes_is_refused(name: str) -> None:
    fields, why = WRONG[name]
    with pytest.raises(ValueError, match=why):
        KafkaSecurity(**fields)
    renamed = {{"protocol": "security_protocol"}.get(field, field): value for field, value in fields.items()}
    with pytest.raises(ValidationError, match=why):
        KafkaSettings(**renamed)


@pytest.mark.parametrize("content", [None, b"no certificate"])
def test_a_certificate_that_cannot_be_used_is_named(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "ca.pem"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SecurityError, match=r"ca\.pem"):
        KafkaSecurity(protocol="SSL", ca_file=file).arguments()


def test_a_certificate_that_was_replaced_is_read_again(tmp_path: Path) -> None:
    one, two = Secured.make(tmp_path / "one"), Secured.make(tmp_path / "two")
    security = KafkaSecurity(protocol="SSL", ca_file=one.ca)
    first = security.context()
    assert security.context() is first
    one.ca.write_bytes(two.ca.read_bytes())
    assert security.context() is not first


def test_passwords_are_in_no_text_of_the_settings(secured: Secured) -> None:
    found = Settings(kafka=secured.settings("b:1"), service_secret="s-e-c-r-e-t")
    shown = f"{found!r} {found.kafka!r} {found.kafka.security!r}"
    assert secured.passwords[ADMIN] not in shown and "s-e-c-r-e-t" not in shown
    assert encode([]) == b"\x90"  # what goes to the delivery process does hold them
    assert Settings.model_validate_json(found.model_dump_json()).kafka.connection().keys() == (
        found.kafka.connection().keys()
    )


def test_no_client_is_made_past_the_settings() -> None:
    """A new connection that forgets TLS and login would work everywhere but where it matters."""
    bare = []
    for folder in ("schemas", "consumers", "service", "client", "infra"):
        for file in (ROOT / folder).rglob("*.py"):
            text = file.read_text(encoding="utf-8")
            for client in ("AIOKafkaConsumer(", "AIOKafkaProducer(", "AIOKafkaAdminClient(", "AIOKafkaClient("):
                start = text.find(client)
                while start >= 0:
                    call = text[start : text.find(")\n", start)]
                    if not any(word in call for word in ("connection", "secured", "security", "_arguments")):
                        bare.append(f"{file.relative_to(ROOT)}: {call[:60]}")
                    start = text.find(client, start + 1)
    assert not bare


def test_the_secured_brokers_files_are_their_owners_only_and_made_once(secured: Secured) -> None:
    for file in secured.folder.iterdir():
        assert file.stat().st_mode & 0o077 == 0, file
    again = Secured.make(secured.folder.parent)
    assert again == secured
