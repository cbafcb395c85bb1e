"""The way to a version: the fewest bytes, and none that leads through a hole."""

from __future__ import annotations

import pytest

from shardckpt.errors import IncompleteError
from shardckpt.stream.format.chain import Chain, plan_chain
from shardckpt.stream.format.stream_records import DeltaFile, Version, VersionCommit

FULL = 1000


def v(number: int) -> Version:
    return Version(1, number)


def commit(number: int, nbytes: int = 10) -> VersionCommit:
    file = DeltaFile("delta-00000-00000000.safetensors", nbytes, 8, "0" * 64)
    base = v(number - 1) if number > 1 else None
    before = f"{number - 1:032x}" if number > 1 else None
    return VersionCommit("0" * 32, v(number), "0" * 32, base, before, f"{number:032x}", {}, (file,), 1, FULL)


COMMITS = {v(number): commit(number) for number in range(1, 8)}


def plan(target: int, held: int | None, anchors: set[int], commits: dict[Version, VersionCommit] = COMMITS) -> Chain:
    return plan_chain(
        commits[v(target)], None if held is None else v(held), commits.get, lambda each: each.number in anchors, "here"
    )


def numbers(chain: Chain) -> tuple[int | None, list[int]]:
    return chain.anchor and chain.anchor.number, [each.version.number for each in chain.deltas]


def test_a_receiver_takes_the_changes_since_its_version() -> None:
    assert numbers(plan(7, 4, {1, 5})) == (None, [5, 6, 7])
    assert numbers(plan(7, 7, {1})) == (None, [])


def test_a_late_joiner_takes_the_newest_anchor_and_its_changes() -> None:
    assert numbers(plan(7, None, {1, 5})) == (5, [6, 7])
    assert numbers(plan(7, None, {7})) == (7, [])


def test_an_anchor_replaces_changes_that_have_more_bytes() -> None:
    commits = {**COMMITS, v(5): commit(5, 2 * FULL)}
    assert numbers(plan(7, 3, {1, 6}, commits)) == (6, [7])


def test_a_receiver_of_another_epoch_starts_at_an_anchor() -> None:
    chain = plan_chain(COMMITS[v(7)], Version(2, 3), COMMITS.get, lambda each: each.number == 5, "here")
    assert numbers(chain) == (5, [6, 7])


def test_a_hole_is_passed_by_an_anchor_or_named() -> None:
    commits = {version: each for version, each in COMMITS.items() if version != v(4)}
    assert numbers(plan(7, 3, {5}, commits)) == (5, [6, 7])
    with pytest.raises(IncompleteError, match=r"needs version 4 \(epoch 1\), which is gone"):
        plan(7, 3, {1}, commits)


def test_a_base_with_another_digest_is_a_hole() -> None:
    odd = commit(4)
    commits = {
        **COMMITS,
        v(4): VersionCommit(**{f: getattr(odd, f) for f in odd.__slots__} | {"result_digest": "f" * 32}),
    }
    with pytest.raises(IncompleteError, match="gone"):
        plan(7, 3, {1}, commits)


def test_no_anchor_at_all_is_named() -> None:
    with pytest.raises(IncompleteError, match="no version before it has an anchor"):
        plan(7, None, set())
