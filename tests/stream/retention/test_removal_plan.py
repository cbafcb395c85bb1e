"""What a removal may take: nothing that a reader, a rule or a kept step needs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardckpt.stream.format.stream_records import Version
from shardckpt.stream.retention.leases import VersionLease
from shardckpt.stream.retention.removal_plan import plan_removal


def v(number: int, epoch: int = 1) -> Version:
    return Version(epoch, number)


BASES = {v(1): None, v(2): v(1), v(3): v(2), v(4): v(3), v(5): v(4), v(6): v(5)}
ANCHORS = {v(1), v(3), v(5)}


def test_the_newest_anchors_and_all_versions_after_them_stay() -> None:
    assert plan_removal(BASES, ANCHORS, [], 1, ()) == [v(1), v(2), v(3), v(4)]
    assert plan_removal(BASES, ANCHORS, [], 2, ()) == [v(1), v(2)]
    assert plan_removal(BASES, ANCHORS, [], 9, ()) == []


def test_nothing_goes_while_no_anchor_reaches_the_newest_version() -> None:
    assert plan_removal({v(5): v(4), v(6): v(5)}, set(), [], 1, ()) == []
    assert plan_removal({}, set(), [], 1, ()) == []


def test_what_a_lease_needs_and_the_changes_after_its_version_stay() -> None:
    assert plan_removal(BASES, ANCHORS, [VersionLease(None, (v(1), v(2)), 0.0)], 1, ()) == [v(3), v(4)]
    assert plan_removal(BASES, ANCHORS, [VersionLease(v(2), (), 0.0)], 1, ()) == [v(1)]
    assert plan_removal(BASES, ANCHORS, [VersionLease(v(9), (), 0.0)], 1, ()) == [v(1), v(2), v(3), v(4)]


def test_a_kept_number_stays_readable_from_its_anchor() -> None:
    assert plan_removal(BASES, ANCHORS, [], 1, {4}) == [v(1), v(2)]
    assert plan_removal(BASES, ANCHORS, [], 1, {77}) == [v(1), v(2), v(3), v(4)]


def test_versions_of_an_epoch_that_nothing_follows_go() -> None:
    bases = {**BASES, v(7): v(6), v(6, 2): None, v(7, 2): v(6, 2)}
    assert plan_removal(bases, {*ANCHORS, v(6, 2)}, [], 1, ()) == [*sorted(BASES), v(7)]


@given(st.data())
def test_a_late_joiner_always_reaches_the_newest_version(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 12))
    bases: dict[Version, Version | None] = {v(0): None}
    for number in range(1, count):
        bases[v(number)] = v(number - 1)
    anchors = {v(0)} | {version for version in bases if data.draw(st.booleans())}
    kept = data.draw(st.sets(st.integers(0, count)))
    removed = plan_removal(bases, anchors, [], data.draw(st.integers(1, 3)), kept)
    left = {version: base for version, base in bases.items() if version not in removed}
    for wanted in [max(bases), *(v(number) for number in kept if v(number) in bases)]:
        now: Version | None = wanted
        while now not in anchors:
            assert now in left
            now = left[now]
        assert now in left
