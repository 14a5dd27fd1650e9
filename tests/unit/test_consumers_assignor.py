"""The assignor: a number's topics stay together, nothing moves without need, shares are even, whatever is claimed."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from consumers.assignor import Claim, numbers_assignor, share

members = st.dictionaries(
    st.text("abcdef", min_size=1, max_size=3),
    st.builds(Claim, st.integers(0, 5), st.lists(st.integers(0, 60), max_size=30).map(tuple)),
    min_size=1,
    max_size=8,
)
counts = st.integers(0, 60)


class Cluster:
    def __init__(self, **partitions: int) -> None:
        self._partitions = partitions

    def partitions_for_topic(self, topic: str) -> set[int] | None:
        return set(range(self._partitions[topic])) if topic in self._partitions else None


class Member:
    def __init__(self, *topics: str) -> None:
        self.assignor = numbers_assignor()
        self.topics = topics
        self.given: dict[str, list[int]] = {}

    @property
    def numbers(self) -> set[int]:
        return {number for numbers in self.given.values() for number in numbers}


def assign(cluster: Cluster, group: dict[str, Member]) -> None:
    """One rebalance, user data through their wire form, led by the first member."""
    data: dict[str, Any] = {name: member.assignor.metadata(member.topics) for name, member in group.items()}
    wire = {name: type(metadata).decode(metadata.encode()) for name, metadata in data.items()}
    out: dict[str, Any] = next(iter(group.values())).assignor.assign(cluster, wire)
    assert set(out) == set(group)
    for name, member in group.items():
        assignment = type(out[name]).decode(out[name].encode())
        member.assignor.on_assignment(assignment)
        member.given = {topic: list(numbers) for topic, numbers in assignment.assignment}


@given(counts, members)
def test_every_number_has_one_owner_and_shares_differ_by_one_at_most(count: int, claims: dict[str, Claim]) -> None:
    shares = share(range(count), claims)
    assert sorted(n for numbers in shares.values() for n in numbers) == list(range(count))
    sizes = [len(numbers) for numbers in shares.values()]
    assert max(sizes) - min(sizes) <= 1


@given(counts, members, st.randoms())
def test_the_result_does_not_depend_on_the_order_of_members(count: int, claims: dict[str, Claim], rng: Any) -> None:
    shuffled = list(claims.items())
    rng.shuffle(shuffled)
    assert share(range(count), dict(shuffled)) == share(range(count), claims)


@given(st.integers(1, 60), st.integers(2, 8), st.data())
def test_when_one_dies_nothing_moves_between_the_survivors(count: int, size: int, data: st.DataObject) -> None:
    before = share(range(count), {f"m{n}": Claim(0, ()) for n in range(size)})
    dead = data.draw(st.sampled_from(sorted(before)))
    after = share(range(count), {name: Claim(1, tuple(numbers)) for name, numbers in before.items() if name != dead})
    for name, numbers in after.items():
        assert set(before[name]) <= set(numbers)


@given(st.integers(1, 60), st.integers(1, 8))
def test_a_newcomer_takes_its_share_and_no_more_moves(count: int, size: int) -> None:
    before = share(range(count), {f"m{n}": Claim(0, ()) for n in range(size)})
    after = share(range(count), {**{m: Claim(1, tuple(ns)) for m, ns in before.items()}, "new": Claim(0, ())})
    moved = sum(len(set(before[name]) - set(after[name])) for name in before)
    assert moved == len(after["new"])


@given(st.integers(1, 60), members)
def test_the_same_group_again_moves_nothing(count: int, claims: dict[str, Claim]) -> None:
    once = share(range(count), claims)
    assert share(range(count), {name: Claim(9, tuple(numbers)) for name, numbers in once.items()}) == once


def test_of_two_claims_the_later_round_holds() -> None:
    shares = share(range(4), {"late": Claim(7, (0, 1)), "stale": Claim(3, (0, 1, 2, 3))})
    assert shares == {"late": [0, 1], "stale": [2, 3]}


def test_a_member_that_missed_a_round_loses_to_those_that_did_not() -> None:
    cluster = Cluster(a=6)
    group = {name: Member("a") for name in ("m1", "m2", "m3")}
    assign(cluster, group)
    survivors = {name: group[name] for name in ("m1", "m2")}
    assign(cluster, survivors)
    held = {name: member.numbers for name, member in survivors.items()}
    assign(cluster, group)  # m3 was frozen, and claims what it had
    for name in survivors:
        assert group[name].numbers <= held[name]


def test_all_topics_of_a_number_go_to_one_member_and_consumers_of_a_process_do_not_mix() -> None:
    cluster = Cluster(a=7, b=7, c=7)
    group = {name: Member("a", "b", "c") for name in ("m1", "m2", "m3")}
    assign(cluster, group)
    for member in group.values():
        assert member.given["a"] == member.given["b"] == member.given["c"]
    before = {name: member.numbers for name, member in group.items()}
    del group["m2"]
    assign(cluster, group)
    for name, member in group.items():
        assert before[name] <= member.numbers


def test_partition_counts_that_differ_are_all_given_out() -> None:
    group = {name: Member("a", "b") for name in ("m1", "m2")}
    assign(Cluster(a=5, b=2), group)
    got = sorted((t, n) for member in group.values() for t, numbers in member.given.items() for n in numbers)
    assert got == [("a", n) for n in range(5)] + [("b", n) for n in range(2)]
    for member in group.values():
        assert set(member.given.get("b", ())) <= set(member.given["a"])


def test_a_topic_that_the_owner_does_not_read_goes_to_one_that_does() -> None:
    group = {"old": Member("a"), "new": Member("a", "b")}
    assign(Cluster(a=4, b=4), group)
    assert "b" not in group["old"].given
    assert group["new"].given["b"] == [0, 1, 2, 3]
    assert len(group["old"].given["a"]) == len(group["new"].given["a"]) == 2


def test_more_members_than_numbers_and_missing_topics_are_no_error() -> None:
    group = {f"m{n}": Member("a", "gone") for n in range(4)}
    assign(Cluster(a=2), group)
    assert sorted(len(member.numbers) for member in group.values()) == [0, 0, 1, 1]


@given(st.binary(max_size=40))
def test_foreign_user_data_is_no_error(data: bytes) -> None:
    member = Member("a")
    metadata = member.assignor.metadata(("a",))
    foreign = type(metadata)(0, ["a"], data)
    out = member.assignor.assign(Cluster(a=3), {"m1": metadata, "m2": foreign})
    assert sorted(n for a in out.values() for _, numbers in a.assignment for n in numbers) == [0, 1, 2]
