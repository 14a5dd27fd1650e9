"""Changes of the registry: valid, shown whole, and a change of spread remembers the former one."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.tenants import Tenant, TenantLimits
from service.registry import FORMER_KEPT_S, SPREAD_LEAD_S, Change, Line, changes, edited, moved
from service.settings import Settings
from service.tenants import RegistryError, Tenants, read_entry, write_entry

NOW = 1_900_000_000.0
WINDOW_S = 3600.0
ACME = Tenant(id="acme", weight=2, limits=TenantLimits(n=4))


def plan(before: Tenant | None, after: Tenant, **more: Any) -> list[Change]:
    known = {} if before is None else {before.id: before}
    return changes(known, [after], **{"prune": False, "now": NOW, "window_s": WINDOW_S, **more})


# Edits and what differs


def test_an_edit_changes_what_it_names_and_nothing_else() -> None:
    after = edited("acme", ACME, {"weight": 3.0}, {"queued_jobs": 10})
    assert after == Tenant(id="acme", weight=3, limits=TenantLimits(n=4, queued_jobs=10))
    (change,) = plan(ACME, after)
    assert (change.kind, change.lines()) == (
        "changed",
        [Line("weight", 2.0, 3.0), Line("limits.queued_jobs", None, 10)],
    )


def test_none_takes_a_limit_or_a_field_back() -> None:
    assert edited("acme", ACME, {"weight": None}, {"n": None}) == Tenant(id="acme")


def test_an_edit_makes_a_tenant_that_is_not_there() -> None:
    (change,) = plan(None, edited("new", None, {"tier": "bulk"}, {}))
    assert (change.kind, change.lines()) == ("added", [Line("tier", "standard", "bulk")])


@pytest.mark.parametrize(
    "fields, limits, message",
    [
        ({"weight": -1.0}, {}, "tenant acme: weight must be greater than 0"),
        ({}, {"n": 0}, "limits.n must be at least 1"),
        ({"order": "tenant", "spread": 2}, {}, "needs spread 1"),
        ({"wieght": 2}, {}, "did you mean weight?"),
    ],
)
def test_an_edit_that_is_not_valid_is_refused_in_one_line(fields: Any, limits: Any, message: str) -> None:
    with pytest.raises(RegistryError) as refused:
        edited("acme", ACME, fields, limits)
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_nothing_to_do_is_nothing() -> None:
    assert plan(ACME, ACME) == []


def test_only_pruning_removes() -> None:
    known = {"acme": ACME, "old": Tenant(id="old")}
    options: dict[str, Any] = {"now": NOW, "window_s": WINDOW_S}
    assert changes(known, [ACME], prune=False, **options) == []
    (gone,) = changes(known, [ACME], prune=True, **options)
    assert (gone.id, gone.kind) == ("old", "removed")


# Spread


def spread(tenant: Tenant, number: int, now: float = NOW) -> Tenant:
    return moved(tenant, tenant.model_copy(update={"spread": number}), now, WINDOW_S)


def test_a_change_of_spread_is_in_force_a_moment_later_and_remembers_the_former() -> None:
    after = spread(ACME, 4)
    assert (after.spread, after.former_spread) == (4, 1)
    assert after.spread_at(NOW + SPREAD_LEAD_S - 0.01) == 1
    assert after.spread_at(NOW + SPREAD_LEAD_S) == 4
    (change,) = plan(ACME, ACME.model_copy(update={"spread": 4}))
    assert change.moves and {line.field for line in change.lines()} == {"spread", "former_spread", "spread_since"}


def test_jobs_in_order_change_at_once() -> None:
    after = spread(Tenant(id="a", order="conversation"), 4)
    assert after.spread_at(NOW) == 4 and after.former_spread == 1


def test_a_third_spread_waits_for_the_window_and_back_is_always_allowed() -> None:
    after = spread(ACME, 4)
    with pytest.raises(RegistryError, match="back to 1"):
        spread(after, 8, NOW + 60)
    assert spread(after, 1, NOW + 60).former_spread == 4
    assert spread(after, 8, NOW + SPREAD_LEAD_S + WINDOW_S).former_spread == 4


def test_other_changes_keep_the_former_spread_until_nobody_needs_it() -> None:
    after = spread(ACME, 4)
    heavier = after.model_copy(update={"weight": 5.0})
    assert moved(after, heavier, NOW + WINDOW_S, WINDOW_S).former_spread == 1
    late = moved(after, heavier, NOW + SPREAD_LEAD_S + FORMER_KEPT_S + WINDOW_S + 1, WINDOW_S)
    assert (late.former_spread, late.spread_since) == (None, None)


@given(st.integers(1, 1024), st.integers(1, 1024), st.floats(-100, 100_000))
def test_the_two_spreads_of_a_change_are_always_known(first: int, second: int, later: float) -> None:
    before = Tenant(id="a", spread=first)
    after = spread(before, second)
    assert after.spread_at(NOW + later) in {first, second}
    if first != second:
        assert {after.spread, after.former_spread} == {first, second}


def test_a_former_spread_and_its_time_come_together() -> None:
    with pytest.raises(ValueError, match="without the other"):
        Tenant(id="a", former_spread=2)
    with pytest.raises(ValueError, match="without the other"):
        Tenant(id="a", spread_since=datetime.now(UTC))


# Entries on the topic


def test_an_entry_is_read_as_it_was_written() -> None:
    for tenant in (ACME, Tenant(id="x"), spread(ACME, 7)):
        assert read_entry(tenant.id, write_entry(tenant)) == tenant


@pytest.mark.parametrize(
    "value, message",
    [
        (b"no json", "not JSON"),
        (b"[]", "must be an object"),
        (b'{"id": "globex"}', "id must be the record's key"),
        (b'{"id": "acme", "weight": 0}', "weight must be greater than 0"),
    ],
)
def test_an_entry_that_is_not_valid_says_why(value: bytes, message: str) -> None:
    with pytest.raises(RegistryError, match=r"inference\.tenants: tenant acme: ") as refused:
        read_entry("acme", value)
    assert message in str(refused.value)


def test_entries_come_change_and_go_live_and_a_wrong_one_leaves_the_former_in_force() -> None:
    tenants = Tenants(Settings())
    assert tenants.follows_topic
    tenants.take([(b"acme", write_entry(ACME)), (b"globex", b'{"id": "globex"}')])
    tenants.opened()
    assert {t.id for t in tenants} == {"acme", "globex"}, "the development tenants are not added to a registry"
    version = tenants.version
    tenants.take([(b"acme", b"{"), (b"acme", b'{"id": "acme", "weight": 0}'), (b"a b", b"{}"), (None, b"x")])
    assert (tenants.weight("acme"), tenants.refused, tenants.version) == (2.0, 4, version)
    tenants.take([(b"acme", b'{"id": "acme", "weight": 7}')])
    assert tenants.weight("acme") == 7.0 and tenants.version > version
    tenants.take([(b"acme", None), (b"nobody", None)])
    assert tenants.get("acme") is None and tenants.refused == 4


def test_an_empty_topic_means_the_development_tenants_and_what_comes_later_is_added() -> None:
    tenants = Tenants(Settings())
    tenants.opened()
    tenants.take([(b"umbrella", b'{"id": "umbrella"}'), (b"acme", b'{"id": "acme", "weight": 3}')])
    assert {t.id for t in tenants} == {"acme", "globex", "initech", "umbrella"} and tenants.weight("acme") == 3.0


def test_a_topic_that_must_be_the_registry_must_not_be_empty() -> None:
    tenants = Tenants(Settings(tenants_source="topic"))
    with pytest.raises(RegistryError, match="headrace tenants apply"):
        tenants.opened()


def test_a_file_that_is_named_is_the_registry_unless_the_topic_must_be(tmp_path: Path) -> None:
    file = tmp_path / "t.yaml"
    file.write_text("tenants: [{id: a}]")
    assert not Tenants(Settings(tenants_file=file)).follows_topic
    assert Tenants(Settings(tenants_file=file, tenants_source="topic")).follows_topic
    with pytest.raises(RegistryError, match="HEADRACE_TENANTS_FILE"):
        Tenants(Settings(tenants_source="file"))
