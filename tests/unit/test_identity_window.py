"""The window of ended jobs: found while it lasts, bounded however many end (R7)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from service.identity.window import WAYS, Spot, Window

NOW = 1_900_000_000.0


def identity(number: int, run: int = 0) -> tuple[str, str, int]:
    return ("acme", f"job-{number}", run)


def test_an_end_is_found_with_the_place_of_its_status_record() -> None:
    window = Window(3600, 100)
    window.add(identity(1), Spot(47, 2**40 + 5), NOW)
    assert window.find(identity(1), NOW + 3599) == (47, 2**40 + 5)
    assert window.find(identity(1, run=1), NOW) is None
    assert window.find(("globex", "job-1", 0), NOW) is None


def test_after_the_window_nothing_is_known() -> None:
    window = Window(3600, 100)
    window.add(identity(1), Spot(0, 1), NOW)
    assert window.find(identity(1), NOW + 3602) is None


def test_the_newest_end_of_an_identity_counts_in_whatever_order_they_are_told() -> None:
    window = Window(3600, 100)
    window.add(identity(1), Spot(0, 9), NOW + 5)
    window.add(identity(1), Spot(0, 3), NOW)
    assert window.find(identity(1), NOW + 5) == (0, 9)
    window.add(identity(1), Spot(0, 12), NOW + 6)
    assert window.find(identity(1), NOW + 6) == (0, 12)


def test_as_many_as_it_is_meant_to_hold_are_nearly_all_found_and_memory_stays() -> None:
    most = 20_000
    window = Window(3600, most)
    size = len(window._prints)
    for number in range(3 * most):
        window.add(identity(number), Spot(number % 48, number), NOW + number / 1000)
    assert len(window._prints) == size <= most * 1.5
    now = NOW + 3 * most / 1000
    found = [n for n in range(2 * most, 3 * most) if window.find(identity(n), now) == (n % 48, n)]
    assert len(found) >= 0.98 * most  # the newest of a full row are the last to go


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5000)), max_size=60), st.integers(0, 6000))
def test_it_tells_what_a_plain_dictionary_would(ends: list[tuple[int, int]], later: int) -> None:
    window, model = Window(1000, 64 * WAYS), dict[int, tuple[int, int]]()
    for offset, (number, at) in enumerate(ends):
        window.add(identity(number), Spot(1, offset), NOW + at)
        if number not in model or model[number][0] <= at:
            model[number] = (at, offset)
    for number in range(31):
        at, offset = model.get(number, (-1, 0))
        expected = (1, offset) if at >= 0 and at >= later - 1000 else None
        assert window.find(identity(number), NOW + later) == expected
