"""`Local` on several nodes, simulated on one machine: parts in folders that are not shared, alone and under memory."""

from __future__ import annotations

import logging
import os
import platform
import re
import shutil
import warnings
from pathlib import Path

import pytest
import torch

import shardckpt
from shardckpt import Checkpointer, Local, PeerMemory
from shardckpt.errors import UsageError
from shardckpt.events import PromotionEvent, RestoreEvent, WithdrawalEvent
from shardckpt.tiers.memory.memory_store import MemoryStore
from shardckpt.tiers.peers import open_peers
from shardckpt.tiers.peers.peer_store import PeerStore
from tests.kit.ranks.harness import run
from tests.kit.runs.tier_runs import (
    BLOCKS,
    DAMAGES,
    VALUES,
    block_memory,
    damage_step,
    empty_memory,
    enter,
    is_step,
)
from tests.kit.runs.tier_runs import sharded_state as state

PART = VALUES.nbytes // 2


def make(
    root: Path, folder: Path, *, memory: dict | None = None, save_every: int = 100, on_event=None, **options: object
) -> Checkpointer:
    """A run whose local tier is in `folder`; with a memory tier in front of it, if that has options."""
    tiers = [*([] if memory is None else [PeerMemory(**memory)]), Local(folder, **options)]
    return Checkpointer(root, save_every=save_every, tiers=tiers, on_event=on_event)


def folder_of(root: Path, node: str) -> Path:
    return root.parent / f"disk-{node}" / "run"


def train(rank: int, world: int, root: Path, nodes: str, steps: tuple[int, ...], options: dict) -> tuple:
    enter(nodes[rank])
    events: list = []
    ck = make(root, folder_of(root, nodes[rank]), on_event=events.append, **options)
    for step in steps:
        ck.save(step, state(world, step))
        ck.wait()
    copies = {copy.tier: sorted(copy.survives) for copy in ck.durability(steps[-1]).copies}
    return copies, [(each.step, each.nbytes > 0) for each in events if isinstance(each, PromotionEvent)]


def resume(rank: int, world: int, root: Path, nodes: str, options: dict) -> tuple:
    """Restore; return the step if the values are its own, the bytes by tier and those from others."""
    enter(nodes[rank])
    stores: list[PeerStore] = []
    open_peers.PeerStore = lambda *args: stores.append(PeerStore(*args)) or stores[-1]
    events: list = []
    into = state(world)
    ck = make(root, folder_of(root, nodes[rank]), on_event=events.append, **options)
    step = ck.restore(into)
    assert is_step(into, step or 0)
    (event,) = [each for each in events if isinstance(each, RestoreEvent)]
    return step, dict(event.tier_bytes), sum(store.pulled_bytes for store in stores)


def size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("step-*/*.safetensors"))


def test_each_node_has_its_part_and_ranks_of_any_number_pull_what_their_node_lacks(tmp_path):
    root = tmp_path / "run"
    assert run(4, train, root, "aabb", (1, 2), {}) == [({"local": ["process"]}, [])] * 4
    for node in "ab":
        folder = folder_of(root, node)
        assert PART < size(folder) < PART + 20_000, "rules apply on each node"
        assert shardckpt.ls(folder).complete == () and (folder / "step-00000002" / "COMMIT").exists()
    for world, nodes in ((3, "abb"), (2, "ba"), (5, "aaabc")):
        assert [each[0] for each in run(world, resume, root, nodes, {})] == [2] * world
    in_place = run(4, resume, root, "aabb", {})
    assert all(pulled < BLOCKS for *_, pulled in in_place), "only the replicated values cross the network"
    assert all({*read} == {"local"} and read["local"] >= PART // 2 for _, read, _ in in_place)


def test_a_step_of_which_a_disk_is_lost_is_neither_claimed_nor_restored(tmp_path):
    root = tmp_path / "run"

    def lose(rank: int, world: int) -> tuple:
        node = "ab"[rank]
        enter(node)
        ck = make(root, folder_of(root, node), save_every=2)
        for step in (2, 3):
            ck.save(step, state(world, step))
        ck.wait()
        before = ck.durability(3).survives
        torch.distributed.barrier()
        if rank == 1:
            shutil.rmtree(folder_of(root, node))
        torch.distributed.barrier()
        return before, ck.durability(3).survives, ck.durability(2).survives

    assert run(2, lose) == [({"process"}, set(), {"process"})] * 2
    assert run(2, resume, root, "ab", {}) == [(2, {"root": PART + 20}, 0)] * 2


def test_with_a_copy_a_step_that_was_captured_here_survives_the_loss_of_a_disk(tmp_path):
    root, options = tmp_path / "run", {"copies": 1, "keep_last": 1}
    assert run(3, train, root, "abc", (1, 2), options) == [({"local": ["node", "process"]}, [])] * 3
    assert all(size(folder_of(root, node)) < 2 * PART for node in "abc"), "rules apply to copies too"
    shutil.rmtree(folder_of(root, "b"))
    for nodes in ("abc", "ac"):
        assert [each[0] for each in run(len(nodes), resume, root, nodes, options)] == [2] * len(nodes)


def test_fewer_machines_than_copies_in_folders_are_one_warning(tmp_path):
    ck = make(tmp_path / "run", tmp_path / "local", copies=1)
    with pytest.warns(UserWarning, match="get fewer copies than asked for: 1 machine for copies=1") as warned:
        for step in (1, 2):
            ck.save(step, {"w": torch.ones(3)})
        ck.wait()
    assert len(warned) == 1


def test_a_folder_has_no_more_copies_than_the_memory_whose_captures_it_gets(tmp_path):
    with pytest.raises(UsageError, match=r"`copies` of Local must not exceed .* found 1; expected at most 0"):
        make(tmp_path / "run", tmp_path / "local", memory={}, copies=1)
    make(tmp_path / "run", tmp_path / "local", memory={"copies": 1}, copies=1)


def resume_with_a_word(rank: int, world: int, root: Path, nodes: str) -> tuple:
    """Restore; return the step, the texts of warnings, and those of the event."""
    enter(nodes[rank])
    events: list = []
    ck = make(root, folder_of(root, nodes[rank]), on_event=events.append, keep_last=2)
    into = state(world)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        step = ck.restore(into)
    assert is_step(into, step or 0)
    texts = [str(each.message) for each in warned if " not used: " in str(each.message)]
    return step, texts, next(each.warnings for each in events if isinstance(each, RestoreEvent))


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_part_of_a_step_that_does_not_count_is_one_warning_that_names_its_node(tmp_path, damage):
    root = tmp_path / "run"
    run(2, train, root, "ab", (1, 2), {"keep_last": 2})
    step = folder_of(root, "b") / "step-00000002"
    damage_step(step, damage)
    first, second = run(2, resume_with_a_word, root, "ab")
    assert first[0] == second[0] == (2 if damage == "no manifest" else 1), "a manifest is on all nodes"
    assert not second[1], "rank 0 warns"
    (text,) = first[1]
    assert f"local tier on the node of rank 1, {platform.node()}: {step}" in text and re.search(DAMAGES[damage], text)
    assert len(first[2]) == 1 and not second[2]


def restore_and_listen(rank: int, world: int, root: Path, nodes: str, options: dict) -> tuple:
    """Restore; return the step, all that is printed and warned, and the warnings of events by their names."""
    enter(nodes[rank])
    records: list[logging.LogRecord] = []
    events: list = []
    listener = logging.Handler(logging.WARNING)
    listener.emit = records.append
    logging.getLogger("shardckpt").addHandler(listener)
    into, ck = state(world), make(root, folder_of(root, nodes[rank]), on_event=events.append, **options)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        step = ck.restore(into)
    assert is_step(into, step or 0)
    printed = [*get_texts(warned), *(record.getMessage() for record in records)]
    return step, printed, {each.operation: each.warnings for each in events if each.warnings}


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_a_damaged_byte_on_another_node_is_one_warning_with_node_path_and_step(tmp_path):
    root, options = tmp_path / "run", {"keep_last": 2}
    run(4, train, root, "aabb", (1, 2), options)
    step = folder_of(root, "b") / "step-00000002"
    damaged = max(step.glob("*.safetensors"))
    flip(damaged)
    found = run(4, restore_and_listen, root, "aabb", options)
    assert [step for step, *_ in found] == [1] * 4
    assert [len(printed) for _, printed, _ in found] == [1, 0, 0, 0], "one fact, one line"
    (text,) = found[0][1]
    fault = f"local tier on the node of rank 2, {platform.node()}: {damaged}: block "
    assert text.startswith(f"restored step 1 from the local tier. Newer step 2 is not used: {fault}")
    assert "read from" not in text, "there is no other copy"
    events = [told for *_, told in found]
    assert events[1:] == [{}] * 3 and {*events[0]} == {"fallback", "restore"}
    assert events[0]["fallback"] == events[0]["restore"] and len(events[0]["restore"]) == 1


def test_a_damaged_copy_of_another_node_is_told_once_with_the_copy_that_was_read(tmp_path):
    root, options = tmp_path / "run", {"memory": {"copies": 1}}
    run(2, train, root, "ab", (1,), options)
    empty_memory("a")
    empty_memory("b")
    damaged = max((folder_of(root, "b") / "step-00000001").glob("*.safetensors"))
    flip(damaged)
    (first, printed, told), second = run(2, restore_and_listen, root, "ab", options)
    assert first == second[0] == 1 and second[1:] == ([], {})
    (text,) = printed
    here, other = (f"local tier on the node of rank {rank}, {platform.node()}: " for rank in (1, 0))
    copy = folder_of(root, "a") / "step-00000001" / damaged.name
    assert text.startswith(
        f"restored step 1 from the local tier. A copy of step 1 has a fault: {here}{damaged}: bytes "
    )
    assert f"do not match their checksum; they were read from {other}{copy}" in text
    assert told == {"restore": told["restore"]} and told["restore"][0] in text


def test_a_step_of_which_a_node_is_lost_is_one_warning(tmp_path):
    root = tmp_path / "run"
    run(2, train, root, "ab", (1, 2), {"keep_last": 2})
    shutil.rmtree(folder_of(root, "b") / "step-00000002")
    (step, texts, _), _ = run(2, resume_with_a_word, root, "ab")
    assert step == 1 and len(texts) == 1 and "local tier: " in texts[0] and "missing or end early" in texts[0]


def test_each_node_promotes_its_part_and_copies_of_memory_are_copies_on_disks_too(tmp_path):
    root, options = tmp_path / "run", {"memory": {"copies": 1}, "every": 2}
    found = run(4, train, root, "aabb", (2, 3), options)
    assert [copies for copies, _ in found] == [{"memory": ["node", "process"]}] * 4
    assert [promoted for _, promoted in found] == [[(2, True)], [], [(2, True)], []], "one rank acts for its node"
    for node in "ab":
        assert size(folder_of(root, node)) > 2 * PART
        empty_memory(node)
    shutil.rmtree(folder_of(root, "b"))
    for nodes in ("aab", "bb"):
        expected = 2 if "a" in nodes else None
        assert [each[0] for each in run(len(nodes), resume, root, nodes, options)] == [expected] * len(nodes)


def test_a_step_that_no_tier_has_complete_is_restored_from_parts_of_several(tmp_path):
    root, options = tmp_path / "run", {"memory": {}, "every": 2}
    claims = {"memory": ["process"], "local": ["process"]}
    assert [copies for copies, _ in run(2, train, root, "ab", (2,), options)] == [claims] * 2
    enter("a")
    (step,) = shardckpt.ls(str(root), durability=True).durability
    assert [copy.tier for copy in step.copies if copy.is_part and not copy.survives] == ["memory", "local"]
    enter("")
    shutil.rmtree(folder_of(root, "a"))
    empty_memory("b")
    found = run(3, resume, root, "abb", options)
    assert [step for step, *_ in found] == [2] * 3
    read = [bytes_by_tier for _, bytes_by_tier, _ in found]
    assert read[0]["memory"] > PART // 2 and read[2]["local"] > PART // 2, "each from what its node has"


def damage_memory(name: str) -> None:
    """Flip a bit of whatever this process reads of a file in memory, as a fault of the memory would."""
    read = MemoryStore.read

    def read_flipped(self, reads):
        read(self, reads)
        for each in reads:
            if each.name.endswith(name) and len(each.buffer) > 1000:
                each.buffer[len(each.buffer) // 2] ^= 1

    MemoryStore.read = read_flipped


def test_a_damaged_block_is_read_from_the_next_tier_and_its_copy_loses_its_claim(tmp_path):
    root, options = tmp_path / "run", {"memory": {}}
    run(2, train, root, "aa", (1,), options)
    damaged = max(file.name for file in (folder_of(root, "a") / "step-00000001").glob("*.safetensors"))

    def body(rank: int, world: int) -> tuple:
        enter("a")
        events: list = []
        into, ck = state(world), make(root, folder_of(root, "a"), on_event=events.append, **options)
        before = [copy.tier for copy in ck.durability(1).copies]
        damage_memory(damaged)
        assert ck.restore(into) == 1 and is_step(into, 1)
        (restored,) = [each for each in events if isinstance(each, RestoreEvent)]
        after = [copy.tier for copy in ck.durability(1).copies]
        withdrawn = [each.tier for each in events if isinstance(each, WithdrawalEvent)]
        return (
            {tier for tier, nbytes in restored.tier_bytes.items() if nbytes > 1000},
            restored.warnings,
            before,
            after,
            withdrawn,
        )

    found = run(3, body)
    assert {tier for read, *_ in found for tier in read} == {"memory", "local"}
    (fault,), *others = [faults for _, faults, *_ in found]
    memory, folder = f"memory tier on the node of rank 0, {platform.node()}: ", folder_of(root, "a")
    assert fault.startswith(memory) and f"step-00000001/{damaged}: bytes " in fault and others == [(), ()]
    local = f"local tier on the node of rank 0, {platform.node()}: {folder}"
    assert f"do not match their checksum; they were read from {local}" in fault
    claims = ["memory", "local"], ["local"]
    assert [each[2:] for each in found] == [(*claims, ["memory"]), (*claims, []), (*claims, [])]


def get_texts(warned: list[warnings.WarningMessage]) -> list[str]:
    """Return the texts of warnings other than torch's own; torch 2.6 has one of meshes on the CPU."""
    return [str(each.message) for each in warned if f"{os.sep}torch{os.sep}" not in each.filename]


def test_ranks_of_one_node_with_different_folders_are_one_warning_and_no_claim(tmp_path):
    def body(rank: int, world: int) -> tuple:
        ck = make(tmp_path / "run", tmp_path / f"rank-{rank}", save_every=2)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            for step in (1, 2):
                ck.save(step, state(world, step))
            ck.wait()
        texts = ["one folder for steps; found rank 1 has" in text for text in get_texts(warned)]
        return texts, ck.durability(1).survives, ck.steps()

    assert run(2, body) == [([True], set(), (2,)), ([], set(), (2,))]


def test_a_folder_that_nodes_share_is_one_place_and_one_warning(tmp_path):
    def body(rank: int, world: int) -> tuple:
        enter("ab"[rank])
        ck = make(tmp_path / "run", tmp_path / "one-folder", memory={"copies": 1})
        ck.save(1, state(world, 1))
        ck.wait()
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            claims = [{copy.tier: sorted(copy.survives) for copy in ck.durability(1).copies} for _ in range(2)]
        return claims, ["machines share the folder of Local" in text for text in get_texts(warned)]

    claims = [{"memory": ["node", "process"], "local": ["process"]}] * 2
    assert run(2, body) == [(claims, [True]), (claims, [])]
    assert [step.number for step in shardckpt.ls(tmp_path / "one-folder").complete] == [1]


def test_a_node_with_a_read_only_folder_is_one_warning_and_captures_again_later(tmp_path):
    root = tmp_path / "run"

    def body(rank: int, world: int) -> list:
        enter("ab"[rank])
        folder = folder_of(root, "ab"[rank])
        if rank:
            folder.parent.write_text("a file in the way")
        ck = make(root, folder)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            ck.save(1, state(world, 1))
            ck.wait()
            claims = [ck.durability(1).survives]
            if rank:
                folder.parent.unlink()
            for step in (2, 3):
                ck.save(step, state(world, step))
            ck.wait()
        texts = ["rank 1" in str(each.message) for each in warned if "not captured" in str(each.message)]
        return [*claims, ck.durability(3).survives, texts]

    assert run(2, body) == [[set(), {"process"}, [True]], [set(), {"process"}, []]]


def capture_beside_blocked_memory(rank: int, world: int, root: Path) -> tuple:
    """Save steps while the second node has no memory folder; return the tiers of the last one, and the warnings."""
    enter("ab"[rank])
    ck = make(root, folder_of(root, "ab"[rank]), memory={})
    ck.save(1, state(world, 1))
    ck.wait()
    if rank:
        block_memory(root, "b")
    torch.distributed.barrier()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for step in (2, 3, 4):
            ck.save(step, state(world, step))
            ck.wait()
            torch.distributed.barrier()
    claims = [copy.tier for copy in ck.durability(4).copies]
    torch.distributed.barrier()
    return claims, get_texts(warned)


def test_while_one_node_has_no_memory_folder_all_capture_into_folders(tmp_path):
    found = run(2, capture_beside_blocked_memory, tmp_path / "run")
    assert [(claims, ["rank 1" in text for text in texts]) for claims, texts in found] == [
        (["local"], [True]),
        (["local"], []),
    ]


@pytest.mark.parametrize("names", ["ab", "a"])
def test_captures_of_a_root_that_was_emptied_are_not_restored_from_any_node(tmp_path, names):
    root = tmp_path / "run"
    run(2, train, root, "ab", (2, 3), {"save_every": 2, "memory": {}, "every": 3})
    root.rename(tmp_path / "moved")
    nodes = names * 2 if len(names) == 1 else names
    assert [each[0] for each in run(2, resume, root, nodes, {"memory": {}})] == [None, None]
