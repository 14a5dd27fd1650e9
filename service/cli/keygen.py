"""`headrace tenants keygen|add-key|drop-key`: a tenant's signing keys (identity mode `signed`).

The private key is the tenant's: it is written to a file and shown nowhere. The registry holds public keys only.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import orjson
import typer

from schemas.tenants import Tenant
from schemas.verification import PublicKey
from service.cli import session
from service.cli.options import Bootstrap, DryRun, Json, Yes
from service.cli.tenant_changes import change
from service.registry import edited
from service.tenants import RegistryError

PRIVATE = 0o600  # of the file: its owner reads it, nobody else

Id = Annotated[str, typer.Argument(help="The tenant's id.")]


def register(group: typer.Typer) -> None:
    """`group`: the commands of `headrace tenants`."""
    group.command("keygen")(keygen)
    group.command("add-key")(add_key)
    group.command("drop-key")(drop_key)


def keygen(
    file: Annotated[Path, typer.Argument(help="Where the private key goes; must not exist.")],
    kid: Annotated[str | None, typer.Option(help="The key's name; its thumbprint by default.")] = None,
    json: Json = False,
) -> None:
    """Makes an Ed25519 key pair: the private key into FILE (mode 0600), the public one to standard output.

    The printed line goes into the registry: headrace tenants add-key TENANT 'LINE'.
    Exit codes: 0 done, 1 the file cannot be written, 2 wrong usage.
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    key = Ed25519PrivateKey.generate()
    raw = key.public_key().public_bytes_raw()
    public = PublicKey.of(raw, kid)
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    try:
        # Made with its mode: between a chmod and the writing others could read it. Never over a key that is in use.
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE), "wb") as output:
            output.write(pem)
    except FileExistsError:
        message = f"{file} exists; a key is never written over: name another file"
        raise typer.Exit(session.told(message, session.FAILED)) from None
    except OSError as error:
        raise typer.Exit(session.told(f"{file} cannot be written ({error.strerror})", session.FAILED)) from None
    if json:
        said = {"private_key_file": str(file), "kid": public.kid, "public_key": orjson.loads(public.jwk())}
        session.print_json(said)
        return
    typer.echo(public.jwk())
    use = f"headrace submit … --sign {file}" + (f" --kid {kid}" if kid else "")
    typer.echo(f"private key: {file} (mode 0600; keep it, it is shown nowhere else)", err=True)
    typer.echo(f"registry:    headrace tenants add-key TENANT '{public.jwk()}'", err=True)
    typer.echo(f"use:         {use}", err=True)


def add_key(
    id: Id,
    key: Annotated[str, typer.Argument(help="The public key: the line that keygen printed, or a PEM or JWK file.")],
    yes: Yes = False,
    dry_run: DryRun = False,
    json: Json = False,
    bootstrap: Bootstrap = None,
) -> None:
    """Adds a public key to a tenant's verification keys; those that it has stay good.

    Exit codes: 0 done, or nothing to do; 1 not done, 2 wrong usage or no such key, 3 not reachable.
    """
    text = _text(key)

    def wanted(known: Mapping[str, Tenant]) -> Sequence[Tenant]:
        tenant = _known(id, known)
        return [edited(id, tenant, {"verification_keys": [*tenant.verification_keys, text]}, {})]

    change(bootstrap, wanted, yes=yes, dry_run=dry_run, json=json)


def drop_key(
    id: Id,
    kid: Annotated[str, typer.Argument(help="The key's name: its kid, or its thumbprint.")],
    yes: Yes = False,
    dry_run: DryRun = False,
    json: Json = False,
    bootstrap: Bootstrap = None,
) -> None:
    """Takes a public key out of a tenant's verification keys: what is signed with it and read later is refused.

    Exit codes: 0 done; 1 not done, 2 wrong usage or no such key, 3 not reachable.
    """

    def wanted(known: Mapping[str, Tenant]) -> Sequence[Tenant]:
        tenant = _known(id, known)
        kept = [text for text in tenant.verification_keys if PublicKey.parse(text).kid != kid]
        if len(kept) == len(tenant.verification_keys):
            kids = ", ".join(PublicKey.parse(text).kid for text in tenant.verification_keys)
            raise RegistryError(f"tenant {id} has no key {kid}; it has: {kids or 'none'}")
        return [edited(id, tenant, {"verification_keys": kept}, {})]

    change(bootstrap, wanted, yes=yes, dry_run=dry_run, json=json)


def _known(id: str, known: Mapping[str, Tenant]) -> Tenant:
    if id not in known:
        raise RegistryError(f"there is no tenant {id} on the registry topic: headrace tenants list")
    return known[id]


def _text(key: str) -> str:
    """The public key, checked. Raises typer.BadParameter."""
    text = key.strip()
    if not text.startswith(("{", "-----BEGIN")):
        try:
            text = Path(key).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise typer.BadParameter(f"neither a public key nor a file with one ({error})", param_hint="KEY") from None
    try:
        PublicKey.parse(text)
    except ValueError as error:
        raise typer.BadParameter(f"the key {error}", param_hint="KEY") from None
    return text
