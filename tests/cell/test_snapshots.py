"""The core's shelf of snapshots."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.cell.messages import Snapshot
from gyre.cell.snapshots import MOST, SnapshotShelf
from gyre.rdma import RegionHandle


def region(version: int) -> RegionHandle:
    return RegionHandle(backend="shm", name=f"w{version}", nbytes=4)


def shelf(*versions: int) -> SnapshotShelf:
    """All of them were published but the last."""
    made = SnapshotShelf()
    for version in versions:
        made.publish()
        made.add(version, region(version))
    return made


def test_a_snapshot_is_trained_under_before_it_is_published() -> None:
    made = shelf(0, 1)
    training, _ = made.lease(1, "training")
    published, _ = made.lease(2, "published")
    assert (training.version, training.region) == (1, region(1))
    assert (published.version, published.region) == (0, region(0))


def test_what_nobody_needs_is_freed() -> None:
    made = shelf(0)
    made.publish()
    assert made.add(1, region(1)) == []
    assert made.add(2, region(2)) == [region(1)]
    assert made.publish() == [region(0)]


def test_a_reader_keeps_its_version_until_it_lets_go() -> None:
    made = shelf(0)
    made.publish()
    snapshot, _ = made.lease(1, "published")
    assert made.add(1, region(1)) == []
    assert made.publish() == []
    assert made.release(snapshot.lease) == [region(0)]


def test_two_readers_of_one_version_both_keep_it() -> None:
    made = shelf(0)
    made.publish()
    first, _ = made.lease(1, "published")
    second, _ = made.lease(2, "published")
    made.add(1, region(1))
    made.publish()
    assert made.release(first.lease) == []
    assert made.release(second.lease) == [region(0)]


def test_asking_again_gives_up_the_lease_before() -> None:
    """A cell that died holding one has nobody else to release it."""
    made = shelf(0)
    made.publish()
    made.lease(1, "published")
    made.add(1, region(1))
    made.publish()
    again, freed = made.lease(1, "published")
    assert again.version == 1 and freed == [region(0)]


def test_a_lease_is_released_once_and_an_unknown_one_is_no_error() -> None:
    made = shelf(0)
    made.publish()
    snapshot, _ = made.lease(1, "published")
    for lease in (snapshot.lease, snapshot.lease, 99):
        assert made.release(lease) == []


def test_a_late_release_of_an_old_lease_does_not_end_the_new_one() -> None:
    made = shelf(0)
    made.publish()
    old, _ = made.lease(1, "published")
    made.lease(1, "published")
    made.add(1, region(1))
    made.publish()
    assert made.release(old.lease) == []


def test_three_versions_are_all_there_is_room_for() -> None:
    made = shelf(0)
    made.publish()
    snapshot, _ = made.lease(1, "published")
    made.add(1, region(1))
    made.publish()
    made.add(2, region(2))
    assert len(made.regions) == MOST
    made.release(snapshot.lease)
    assert len(made.regions) < MOST


steps = st.lists(
    st.one_of(
        st.just(("add",)),
        st.just(("publish",)),
        st.tuples(st.just("lease"), st.integers(0, 3), st.sampled_from(["training", "published"])),
        st.tuples(st.just("release"), st.integers(0, 10)),
    ),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(steps)
def test_nothing_in_use_is_freed_and_nothing_else_is_kept(steps: list[tuple]) -> None:
    made = shelf(0)
    made.publish()
    version, freed = 0, set()
    held: dict[int, Snapshot] = {}
    for step in steps:
        gone: list[RegionHandle] = []
        match step:
            case ("add",) if len(made.regions) < MOST:
                version += 1
                gone = made.add(version, region(version))
            case ("publish",):
                gone = made.publish()
            case ("lease", cell, kind):
                held[cell], gone = made.lease(cell, kind)
                assert held[cell].version == (made.training if kind == "training" else made.published)
            case ("release", lease):
                gone = made.release(lease)
                held = {cell: snapshot for cell, snapshot in held.items() if snapshot.lease != lease}
        assert not freed & {r.name for r in gone}, "freed twice"
        freed |= {r.name for r in gone}
        live = {made.training, made.published} | {snapshot.version for snapshot in held.values()}
        assert freed == {f"w{v}" for v in range(version + 1) if v not in live}
