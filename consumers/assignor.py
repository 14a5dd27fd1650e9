"""The assignor (R1): gives out partition *numbers*, all topics of a number to one member, sticky and balanced.

Without it the default round-robin scatters a number's topics over the members, and range shifts whole blocks between
healthy members; changing the assignor of a running group later is fatal for whoever joins.

`share` decides and is pure. `numbers_assignor()` makes a class for one consumer: the client library takes classes and
calls class methods, so an assignor that kept its state on a shared class would mix up the consumers of one process.

User data of a member:  version byte, round (4 bytes), partition numbers it had (2 bytes each)
of an assignment:       version byte, round (4 bytes)
A round counts assignments. The library never tells an assignor its generation, so the leader hands out the round; of
two members that claim one number, the claim of the later round holds, and a member that missed rounds loses it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from aiokafka.coordinator.assignors.abstract import AbstractPartitionAssignor
from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment, ConsumerProtocolMemberMetadata

NAME = "headrace-numbers"  # every member of a group must offer it: never change it in place
VERSION = 1
_HEAD = struct.Struct(">BI")


class Claim(NamedTuple):
    """What a member says it had, and since which round."""

    round: int
    numbers: tuple[int, ...]


NOTHING = Claim(0, ())


def share(numbers: Iterable[int], claims: Mapping[str, Claim]) -> dict[str, list[int]]:
    """Numbers per member: shares differ by one at most, and no number moves that need not.

    Same input, same result, whatever the order of members.
    """
    wanted = set(numbers)
    held: dict[str, list[int]] = {member: [] for member in claims}
    taken: set[int] = set()
    for member in sorted(claims, key=lambda member: (-claims[member].round, member)):
        for number in sorted(set(claims[member].numbers) & wanted):
            if number not in taken:
                taken.add(number)
                held[member].append(number)
    least, extra = divmod(len(wanted), len(claims)) if claims else (0, 0)
    by_holding = sorted(claims, key=lambda member: (-len(held[member]), member))
    quota = {member: least + (place < extra) for place, member in enumerate(by_holding)}
    free = sorted(wanted - taken)
    for member in by_holding:
        free += held[member][quota[member] :]
        del held[member][quota[member] :]
    free.sort(reverse=True)
    for member in sorted(claims):
        while free and len(held[member]) < quota[member]:
            held[member].append(free.pop())
        held[member].sort()
    return held


def numbers_assignor() -> type[AbstractPartitionAssignor]:
    """A new assignor class, with the memory of one consumer."""

    class NumbersAssignor(AbstractPartitionAssignor):
        name = NAME
        claim = NOTHING

        @classmethod
        def assign(
            cls, cluster: Any, members: Mapping[str, ConsumerProtocolMemberMetadata]
        ) -> dict[str, ConsumerProtocolMemberAssignment]:
            claims = {member: _claim(metadata.user_data) for member, metadata in members.items()}
            topics = sorted({topic for metadata in members.values() for topic in metadata.subscription})
            holding = {topic: cluster.partitions_for_topic(topic) or set() for topic in topics}
            shares = share(set().union(*holding.values()), claims)
            given = _topics_of(shares, holding, {m: set(metadata.subscription) for m, metadata in members.items()})
            stamp = _HEAD.pack(VERSION, max((claim.round for claim in claims.values()), default=0) + 1)
            return {
                member: ConsumerProtocolMemberAssignment(0, sorted(topics.items()), stamp)
                for member, topics in given.items()
            }

        @classmethod
        def metadata(cls, topics: Iterable[str]) -> ConsumerProtocolMemberMetadata:
            head = _HEAD.pack(VERSION, cls.claim.round)
            numbers = struct.pack(f">{len(cls.claim.numbers)}H", *cls.claim.numbers)
            return ConsumerProtocolMemberMetadata(0, sorted(topics), head + numbers)

        @classmethod
        def on_assignment(cls, assignment: ConsumerProtocolMemberAssignment) -> None:
            numbers = {partition for _, partitions in assignment.assignment for partition in partitions}
            cls.claim = Claim(_claim(assignment.user_data).round, tuple(sorted(numbers)))

    return NumbersAssignor


def _topics_of(
    shares: Mapping[str, list[int]], holding: Mapping[str, set[int]], subscribed: Mapping[str, set[str]]
) -> dict[str, dict[str, list[int]]]:
    """Each member's partitions by topic. A topic that a number's owner does not read (workers of two releases, for the
    time of a rolling update) goes to a member that reads it, the one with the fewest such strays."""
    given: dict[str, dict[str, list[int]]] = {member: {} for member in shares}
    strays = dict.fromkeys(shares, 0)
    for owner in sorted(shares):
        for number in shares[owner]:
            for topic, partitions in holding.items():
                if number not in partitions:
                    continue
                reader = owner
                if topic not in subscribed[owner]:
                    reader = min((m for m in shares if topic in subscribed[m]), key=lambda m: (strays[m], m))
                    strays[reader] += 1
                given[reader].setdefault(topic, []).append(number)
    return {member: {topic: sorted(numbers) for topic, numbers in topics.items()} for member, topics in given.items()}


def _claim(user_data: bytes | None) -> Claim:
    """Reads user data; anything else than ours claims nothing."""
    if not user_data or len(user_data) < _HEAD.size or (len(user_data) - _HEAD.size) % 2:
        return NOTHING
    version, since = _HEAD.unpack_from(user_data)
    if version != VERSION:
        return NOTHING
    numbers = struct.unpack_from(f">{(len(user_data) - _HEAD.size) // 2}H", user_data, _HEAD.size)
    return Claim(since, numbers)
