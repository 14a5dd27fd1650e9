"""How a connection to Kafka is secured, as arguments of the client library: one place for service, client and tools.

The one file of this room that reads files: certificates, each time that a client is made. It opens no connection.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

SecurityProtocol = Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"]
SaslMechanism = Literal["SCRAM-SHA-512", "SCRAM-SHA-256", "PLAIN"]

TLS = ("SSL", "SASL_SSL")
SASL = ("SASL_PLAINTEXT", "SASL_SSL")


class SecurityError(ValueError):
    """A certificate or key cannot be used. One line: which and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaSecurity:
    """Raises ValueError for a combination that no broker could accept.

    `ca_file`: PEM; None = the system's. `cert_file`, `key_file`: of this client, where the broker asks for one.
    """

    protocol: SecurityProtocol = "PLAINTEXT"
    mechanism: SaslMechanism = "SCRAM-SHA-512"
    username: str = ""
    password: str = field(default="", repr=False)
    ca_file: Path | str | None = None
    cert_file: Path | str | None = None
    key_file: Path | str | None = None
    key_password: str = field(default="", repr=False)
    check_hostname: bool = True

    def __post_init__(self) -> None:
        if self.sasl and not (self.username and self.password):
            raise ValueError(f"security protocol {self.protocol} needs a username and a password")
        if self.key_file is not None and self.cert_file is None:
            raise ValueError("a key file needs its certificate file")
        if not self.tls and (self.ca_file is not None or self.cert_file is not None):
            raise ValueError(f"security protocol {self.protocol} uses no certificates: SSL or SASL_SSL does")

    @property
    def tls(self) -> bool:
        return self.protocol in TLS

    @property
    def sasl(self) -> bool:
        return self.protocol in SASL

    @property
    def hint(self) -> str:
        """For messages about a broker that does not answer: it says nothing to a client that it turns away."""
        return {
            (False, False): "",
            (True, False): " (or turns this client away: are the CA and the certificate right?)",
            (False, True): " (or turns this client away: are the user and the password right?)",
            (True, True): " (or turns this client away: are the CA, the user and the password right?)",
        }[self.tls, self.sasl]

    def context(self) -> ssl.SSLContext | None:
        """None without TLS. Raises SecurityError."""
        if not self.tls:
            return None
        files = (self.ca_file, self.cert_file, self.key_file)
        try:
            changed = tuple(Path(file).stat().st_mtime_ns if file is not None else 0 for file in files)
            return _context(self, changed)
        except OSError as error:  # ssl.SSLError is one
            what = error.filename or f"{self.ca_file or self.cert_file}"
            raise SecurityError(f"{what}: no usable certificate or key ({error.strerror or error})") from None

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of every aiokafka client. Raises SecurityError."""
        found: dict[str, Any] = {"security_protocol": self.protocol}
        if self.tls:
            found["ssl_context"] = self.context()
        if self.sasl:
            found["sasl_mechanism"] = self.mechanism
            found["sasl_plain_username"] = self.username
            found["sasl_plain_password"] = self.password
        return found


PLAINTEXT = KafkaSecurity()


@lru_cache(maxsize=16)
def _context(security: KafkaSecurity, changed: tuple[int, ...]) -> ssl.SSLContext:
    """Made once for each state of the files: the system's certificates take 20 ms, and clients are made on loops."""
    context = ssl.create_default_context(cafile=security.ca_file)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = security.check_hostname
    if security.cert_file is not None:
        context.load_cert_chain(security.cert_file, security.key_file, security.key_password or None)
    return context
