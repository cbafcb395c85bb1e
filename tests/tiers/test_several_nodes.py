"""The memory tier on several nodes, simulated on one machine: what is captured, claimed, lost and restored."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from shardckpt import Checkpointer, PeerMemory
from shardckpt.checkpoint.load import tensor_loader
from shardckpt.errors import RankError
from shardckpt.events import FallbackEvent
from shardckpt.ranks import torch_link
from shardckpt.ranks.linked_group import LinkedGroup
from shardckpt.tiers import memory_tier
from shardckpt.tiers.peers import open_peers, peer_exchange
from shardckpt.tiers.peers.peer_store import PeerStore
from tests.kit.ranks.harness import outcomes, run
from tests.kit.runs.tier_runs import (
    BLOCKS,
    NODES,
    VALUES,
    block_memory,
    captures,
    empty_memory,
    enter,
    is_step,
)
from tests.kit.runs.tier_runs import sharded_state as state


def make(root: Path, *, save_every: int = 100, on_event=None, **options: object) -> Checkpointer:
    return Checkpointer(root, save_every=save_every, tiers=[PeerMemory(**options)], on_event=on_event)


def train(rank: int, world: int, root: Path, nodes: str, steps: tuple[int, ...], options: dict) -> list:
    enter(nodes[rank])
    ck = make(root, **options)
    for step in steps:
        ck.save(step, state(world, step))
    ck.wait()
    return sorted(ck.durability(steps[-1]).survives)


def resume(rank: int, world: int, root: Path, nodes: str, options: dict) -> tuple:
    """Restore; return the step, whether the values are its own, and the bytes from the own node and from others."""
    enter(nodes[rank])
    stores: list[PeerStore] = []
    open_peers.PeerStore = lambda *args: stores.append(PeerStore(*args)) or stores[-1]
    into = state(world)
    step = make(root, **options).restore(into)
    return step, is_step(into, step or 0), *((store.own_bytes, store.pulled_bytes) for store in stores)


def test_ranks_on_two_nodes_capture_into_their_memory_and_other_ranks_restore_it(tmp_path):
    assert run(4, train, tmp_path / "run", "aabb", (1, 2, 3), {}) == [["process"]] * 4
    for node in "ab":
        (held,) = captures(node)
        payload = VALUES.nbytes // 2
        assert payload < held.nbytes < payload + 20_000, "each node has its half, of one capture"
        assert held.steps == () and held.parts == (3,)
    for world, nodes in ((4, "aabb"), (3, "abb"), (2, "ab"), (5, "aaabb")):
        found = run(world, resume, tmp_path / "run", nodes, {})
        assert [each[:2] for each in found] == [(3, True)] * world
    in_place = run(4, resume, tmp_path / "run", "aabb", {})
    assert all(pulled < BLOCKS for *_, (_, pulled) in in_place), "only the replicated values cross the network"
    moved = run(4, resume, tmp_path / "run", "bbaa", {})
    assert all(own < BLOCKS and pulled >= VALUES.nbytes // 4 for *_, (own, pulled) in moved)


def resume_and_train(
    rank: int, world: int, root: Path, nodes: str, steps: tuple[int, ...], options: dict
) -> int | None:
    """Restore, then capture steps; return the restored one."""
    enter(nodes[rank])
    ck, into = make(root, **options), state(world)
    step = ck.restore(into)
    assert step is None or is_step(into, step)
    for number in steps:
        ck.save(number, state(world, number))
    ck.wait()
    return step


def test_a_rank_asks_for_files_of_other_nodes_before_it_reads_those_of_its_own(tmp_path):
    assert run(2, train, tmp_path / "run", "ab", (1,), {}) == [["process"]] * 2

    def body(rank: int, world: int) -> list[bool]:
        enter("baa"[rank])
        tensor_loader.BATCH_BYTES, tensor_loader.MAX_READERS = 1 << 16, 1  # of this forked rank
        order, read = [], PeerStore.read

        def record(store, reads):
            order.extend(store.is_near(each.name) for each in reads if len(each.buffer) >= 1 << 16)
            return read(store, reads)

        PeerStore.read = record
        into = state(world)
        assert make(tmp_path / "run").restore(into) == 1 and is_step(into, 1)
        return order

    orders = run(3, body)
    assert orders[0] and not any(orders[0]) and orders[2] and not any(orders[2])
    assert orders[1] == sorted(orders[1]) and len({*orders[1]}) == 2, "the second rank needs rows of both nodes"


def test_captures_of_a_start_that_reaches_none_of_the_last_one_are_newer(tmp_path):
    root = tmp_path / "run"
    assert run(1, resume_and_train, root, "a", (1, 2), {}) == [None]
    assert run(1, resume_and_train, root, "b", (1,), {}) == [None]
    assert [each[:2] for each in run(2, resume, root, "ab", {})] == [(1, True)] * 2


def test_captures_of_a_start_that_reaches_only_those_before_the_last_one_are_newer(tmp_path):
    root, copied = tmp_path / "run", {"copies": 1}
    assert run(2, resume_and_train, root, "ab", (1,), copied) == [None] * 2
    assert run(2, resume_and_train, root, "bc", (2, 3), copied) == [1] * 2
    assert run(1, resume_and_train, root, "a", (2,), {}) == [1]
    assert [each[:2] for each in run(3, resume, root, "abc", {})] == [(2, True)] * 3


def test_a_rank_whose_node_has_no_captures_pulls_all_from_a_peer(tmp_path):
    run(2, train, tmp_path / "run", "aa", (6,), {})
    assert [each[:2] for each in run(3, resume, tmp_path / "run", "bac", {})] == [(6, True)] * 3


def test_a_capture_of_which_a_node_is_lost_is_neither_claimed_nor_restored(tmp_path):
    root = tmp_path / "run"

    def lose(rank: int, world: int) -> tuple:
        enter("aabb"[rank])
        ck = make(root, save_every=2)
        for step in (2, 3):
            ck.save(step, state(world, step))
        ck.wait()
        before = ck.durability(3).survives
        if rank == 2:
            empty_memory("b")
        torch.distributed.barrier()
        return before, ck.durability(3).survives, ck.durability(2).survives

    assert run(4, lose) == [({"process"}, set(), {"process"})] * 4
    assert [each[:2] for each in run(4, resume, root, "aabb", {})] == [(2, True)] * 4


def test_a_node_without_memory_is_one_warning_and_event_and_captures_again_later(tmp_path):
    def body(rank: int, world: int) -> list:
        enter("ab"[rank])
        events: list[object] = []
        ck = make(tmp_path / "run", save_every=2, on_event=events.append)
        folder = block_memory(tmp_path / "run", "b") if rank else None
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            ck.save(1, state(world, 1))
            ck.wait()
            claims = [ck.durability(1).survives]
            if folder is not None:
                folder.unlink()
            for step in (2, 3, 4, 5):
                ck.save(step, state(world, step))
            ck.wait()
        texts = [str(each.message) for each in warned if "not captured" in str(each.message)]
        passed = [event.step for event in events if isinstance(event, FallbackEvent)]
        return [*claims, ck.durability(5).survives, ["rank 1" in text for text in texts], passed]

    assert run(2, body) == [[set(), {"process"}, [True], [1]], [set(), {"process"}, [], []]]


def test_ranks_agree_twice_on_a_capture_and_three_times_unless_all_nodes_were_ready(tmp_path):
    def body(rank: int, world: int) -> tuple:
        enter("aab"[rank])
        events, agreements = [], []
        ck, coordinate = make(tmp_path / "run", on_event=events.append), LinkedGroup.ask_rank0

        def count(self, *args):
            agreements[-1] += threading.current_thread() is threading.main_thread()
            return coordinate(self, *args)

        LinkedGroup.ask_rank0 = count
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for step in range(1, 7):
                if (rank, step) == (2, 4):
                    folder = block_memory(tmp_path / "run", "b")
                agreements.append(0)
                ck.save(step, state(world, step))
                ck.wait()
                if (rank, step) == (2, 4):
                    folder.unlink()
        return agreements[1:], ck.durability(6).survives, [e.step for e in events if isinstance(e, FallbackEvent)]

    agreements = [2, 2, 1, 1, 3]  # of steps 2 to 6; step 4 fails, and step 5 is passed over since it did
    assert run(3, body) == [(agreements, {"process"}, [4])] + [(agreements, {"process"}, [])] * 2


def test_a_rank_that_is_killed_leaves_the_capture_before_it_on_every_node(tmp_path):
    root = tmp_path / "run"

    def die(rank: int, world: int) -> None:
        enter("ab"[rank])
        ck = make(root)
        ck.save(1, state(world, 1))
        ck.wait()
        ck.save(2, state(world, 2))
        if rank:
            os.kill(os.getpid(), signal.SIGKILL)
        ck.wait()

    outcomes(2, die, group_timeout=3.0)
    found = run(2, resume, root, "ab", {})
    assert found[0][:2] in {(1, True), (2, True)} and found[1][:2] == found[0][:2]


class Dying:
    """An object that kills its process when its state is read again."""

    def __init__(self, reads: int) -> None:
        self.reads = reads

    def state_dict(self) -> dict:
        self.reads -= 1
        if not self.reads:
            os.kill(os.getpid(), signal.SIGKILL)
        return {}

    def load_state_dict(self, state: dict) -> None:
        pass


@pytest.mark.parametrize("is_behind", [False, True], ids=["inside a save", "behind a save"])
def test_a_rank_that_dies_is_an_error_at_once_for_which_no_ranks_meet_again(tmp_path, is_behind):
    def body(rank: int, world: int) -> tuple[int, bool]:
        enter("ab"[rank])
        ck = make(tmp_path / "run")
        dying = Dying(2 if rank and not is_behind else -1)
        ck.save(1, {**state(world, 1), "dying": dying})
        ck.wait()
        meetings, meet = [], torch_link.meet
        torch_link.meet = lambda *args, **options: meetings.append(args) or meet(*args, **options)
        try:
            ck.save(2, {**state(world, 2), "dying": dying})
            if rank:
                os.kill(os.getpid(), signal.SIGKILL)
            ck.wait()
        except RankError as error:
            return len(meetings), "rank 1" in str(error)
        return -1, False

    assert outcomes(2, body, group_timeout=5.0)[0].value == (0, True)


def test_captures_of_a_root_that_was_emptied_are_not_restored_from_any_node(tmp_path):
    root = tmp_path / "run"
    run(2, train, root, "ab", (2,), {"save_every": 2})
    run(2, train, root, "ab", (3,), {"save_every": 2})
    root.rename(tmp_path / "moved")
    assert [each[0] for each in run(2, resume, root, "ab", {})] == [None, None]
    (tmp_path / "moved").rename(root)
    assert [each[0] for each in run(2, resume, root, "ab", {})] == [3, 3]


def lose(root: Path, nodes: str, lost: str, options: dict) -> list:
    """Capture steps 1 and 2 on some nodes, then lose the ranks and memory of some; return the claims before."""

    def body(rank: int, world: int) -> list:
        claims = train(rank, world, root, nodes, (1, 2), options)
        torch.distributed.barrier()
        (root.parent / f"claims-{rank}").write_text(",".join(claims))
        if nodes[rank] in lost:
            os.kill(os.getpid(), signal.SIGKILL)
        return claims

    outcomes(len(nodes), body)
    for node in lost:
        empty_memory(node)
    return [(root.parent / f"claims-{rank}").read_text() for rank in range(len(nodes))]


def test_with_a_copy_the_loss_of_any_node_is_survived_on_other_numbers_of_ranks(tmp_path):
    root, options = tmp_path / "run", {"copies": 1}
    assert lose(root, "abcd", "b", options) == ["node,process"] * 4
    for node in "acd":
        (held,) = captures(node)
        payload = 2 * VALUES.nbytes // 4
        assert payload < held.nbytes < payload + 60_000, "a node has its part and that of one other"
    for nodes in ("abcd", "acd", "aaccd"):
        found = run(len(nodes), resume, root, nodes, options)
        assert [each[:2] for each in found] == [(2, True)] * len(nodes)


def test_of_two_ranks_on_each_of_two_nodes_the_survivor_has_all(tmp_path):
    root, options = tmp_path / "run", {"copies": 1}
    assert lose(root, "aabb", "a", options) == ["node,process"] * 4
    found = run(2, resume, root, "bb", options)
    assert [each[:2] for each in found] == [(2, True)] * 2


def test_two_partners_may_be_lost_with_two_copies_and_are_not_survived_with_one(tmp_path):
    two = tmp_path / "two" / "run"
    two.parent.mkdir()
    assert lose(two, "abcd", "ab", {"copies": 2}) == ["2 nodes,node,process"] * 4
    for nodes in ("acd", "cd"):
        found = run(len(nodes), resume, two, nodes, {"copies": 2})
        assert [each[:2] for each in found] == [(2, True)] * len(nodes)
    for node in NODES:
        empty_memory(node)
    one = tmp_path / "one" / "run"
    one.parent.mkdir()
    assert lose(one, "abcd", "ab", {"copies": 1, "save_every": 1}) == ["node,process"] * 4
    found = run(2, resume, one, "cd", {"copies": 1, "save_every": 1})
    assert [each[:2] for each in found] == [(2, True)] * 2, "from the root"


def test_more_copies_than_other_machines_are_one_warning_and_a_lower_claim(tmp_path):
    def body(rank: int, world: int) -> tuple:
        enter("ab"[rank])
        ck = make(tmp_path / "run", copies=2)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            for step in (1, 2):
                ck.save(step, state(world, step))
            ck.wait()
        texts = [str(each.message) for each in warned if "fewer copies" in str(each.message)]
        return ck.durability(2).survives, texts

    (claim, texts), other = run(2, body)
    assert claim == {"process", "node"} and other == (claim, [])
    assert len(texts) == 1 and "2 machines for copies=2" in texts[0]


def flip_what_is_sent() -> None:
    """Damage every large piece that this rank sends, as a fault of its memory or of the network would."""
    read = peer_exchange._PieceSender._read

    def flipped(self, piece, row):
        is_read = read(self, piece, row)
        if piece.nbytes > 100_000:
            row[piece.nbytes // 2] ^= 1
        return is_read

    peer_exchange._PieceSender._read = flipped


def test_a_copy_that_arrives_damaged_is_not_acknowledged_and_the_one_before_is_kept(tmp_path):
    root = tmp_path / "run"

    def body(rank: int, world: int) -> tuple:
        enter("ab"[rank])
        events: list = []
        ck = make(root, copies=1, on_event=events.append)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            for step in (1, 2, 3):
                ck.save(step, state(world, step))
                ck.wait()
                if (rank, step) == (0, 1):
                    flip_what_is_sent()
        texts = [str(each.message) for each in warned if "fewer copies" in str(each.message)]
        copies = [event for event in events if event.operation == "replicate"]
        assert [event.nbytes > VALUES.nbytes // 2 for event in copies] == [True] * 3
        failed = [event.step for event in copies if event.warnings]
        return [sorted(ck.durability(step).survives) for step in (1, 2, 3)], failed, len(texts)

    claims = [["node", "process"], [], ["process"]]
    assert run(2, body) == [(claims, [2, 3], 1), (claims, [2, 3], 0)]
    empty_memory("a")
    assert [each[:2] for each in run(2, resume, root, "bb", {"copies": 1})] == [(1, True)] * 2


def test_a_damaged_block_of_a_peer_is_read_from_the_next_copy(tmp_path):
    root, options = tmp_path / "run", {"copies": 1}
    assert run(3, train, root, "abc", (1, 2), options) == [["node", "process"]] * 3

    def body(rank: int, world: int) -> tuple:
        if rank == 0:
            flip_what_is_sent()
        return resume(rank, world, root, "abcd", options)[:2]

    assert run(4, body) == [(2, True)] * 4


def test_a_capture_that_ends_during_a_restore_is_complete(tmp_path):
    def body(rank: int, world: int) -> tuple:
        enter("ab"[rank])
        is_mounted, is_over = threading.Event(), threading.Event()
        finish, mount = memory_tier.MemoryTier.finish, open_peers.mount_store

        def late(*args: object) -> None:
            is_mounted.wait(20)
            finish(*args)
            is_over.set()

        @contextmanager
        def waiting(*args) -> Iterator[None]:
            with mount(*args):
                is_mounted.set()
                is_over.wait(20)
                yield

        ck = make(tmp_path / "run", save_every=2, copies=1)
        ck.save(2, state(world, 2))
        ck.wait()
        memory_tier.MemoryTier.finish, open_peers.mount_store = late, waiting
        ck.save(3, state(world, 3))
        into = state(world)
        step = make(tmp_path / "run", save_every=2, copies=1).restore(into)  # `ck` would wait for its capture
        ck.wait()
        return step, into["step"], ck.durability(3).survives

    assert run(2, body) == [(2, 2, {"process", "node"})] * 2
