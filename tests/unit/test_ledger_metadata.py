"""The codec of a commit's metadata: round trip, bounds, and the plain offset for whatever cannot be read."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from service.ledger.metadata import HEADER, LIMIT, Commit, Snapshot, decode, encode, pack

offsets = st.integers(0, 2**48)
gaps = st.lists(st.tuples(st.integers(0, 3_000), st.one_of(st.just(0), st.integers(0, 300))), max_size=200)


def written(snapshot: Snapshot, limit: int = LIMIT) -> Commit:
    entries, following = pack(snapshot.watermark, snapshot.next, snapshot.unfinished.items(), limit - HEADER)
    text = encode(
        snapshot.watermark, following, snapshot.status_next, entries, clean=snapshot.clean, writer=snapshot.writer
    )
    return Commit(snapshot.watermark, text)


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    watermark = draw(offsets)
    unfinished: dict[int, int] = {}
    at = watermark
    for gap, starts in draw(gaps):
        at += gap
        unfinished[at] = starts
        at += 1
    return Snapshot(
        watermark=watermark,
        next=at + draw(st.integers(0, 100)),
        status_next=draw(st.integers(0, 2**62)),
        clean=draw(st.booleans()),
        writer=draw(st.integers(0, 2**32 - 1)),
        unfinished=unfinished,
    )


@given(snapshots())
def test_what_is_written_is_read_back(snapshot: Snapshot) -> None:
    commit = written(snapshot)
    assert len(commit.metadata) <= LIMIT
    assert decode(commit) == snapshot


@given(snapshots(), st.integers(64, 400))
def test_what_does_not_fit_is_read_again_and_never_lost(snapshot: Snapshot, limit: int) -> None:
    commit = written(snapshot, limit)
    assert len(commit.metadata) <= limit
    got = decode(commit)
    assert got.watermark == snapshot.watermark
    for offset in snapshot.unfinished:
        assert offset >= got.next or got.unfinished[offset] == snapshot.unfinished[offset]


def test_the_largest_ledger_fits_into_the_brokers_limit() -> None:
    """900 unfinished over a span of 131,072, every one started before."""
    step = 131_072 // 900
    unfinished = {1_000_000 + step * n: 3 for n in range(900)}
    snapshot = Snapshot(1_000_000, 1_000_000 + 131_072, 2**40, True, 2**32 - 1, unfinished)
    commit = written(snapshot)
    assert len(commit.metadata) <= LIMIT
    assert decode(commit) == snapshot


@given(snapshots(), st.data())
@settings(max_examples=200)
def test_damage_means_the_plain_offset(snapshot: Snapshot, data: st.DataObject) -> None:
    commit = written(snapshot)
    at = data.draw(st.integers(0, len(commit.metadata) - 1))
    other = data.draw(st.characters().filter(lambda c: c != commit.metadata[at]))
    damaged = commit._replace(metadata=commit.metadata[:at] + other + commit.metadata[at + 1 :])
    assert decode(damaged) == Snapshot.plain(commit.offset)


@given(snapshots(), offsets)
def test_metadata_is_valid_beside_its_own_offset_only(snapshot: Snapshot, offset: int) -> None:
    if offset & 0xFFFFFFFF != snapshot.watermark & 0xFFFFFFFF:
        assert decode(Commit(offset, written(snapshot).metadata)) == Snapshot.plain(offset)


@given(st.text(max_size=200), offsets)
def test_foreign_metadata_means_the_plain_offset(text: str, offset: int) -> None:
    assert decode(Commit(offset, text)) == Snapshot.plain(offset)


def test_a_snapshot_is_cut_to_the_log() -> None:
    told = Snapshot(10, 20, 5, True, 7, {10: 1, 12: 0, 18: 2})
    assert told.within(0, 100) == told
    cut = told.within(11, 15)
    assert (cut.watermark, cut.next, cut.unfinished) == (12, 15, {12: 0})
    gone = told.within(30, 40)
    assert (gone.watermark, gone.next, gone.unfinished) == (30, 30, {})
    other_log = told.within(0, 4)
    assert (other_log.watermark, other_log.next, other_log.unfinished, other_log.clean) == (0, 0, {}, False)
