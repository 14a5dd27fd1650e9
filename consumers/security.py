"""Connection security in FastStream's terms; what the setting means is schemas/security.py's."""

from __future__ import annotations

from faststream.security import BaseSecurity, SASLPlaintext, SASLScram256, SASLScram512

from schemas.security import KafkaSecurity

_LOGINS = {"PLAIN": SASLPlaintext, "SCRAM-SHA-256": SASLScram256, "SCRAM-SHA-512": SASLScram512}


def security_of(security: KafkaSecurity) -> BaseSecurity:
    """Raises SecurityError."""
    context = security.context()
    if not security.sasl:
        return BaseSecurity(ssl_context=context)
    login = _LOGINS[security.mechanism]
    return login(security.username, security.password, ssl_context=context, use_ssl=security.tls)
