"""What the secured variant of the local broker needs: a certificate authority, the broker's certificate, its users.

Made once a stack folder, in `secure/`, readable by its owner only. Owns those files; starts nothing.
"""

from __future__ import annotations

import datetime
import ipaddress
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from infra.ports import HOST
from schemas.security import KafkaSecurity
from service.settings import KafkaSettings

FOLDER, USERS, CA, IDENTITY = "secure", "users.json", "ca.pem", "broker.pem"
# Kafka's own user, the operators', and the workers'; tenants' are named after them.
BROKER, ADMIN, WORKER = "headrace-broker", "admin", "worker"
TENANTS = ("acme", "globex", "initech")
LIFE = datetime.timedelta(days=3650)
PRIVATE = 0o600


@dataclass(frozen=True)
class Secured:
    """`passwords` by user. `service_secret`: HEADRACE_SERVICE_SECRET of this stack's workers and operators."""

    folder: Path
    passwords: Mapping[str, str]
    service_secret: str

    @classmethod
    def read(cls, stack: Path) -> Secured | None:
        """None: the stack in this folder is an open one."""
        folder = stack / FOLDER
        try:
            known = json.loads((folder / USERS).read_text())
        except OSError:
            return None
        return cls(folder, known["passwords"], known["service_secret"])

    @classmethod
    def make(cls, stack: Path, tenants: tuple[str, ...] = TENANTS) -> Secured:
        """What is there already is kept: the broker's data knows these users."""
        if (known := cls.read(stack)) is not None:
            return known
        folder = stack / FOLDER
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _certificates(folder)
        made = cls(
            folder,
            {user: secrets.token_urlsafe(24) for user in (BROKER, ADMIN, WORKER, *tenants)},
            secrets.token_urlsafe(32),
        )
        told = {name: value for name, value in asdict(made).items() if name != "folder"}
        _write(folder / USERS, (json.dumps(told, indent=2) + "\n").encode())  # last: it says that all is there
        return made

    @property
    def ca(self) -> Path:
        return self.folder / CA

    @property
    def identity(self) -> Path:
        return self.folder / IDENTITY

    def security(self, user: str) -> KafkaSecurity:
        """How this user connects. Raises KeyError for an unknown one."""
        return self.settings("nowhere", user).security

    def environment(self, user: str = ADMIN) -> dict[str, str]:
        """The HEADRACE_… variables of this user."""
        return {
            "HEADRACE_KAFKA__SECURITY_PROTOCOL": "SASL_SSL",
            "HEADRACE_KAFKA__USERNAME": user,
            "HEADRACE_KAFKA__PASSWORD": self.passwords[user],
            "HEADRACE_KAFKA__CA_FILE": str(self.ca),
            "HEADRACE_SERVICE_SECRET": self.service_secret,
        }

    def settings(self, bootstrap: str, user: str = ADMIN) -> KafkaSettings:
        return KafkaSettings(
            bootstrap=bootstrap,
            security_protocol="SASL_SSL",
            username=user,
            password=self.passwords[user],
            ca_file=self.ca,
        )

    def scram(self) -> list[str]:
        """Options of Kafka's `format`, which writes the users into the cluster's first records."""
        return [
            f"--add-scram=SCRAM-SHA-512=[name={user},password={password}]" for user, password in self.passwords.items()
        ]

    def substitutes(self) -> dict[str, str]:
        """For the broker's properties."""
        return {
            "broker": BROKER,
            "admin": ADMIN,
            "password": self.passwords[BROKER],
            "identity": str(self.identity),
            "ca": str(self.ca),
        }


def _certificates(folder: Path) -> None:
    """An authority that signs one certificate, for the broker at this host, and is then thrown away."""
    now = datetime.datetime.now(datetime.UTC)

    def certificate(
        name: str, key: ec.EllipticCurvePrivateKey, issuer: str, *, authority: bool
    ) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(_name(name))
            .issuer_name(_name(issuer))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + LIFE)
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        )

    authority_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    authority = "Headrace development CA"
    ca = certificate(authority, authority_key, authority, authority=True).sign(authority_key, hashes.SHA256())
    here = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(HOST)), x509.DNSName("localhost")])
    broker = (
        certificate(BROKER, key, authority, authority=False)
        .add_extension(here, critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    ca_pem = ca.public_bytes(Encoding.PEM)
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    _write(folder / CA, ca_pem)
    _write(folder / IDENTITY, private + broker.public_bytes(Encoding.PEM) + ca_pem)


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, common)])


def _write(path: Path, content: bytes) -> None:
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE), "wb") as file:
        file.write(content)
