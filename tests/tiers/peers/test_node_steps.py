"""The marks of a step reach every node, each of which passes them on to a few."""

from __future__ import annotations

import re
from functools import partial

import torch
from hypothesis import given
from hypothesis import strategies as st

import shardckpt
from shardckpt.errors import RankError, StorageError
from shardckpt.native.apply_retention import StepClock
from shardckpt.plan.retention import Retention
from shardckpt.ranks.linked_group import LinkedGroup
from shardckpt.storage.resolve_url import open_store
from shardckpt.storage.store import Store, SubfolderStore, Writer
from shardckpt.tiers.peers.node_steps import (
    give_marks,
    plan_routes,
    read_marks,
    remove_old_steps,
    remove_older_files,
)
from tests.simulation.network import SimulatedRanks
from tests.simulation.scheduler import Scheduler

FOLDER = "step-00000001"
OLD = "0mwzeuyy4tiuc2l-00001-00.safetensors"
NODES = 23
"""Nodes of which some get the marks from a node that got them from another one."""


@given(st.lists(st.booleans(), min_size=1, max_size=300))
def test_each_rank_that_wants_marks_gets_them_once_and_none_sends_them_to_five(is_wanted):
    routes = plan_routes(is_wanted)
    wanted = [rank for rank, wants in enumerate(is_wanted) if wants and rank]
    reached, last = [0], [0]
    while last:
        targets = [(rank, target) for rank in last for target in routes[rank].targets]
        assert all(routes[target].source == rank for rank, target in targets)
        last = [target for _, target in targets]
        reached += last
    assert sorted(reached) == [0, *wanted]
    assert all(len(route.targets) <= 4 for route in routes)


class FullStore(SubfolderStore):
    """A store without space."""

    def create(self, name: str) -> Writer:
        raise StorageError("no space", where=name)


def give_to_nodes(path, full: int = 0) -> tuple[list[bytes], list[str], dict[int, list[int]]]:
    """Commit a step on the first of several nodes, one of which may have no space, and give its marks to the others.

    Returns:
        Marks of each node with space, errors of the ranks, and the bytes that each rank sent at a time.
    """
    shardckpt.save({"w": torch.arange(4.0)}, str(path / "0" / FOLDER))
    for node in range(NODES):
        (path / str(node) / FOLDER).mkdir(parents=True, exist_ok=True)
        (path / str(node) / FOLDER / OLD).touch()
    stores: list[Store] = [open_store(str(path / str(node))) for node in range(NODES)]
    if full:
        stores[full] = FullStore(open_store(str(path)), str(full))
    scheduler = Scheduler(0)
    ranks = SimulatedRanks(scheduler, [scheduler.new_process(f"rank {rank}") for rank in range(NODES)], 600.0)
    errors: list[str] = []

    def give(rank: int) -> None:
        try:
            give_marks(LinkedGroup(ranks.link(rank)), stores[rank], FOLDER, is_first=True)
        except (RankError, StorageError) as error:
            errors.append(str(error))

    for rank, process in enumerate(ranks.processes):
        scheduler.spawn(process, process.name, partial(give, rank))
    scheduler.run()
    sent: dict[int, list[int]] = {}
    for event in scheduler.events:
        found = re.fullmatch(r"(\d+) -> \d+, \w+ of (\d+) B", event.subject) if event.verb == "send" else None
        if found:
            sent.setdefault(int(found[1]), []).append(int(found[2]))
    return (
        [read_marks(SubfolderStore(each, FOLDER)) for at, each in enumerate(stores) if at != full or not at],
        errors,
        sent,
    )


def test_every_node_has_the_marks_and_rank_0_sent_them_to_four_nodes_only(tmp_path):
    marks, errors, sent = give_to_nodes(tmp_path)
    assert len(marks) == NODES and len({*marks}) == 1 and not errors
    assert not [*tmp_path.glob(f"*/{FOLDER}/{OLD}")], "files of the older save go when all nodes have the marks"
    given = {rank: [nbytes for nbytes in sizes if nbytes > 200] for rank, sizes in sent.items()}
    assert len(given[0]) == 4 and sum(map(len, given.values())) == NODES - 1


def test_a_node_that_cannot_write_marks_passes_them_on_and_all_ranks_raise_its_error(tmp_path):
    marks, errors, _ = give_to_nodes(tmp_path, full=1)
    assert len(marks) == NODES - 1 and len({*marks}) == 1
    assert len(errors) == NODES and all("no space" in error for error in errors)
    assert len([*tmp_path.glob(f"*/{FOLDER}/{OLD}")]) == NODES, "a node that has the older marks alone needs the files"


def test_older_files_are_removed_by_name_and_never_those_of_the_save_that_counts(tmp_path):
    shardckpt.save({"w": torch.arange(4.0)}, str(tmp_path / FOLDER))
    kept = {file.name for file in (tmp_path / FOLDER).iterdir()}
    for name in (OLD, "0mwzeuyy4tiuc2m-00001-00.safetensors"):
        (tmp_path / FOLDER / name).touch()
    own = open_store(str(tmp_path))
    remove_older_files(own, FOLDER, [OLD, *kept])
    found = {file.name for file in (tmp_path / FOLDER).iterdir()}
    assert found == {*kept, "0mwzeuyy4tiuc2m-00001-00.safetensors"}, "another save may be writing that one"
    remove_older_files(own, "step-00000002", [OLD])  # retention has removed the step


def test_a_step_is_known_to_be_removed_before_its_commit_is_gone(tmp_path):
    """Else another node that asks for copies meanwhile would hear of a lost one."""
    for folder in (FOLDER, "step-00000002"):
        shardckpt.save({"w": torch.arange(4.0)}, str(tmp_path / folder))
    told = []

    def note(names):
        told.extend((name, (tmp_path / name / "COMMIT").exists()) for name in names)

    remove_old_steps(
        open_store(str(tmp_path)), Retention(keep_last=1), [], [], is_idle=False, on_removal=note, clock=StepClock()
    )
    assert told == [(FOLDER, True)]
    assert [folder.name for folder in tmp_path.iterdir()] == ["step-00000002"]
