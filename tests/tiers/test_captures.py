"""Ranks agree on the places of a step and on its plan; then each copies its state."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from shardckpt import Checkpointer, PeerMemory
from shardckpt.checkpoint.save.staging import StagingArea
from shardckpt.errors import RankError, StorageError, UsageError
from shardckpt.events import FallbackEvent
from shardckpt.ranks.linked_group import LinkedGroup
from shardckpt.ranks.process_group import get_ranks
from shardckpt.ranks.torch_link import TorchLink
from shardckpt.tiers.captures import Captures
from tests.kit.ranks.harness import outcomes, run
from tests.kit.runs.tier_runs import VALUES, enter, sharded_state

WORLD = 3
FILL = StagingArea.fill


@contextmanager
def recorded() -> Iterator[list[str]]:
    """Record the messages of the training thread: `expect`, `send`, `answer`, and `copy` for the copy of the state."""
    calls: list[str] = []
    send, recv, expect = LinkedGroup._send_bytes, LinkedGroup._recv_bytes, TorchLink.expect_message

    def note(what: str) -> None:
        if threading.current_thread() is threading.main_thread():
            calls.append(what)

    def sent(self, *args):
        note("send")
        return send(self, *args)

    def received(self, *args):
        found = recv(self, *args)
        note("answer")
        return found

    def expected(self, *args):
        note("expect")
        return expect(self, *args)

    def filled(self, *args):
        note("copy")
        return FILL(self, *args)

    with (
        patch.object(LinkedGroup, "_send_bytes", sent),
        patch.object(LinkedGroup, "_recv_bytes", received),
        patch.object(TorchLink, "expect_message", expected),
        patch.object(StagingArea, "fill", filled),
    ):
        yield calls


def begin(rank: int, root: Path, events: list | None = None) -> Checkpointer:
    """Return a run on three nodes whose rank has captured step 1."""
    enter("abc"[rank])
    ck = Checkpointer(
        root, save_every=100, tiers=[PeerMemory()], on_event=(events if events is None else events.append)
    )
    ck.save(1, sharded_state(WORLD, 1))
    ck.wait()
    return ck


def fill_unless(faults: Iterator[Exception], *args: object) -> None:
    """Raise the next of some errors instead of copying; copy when none is left."""
    for error in faults:
        raise error
    FILL(*args)


def is_restored(root: Path, step: int) -> bool:
    """Return True if a step is restored bit for bit. Collective."""
    into = sharded_state(WORLD)
    found = Checkpointer(root, save_every=100, tiers=[PeerMemory()]).restore(into)
    return found == step and torch.equal(into["w"].full_tensor(), VALUES * step) and into["step"] == step


def test_the_state_is_copied_after_two_messages_of_a_rank_and_their_answers(tmp_path):
    def body(rank: int, world: int) -> tuple:
        ck, state = begin(rank, tmp_path / "run"), sharded_state(world, 2)
        with recorded() as calls:
            ck.save(2, state)
        state["w"].to_local().zero_()  # the training goes on
        ck.wait()
        return calls, is_restored(tmp_path / "run", 2)

    first, *others = run(WORLD, body)
    assert first == ([*["expect", "expect", "answer", "answer", "send", "send"] * 2, "copy"], True)
    assert others == [([*["expect", "send", "answer"] * 2, "copy"], True)] * 2


def test_a_state_larger_than_the_buffers_is_captured(tmp_path):
    def body(rank: int, world: int) -> tuple:
        ck = begin(rank, tmp_path / "run")
        with recorded() as calls:
            ck.async_save(2, sharded_state(world, 2), max_staging_bytes=1 << 20)
        ck.wait()
        return calls, is_restored(tmp_path / "run", 2)

    assert run(WORLD, body)[1:] == [([*["expect", "send", "answer"] * 2, "copy"], True)] * 2


def test_ranks_plan_again_if_the_state_of_one_has_another_plan(tmp_path):
    def body(rank: int, world: int) -> tuple:
        ck, state = begin(rank, tmp_path / "run"), sharded_state(world, 2)
        if rank == 1:  # the order of names
            state = dict(reversed(state.items()))
        with recorded() as calls:
            ck.save(2, state)
        ck.wait()
        return calls.count("send") > 2, is_restored(tmp_path / "run", 2)

    assert run(WORLD, body) == [(True, True)] * WORLD


def test_a_value_that_differs_is_an_error_of_all_ranks_in_the_same_save(tmp_path):
    def body(rank: int, world: int) -> tuple:
        ck, state = begin(rank, tmp_path / "run"), sharded_state(world, 2)
        state["step"] += rank == 2
        with pytest.raises(UsageError, match="step"):
            ck.save(2, state)
        ck.save(3, sharded_state(world, 3))
        ck.wait()
        return is_restored(tmp_path / "run", 3)

    assert run(WORLD, body) == [True] * WORLD


def test_a_copy_that_fails_on_one_rank_fails_the_capture_on_all(tmp_path):
    def body(rank: int, world: int) -> tuple:
        events: list = []
        ck = begin(rank, tmp_path / "run", events)
        with ExitStack() as stack:
            if rank == 1:
                faults = iter([StorageError("no memory")])
                stack.enter_context(patch.object(StagingArea, "fill", lambda *args: fill_unless(faults, *args)))
            ck.save(2, sharded_state(world, 2))
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            ck.wait()
        texts = [str(each.message) for each in warned if "not captured" in str(each.message)]
        passed = [event.step for event in events if isinstance(event, FallbackEvent)]
        return ["rank 1" in text for text in texts], passed, is_restored(tmp_path / "run", 1)

    assert run(WORLD, body) == [([True], [2], True)] + [([], [2], True)] * 2


def test_a_rank_that_leaves_between_the_answer_and_its_part_counts_as_lost(tmp_path):
    def body(rank: int, world: int) -> bool:
        ck = begin(rank, tmp_path / "run")
        if rank == 1:
            ranks = get_ranks(None)
            with (
                patch.object(Captures, "_open_tiers", side_effect=KeyboardInterrupt),
                pytest.raises(KeyboardInterrupt),
            ):
                ck.save(2, sharded_state(world, 2))
            return ranks.is_broken
        with pytest.raises(RankError):
            ck.save(2, sharded_state(world, 2))
            ck.wait()
        return True

    found = outcomes(WORLD, body, group_timeout=3.0)
    assert [each.value for each in found] == [True] * WORLD


def test_an_exception_of_a_rank_that_opens_its_tier_is_raised_on_all_ranks(tmp_path):
    def body(rank: int, world: int) -> tuple[str, bool]:
        enter("abc"[rank])
        ck = Checkpointer(tmp_path / "run", save_every=100, tiers=[PeerMemory()])
        with ExitStack() as stack:
            if rank == 1:
                (tier,) = ck._saver._captures._tiers
                broken = patch.object(tier.opening, "_open_node", side_effect=ValueError("no folder of this kind"))
                stack.enter_context(broken)
            with pytest.raises(ValueError if rank == 1 else RankError, match="no folder of this kind") as caught:
                ck.save(1, sharded_state(world, 1))
        ck.save(2, sharded_state(world, 2))
        ck.wait()
        return str(caught.value), is_restored(tmp_path / "run", 2)

    found = outcomes(WORLD, body, group_timeout=10.0)
    texts, restored = zip(*(each.value for each in found), strict=True)
    assert all("failed on rank 1" in texts[rank] for rank in (0, 2))
    assert restored == (True,) * WORLD


def test_the_buffers_are_free_for_other_saves_after_a_capture(tmp_path):
    def body(rank: int, world: int) -> bool:
        ck, other = begin(rank, tmp_path / "run"), begin(rank, tmp_path / "other")
        for step in (2, 3):
            ck.save(step, sharded_state(world, step))
            other.save(step, sharded_state(world, step + 10))  # waits for the capture of the first run
        ck.wait()
        other.wait()
        return is_restored(tmp_path / "run", 3)

    assert run(WORLD, body) == [True] * WORLD
