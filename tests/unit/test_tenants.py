"""The registry: validated first, replaced as a whole, and the salts that keep cached prefixes apart."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from schemas.tenants import Tenant
from service import tenants as rooms
from service.settings import Settings
from service.tenants import RegistryError, Tenants, load, parse

GOOD = """
tenants:
  - id: acme
    weight: 2
    limits: {n: 4, output_tokens: 100}
  - id: globex
    cache_domain: shared
  - id: umbrella
    cache_domain: shared
"""


def registry(path: Path, text: str = GOOD) -> Tenants:
    path.write_text(text)
    return Tenants(Settings(tenants_file=path))


def test_a_file_is_read_as_yaml_or_json(tmp_path: Path) -> None:
    tenants = registry(tmp_path / "t.yaml")
    assert [tenant.id for tenant in tenants] == ["acme", "globex", "umbrella"]
    acme = tenants.get("acme")
    assert acme is not None and acme.limits.n == 4
    assert tenants.get("nobody") is None
    assert (tenants.weight("acme"), tenants.weight("nobody")) == (2.0, 1.0)
    assert len(registry(tmp_path / "t.json", '{"tenants": [{"id": "acme"}]}')) == 1


def test_without_a_file_the_development_tenants_are_there() -> None:
    tenants = Tenants(Settings(tenants_file=None))
    tenants.opened()
    assert {tenant.id for tenant in tenants} == {"acme", "globex", "initech"}


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "one key 'tenants'"),
        ("tenants: {}", "one key 'tenants'"),
        ("tenants: []", "no tenants"),
        ("tenants: [{id: a}]\nother: 1", "one key 'tenants'"),
        ("tenants: [{id: a}", "not YAML or JSON in line"),
        ("tenants: [5]", "entry 1: the record must be an object"),
        ("tenants: [{weight: 1}]", "id is missing"),
        ("tenants: [{id: 'a b'}]", "id must match"),
        ("tenants: [{id: a.b}]", "id must match"),
        ("tenants: [{id: a, wieght: 2}]", "tenant a: wieght is not a known field; did you mean weight?"),
        ("tenants: [{id: a, weight: 0}]", "weight must be greater than 0"),
        ("tenants: [{id: a, limits: {n: 0}}]", "limits.n must be at least 1"),
        ("tenants: [{id: a}, {id: a}]", "tenant a is there twice"),
        ("tenants: [{id: a, order: tenant, spread: 2}]", "spread 1"),
        ("tenants: [{id: a, reply_topics: ['{tenant}.x']}]", "braces"),
        ("tenants: [{id: a, weight: .nan}]", "weight"),
        ("tenants: !!python/object/apply:os.getcwd []", "not YAML or JSON"),
    ],
)
def test_an_invalid_registry_is_refused_in_one_line_naming_the_place(text: str, message: str) -> None:
    with pytest.raises(RegistryError) as refused:
        parse(text, "tenants.yaml")
    assert message in str(refused.value) and "\n" not in str(refused.value)
    assert str(refused.value).startswith("tenants.yaml: ")


def test_a_missing_file_is_refused_with_its_name(tmp_path: Path) -> None:
    for read in (lambda path: Tenants(Settings(tenants_file=path)), load):
        with pytest.raises(RegistryError, match=r"none\.yaml: cannot be read \(FileNotFoundError\)"):
            read(tmp_path / "none.yaml")


def replace(path: Path, text: str) -> None:
    path.write_text(text)
    os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns + 1_000_000))


def test_a_change_is_taken_over_and_an_invalid_one_leaves_the_old_in_force(tmp_path: Path) -> None:
    path = tmp_path / "t.yaml"
    tenants = registry(path)
    assert not tenants.reload(), "nothing changed"
    replace(path, "tenants: [{id: initech}]")
    assert tenants.reload() and tenants.get("acme") is None and tenants.get("initech") is not None
    replace(path, "tenants: [{id: '?'}]")
    with pytest.raises(RegistryError):
        tenants.reload()
    assert tenants.get("initech") is not None
    path.unlink()
    with pytest.raises(RegistryError):
        tenants.reload()
    assert tenants.get("initech") is not None
    replace(path, GOOD)
    assert tenants.reload() and tenants.get("acme") is not None


async def test_the_registry_follows_its_file_through_a_faulty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rooms, "FOLLOW_S", 0.005)
    path = tmp_path / "t.yaml"
    tenants = registry(path)
    task = asyncio.create_task(tenants.follow())
    try:
        replace(path, "nonsense")
        await asyncio.sleep(0.03)
        assert tenants.get("acme") is not None and not task.done()
        replace(path, "tenants: [{id: initech}]")
        async with asyncio.timeout(5):
            while tenants.get("initech") is None:
                await asyncio.sleep(0.005)
    finally:
        task.cancel()


def test_salts_differ_between_domains_and_depend_on_the_secret(tmp_path: Path) -> None:
    tenants = registry(tmp_path / "t.yaml")
    salts = {name: tenants.salt(name) for name in ("acme", "globex", "umbrella", "nobody", "shared", "")}
    assert all(len(salt) == 64 for salt in salts.values()), "an empty salt is no salt"
    assert salts["globex"] == salts["umbrella"]
    assert len(set(salts.values())) == 5, "a tenant called like a domain does not share it"
    other = Tenants(Settings(tenants_file=tmp_path / "t.yaml", cache_secret="another"))
    assert other.salt("acme") != salts["acme"] == tenants.salt("acme")
    assert "acme" not in salts["acme"]


def test_an_empty_secret_is_refused() -> None:
    with pytest.raises(RegistryError, match="HEADRACE_CACHE_SECRET"):
        Tenants(Settings(cache_secret=""))


@pytest.mark.parametrize(
    "patterns, topic, allowed",
    [
        (["inference.replies", "{id}.*"], "acme.replies", True),
        (["inference.replies", "{id}.*"], "acme", False),
        (["inference.replies", "{id}.*"], "acmex.replies", False),
        (["inference.replies", "{id}.*"], "globex.replies", False),
        (["inference.replies", "{id}.*"], "inference.replies", True),
        (["*"], "anything", True),
        (["a.b"], "a-b", False),
        ([], "acme.replies", False),
        ([], "home", True),
    ],
)
def test_reply_topics_are_allowed_by_pattern(patterns: list[str], topic: str, allowed: bool) -> None:
    assert Tenant(id="acme", reply_topic="home", reply_topics=patterns).may_reply_to(topic) is allowed
