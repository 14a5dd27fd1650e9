"""How much each tenant must give up of a partition that is full: those who hold most give, down to one level. Pure."""

from __future__ import annotations

from collections.abc import Mapping


def surplus(held: Mapping[str, int], excess: int, least: int) -> dict[str, int]:
    """How many records of each tenant go, `excess` together, or fewer if nobody may keep less than `least`.

    Who holds less than the others keeps all: {A: 90, B: 10} and 50 to go takes 50 of A; {A: 60, B: 40} takes 35 and 15.
    """
    if excess <= 0:
        return {}
    low, high = least, max(held.values(), default=0)
    while low < high:  # the lowest level at which not more than `excess` go
        level = (low + high) // 2
        if sum(max(0, count - level) for count in held.values()) <= excess:
            high = level
        else:
            low = level + 1
    goes = {tenant: count - low for tenant, count in held.items() if count > low}
    left = excess - sum(goes.values())
    for tenant, count in held.items():  # one more of those at the level, until it is enough
        if left <= 0:
            break
        if count >= low > least:
            goes[tenant] = goes.get(tenant, 0) + 1
            left -= 1
    return goes
