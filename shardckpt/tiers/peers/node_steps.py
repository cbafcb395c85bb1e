"""Steps on several nodes: send every node a step's marks, and remove a node's old steps."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch

from shardckpt.errors import CheckpointError, MissingFileError, ShardckptError
from shardckpt.native.apply_retention import StepClock
from shardckpt.native.commit import COMMIT, Commit, decode_commit, read_commit
from shardckpt.native.run_directory import StepFolder, is_step_name, resumes_name, witness_name
from shardckpt.plan.layout.box_codec import pack_message, unpack_message
from shardckpt.plan.retention import Retention, SavedStep, steps_to_delete, with_trusted_times
from shardckpt.ranks.linked_group import LinkedGroup
from shardckpt.storage.store import Store, SubfolderStore, read_bytes

# Maximum number of nodes to which one node sends the marks: rank 0 does not send more in a larger job.
_MAX_TARGETS = 4

# The fastest zlib level: manifests repeat names and offsets, and are 2.5 to 4.5 times as large without it.
_LEVEL = 1


class MarksRoute(NamedTuple):
    """Ranks that send a step's marks to one rank, and receive them from it."""

    source: int
    targets: tuple[int, ...]


def plan_routes(is_wanted: Sequence[bool]) -> list[MarksRoute]:
    """Return each rank's route: a tree from rank 0 to all ranks that want the marks."""
    routes = [MarksRoute(0, ())] * len(is_wanted)
    order = [0, *(rank for rank, wants in enumerate(is_wanted) if wants and rank)]
    for at, rank in enumerate(order):
        first = _MAX_TARGETS * at + 1
        source = order[max(at - 1, 0) // _MAX_TARGETS]
        routes[rank] = MarksRoute(source, tuple(order[first : first + _MAX_TARGETS]))
    return routes


def give_marks(coordinator: LinkedGroup, own: Store, folder: str, *, is_first: bool) -> None:
    """Write a step's manifest and `COMMIT` into all nodes' stores. Collective."""
    # Rank 0 has committed the step on its own node. Nodes pass the marks on to others.
    inside = SubfolderStore(own, folder)
    is_wanted = is_first and coordinator.rank > 0
    packed = torch.empty(0, dtype=torch.uint8)

    def decide(messages: list[bytes]) -> list[bytes]:
        nonlocal packed
        packed = torch.frombuffer(bytearray(zlib.compress(read_marks(inside), _LEVEL)), dtype=torch.uint8)
        return [json.dumps([len(packed), *route]).encode() for route in plan_routes([*map(bool, messages)])]

    answer = coordinator.ask_rank0(f"committing {inside.url}", b"1" if is_wanted else b"", decide)
    nbytes, source, targets = json.loads(answer)
    if is_wanted:
        packed = torch.empty(nbytes, dtype=torch.uint8)
        coordinator.recv(packed, source)
    sending = [(coordinator.send(packed, target), target) for target in targets]
    result: bytes | Exception = b""
    try:
        if is_wanted:
            write_marks(inside, zlib.decompress(packed.numpy().data))
    except Exception as error:  # noqa: BLE001  (sent to every rank, then raised)
        result = error
    for work, target in sending:
        coordinator.wait(work, target)
    coordinator.ask_rank0(f"committing {inside.url} on all nodes", result, lambda messages: messages)
    if is_first:  # until every node had the new marks, the files of older saves were needed too
        with suppress(ShardckptError):  # files that stay do no harm
            remove_other_files(inside)


def read_marks(store: Store) -> bytes:
    """Return a step's manifest and `COMMIT`, for `write_marks`."""
    nbytes = store.size(COMMIT)
    data = read_bytes(store, COMMIT, 0, nbytes)
    commit = decode_commit(data, where=store.url)
    return pack_message([nbytes], data + read_bytes(store, commit.manifest, 0, commit.manifest_bytes))


def write_marks(store: Store, marks: bytes) -> None:
    """Write the manifest, then `COMMIT`."""
    (nbytes,), data = unpack_message(marks)
    for name, content in ((decode_marks(marks, store.url).manifest, data[nbytes:]), (COMMIT, data[:nbytes])):
        with store.create(name) as writer:
            writer.write(content)


def decode_marks(marks: bytes, where: str) -> Commit:
    """Return the `COMMIT` in what `read_marks` returned."""
    (nbytes,), data = unpack_message(marks)
    return decode_commit(bytes(data[:nbytes]), where=where)


def remove_other_files(store: Store) -> None:
    """Remove an older save's files: files that the step's `COMMIT` does not name."""
    for name in list_other_files(store):
        store.delete(name)


def remove_older_files(own: Store, folder: str, older: Collection[str]) -> None:
    """Remove an older save's files, unless the step's `COMMIT` is of yet another save with them."""
    inside = SubfolderStore(own, folder)
    with suppress(CheckpointError, MissingFileError):
        for name in list_other_files(inside):
            if name in older:
                inside.delete(name)


def list_other_files(store: Store) -> list[str]:
    """Return the names of files that a step's `COMMIT` does not name."""
    entries = store.list()
    commit = read_commit(store, {entry.name: entry.size for entry in entries})
    return [entry.name for entry in entries if entry.name not in {*commit.files, commit.manifest, COMMIT}]


def read_commits(own: Store) -> dict[str, Commit]:
    """Return each step's valid `COMMIT` in a store, by folder name. Raises StorageError."""
    found = {}
    for entry in own.list():
        if entry.is_folder and is_step_name(entry.name):
            inside = SubfolderStore(own, entry.name)
            with suppress(CheckpointError, MissingFileError):
                found[entry.name] = read_commit(inside, {each.name: each.size for each in inside.list()})
    return found


def remove_old_steps(
    own: Store,
    rules: Retention,
    protected: Collection[str],
    damaged: Collection[str],  # ids of saves that a load found damaged, or that lack a part
    *,
    is_idle: bool,
    on_removal: Callable[[Sequence[str]], object],  # called before, with the names of the folders
    clock: StepClock,
) -> None:
    """Remove a node's steps that no rule keeps."""
    commits = read_commits(own)
    kept = {*protected, *choose_kept(commits, rules, damaged, clock)}
    names = [entry.name for entry in own.list() if is_step_name(entry.name)]
    removed = [name for name in names if name not in kept and (is_idle or name in commits)]
    on_removal(removed)
    for name in removed:
        own.delete(f"{name}/{COMMIT}")
        own.delete_folder(name)
        for beside in (witness_name(name), resumes_name(name)):
            own.delete(beside)


def choose_kept(
    commits: Mapping[str, Commit], rules: Retention, damaged: Collection[str], clock: StepClock
) -> list[str]:
    """Return the folders of steps that rules keep."""
    good = {name: commit for name, commit in commits.items() if commit.save not in damaged}
    numbers = {name: number for name, (_, number) in find_orders(good).items()}
    steps = [
        SavedStep(
            numbers[name],
            saved_at=clock.find_saved_at(StepFolder(numbers[name], name, commit.save)),
            branch=commit.branch,
        )
        for name, commit in good.items()
    ]
    now = clock.read()
    deleted = steps_to_delete(with_trusted_times(steps, now), rules, now=now)
    return [name for name in good if numbers[name] not in deleted]


def find_orders(commits: Mapping[str, Commit]) -> dict[str, tuple[int, int]]:
    """Return each step's order by folder name: its branch and number."""
    return {name: (commit.branch, int(name.partition("-")[2])) for name, commit in commits.items()}
