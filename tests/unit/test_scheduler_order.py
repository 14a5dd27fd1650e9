from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from schemas.tenants import Tenant
from service.job import Job, Place, Ticket
from service.scheduler.order import Order, Upstream, order_key
from tests.unit.jobs import job


def place(offset: int, partition: int = 0) -> Place:
    return Place("jobs", partition, offset)


@given(st.lists(st.one_of(st.sampled_from("abc"), st.integers(0, 30)), max_size=100))
def test_one_at_a_time_in_the_order_of_the_log_and_nobody_is_forgotten(steps: list[str | int]) -> None:
    """A step is a job of that key, or one of those that are here, running or waiting, is over."""
    order: Order[tuple[str, int]] = Order()
    here: list[tuple[str, int]] = []
    running: dict[str, tuple[str, int]] = {}
    waiting: dict[str, list[int]] = {key: [] for key in "abc"}

    def go(item: tuple[str, int]) -> None:
        key, offset = item
        assert key not in running, "one at a time"
        assert not waiting[key] or offset < min(waiting[key]), "in order"
        running[key] = item

    for offset, step in enumerate(steps):
        if isinstance(step, str):
            item = (step, offset)
            here.append(item)
            if order.enter(step, place(offset), item):
                go(item)
            else:
                waiting[step].append(offset)
        elif here:
            item = here.pop(step % len(here))
            key = item[0]
            if running.get(key) == item:
                del running[key]
            else:
                waiting[key].remove(item[1])
            following = order.leave(key, item)
            if following is not None:
                waiting[key].remove(following[1])
                go(following)
        for key in "abc":
            assert key in running or not waiting[key], "who may go goes"
        assert len(order) == sum(map(len, waiting.values()))


def test_a_later_job_does_not_overtake_one_whose_input_is_still_fetched() -> None:
    """Offset 1 needs a look-up; 2 and 3 of its key are here before it."""
    coming = {1}
    order: Order[int] = Order(lambda offset: not any(early < offset for early in coming))
    assert not order.enter("k", place(2), 2)
    assert not order.enter("k", place(3), 3)
    assert order.enter("other", place(0), 0)
    assert not order.retry()
    coming.clear()
    assert order.enter("k", place(1), 1)
    assert not order.retry()
    assert order.leave("k", 1) == 2
    assert order.leave("k", 2) == 3
    assert order.leave("k", 3) is None and not len(order)


def test_if_the_look_up_ends_in_nothing_the_next_one_goes() -> None:
    coming = {1}
    order: Order[int] = Order(lambda offset: not any(early < offset for early in coming))
    assert not order.enter("k", place(2), 2)
    coming.clear()
    assert order.retry() == [2]
    assert order.leave("k", 2) is None


def test_one_that_goes_away_while_it_waits_for_a_look_up_keeps_nobody() -> None:
    coming = {1}
    order: Order[int] = Order(lambda offset: offset == 3 or not coming)
    assert not order.enter("k", place(2), 2)
    assert not order.enter("k", place(3), 3)
    assert order.leave("k", 2) == 3


def test_records_on_their_way_are_known_by_key_and_partition() -> None:
    upstream = Upstream()

    def one(offset: int, key: bytes = b"acme", partition: int = 0) -> Job:
        return job(offset, tenant=key.decode(), partition=partition)

    topic = one(5).place.topic
    upstream.add(Ticket(Place(topic, 0, 5), 1), b"acme")
    assert upstream.before(one(6)) and not upstream.before(one(5)) and not upstream.before(one(4))
    assert not upstream.before(one(6, b"globex")) and not upstream.before(one(6, partition=1))
    upstream.remove(Ticket(Place(topic, 0, 5), 1), b"acme")
    assert not upstream.before(one(6))


def test_keys_of_the_order_modes() -> None:
    one, other = job(), job()
    other.conversation = "c"
    for mode, keys in {
        "none": (None, None),
        "conversation": (None, ("acme", "c")),
        "tenant": (("acme", None), ("acme", None)),
    }.items():
        tenant = Tenant(id="acme", order=mode)  # type: ignore[arg-type]
        assert (order_key(one, tenant), order_key(other, tenant)) == keys
    assert order_key(one, None) is None
