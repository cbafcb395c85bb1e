"""Copies of all steps in a run: in this machine's memory, in a local folder, and in the root."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from shardckpt.errors import CheckpointError, ShardckptError
from shardckpt.native.run_directory import read_run
from shardckpt.native.run_record import read_run_record
from shardckpt.native.step_copies import (
    LOCAL,
    MEMORY,
    PROCESS,
    ROOT,
    Durability,
    StepCopy,
    describe_copy,
    find_survived,
    read_mounts,
)
from shardckpt.storage.resolve_url import kind, open_store
from shardckpt.storage.store import Store
from shardckpt.tiers.durability.tier_folder import find_run_id, require_own_folder
from shardckpt.tiers.memory import SCHEME


def list_durability(root: str) -> tuple[Durability, ...]:
    """Return every step's copies that this machine can read, by step number."""
    copies: dict[int, list[StepCopy]] = {}
    tiers = [(MEMORY, f"{SCHEME}://{find_run_id(root)}"), (LOCAL, read_run_record(open_store(root)).local)]
    for tier, url in tiers:
        with suppress(ShardckptError):  # without a tier, without its copies
            for number, copy in list(_list_in_tier(tier, url, root)) if url else ():
                copies.setdefault(number, []).append(copy)
    for number, copy in _list_copies(open_store(root), ROOT, find_survived(root, read_mounts())):
        copies.setdefault(number, []).append(copy)
    return tuple(Durability(number, tuple(copies[number])) for number in sorted(copies))


def find_local_fault(root: str) -> str:
    """Return why the folder of `Local` cannot be read on this machine; empty without a fault."""
    folder = read_run_record(open_store(root)).local
    if not folder:
        return ""
    if kind(folder) == "missing":
        return f"{folder} is not on this machine"
    try:
        require_own_folder(open_store(folder), root)
    except ShardckptError as error:
        return str(error).rstrip(".")
    return ""


def _list_in_tier(tier: str, url: str, root: str) -> Iterator[tuple[int, StepCopy]]:
    store = open_store(url)
    if tier == LOCAL:
        require_own_folder(store, root)
    return _list_copies(store, tier, (PROCESS,), has_parts=True)


def _list_copies(
    store: Store, tier: str, survives: tuple[str, ...], *, has_parts: bool = False
) -> Iterator[tuple[int, StepCopy]]:
    """Yield all steps' copies; in a tier, also steps of which this machine has a part."""
    for step in read_run(store).steps:
        if step.is_complete or (has_parts and step.is_part):
            with suppress(CheckpointError):
                yield step.number, describe_copy(store, step, tier, () if step.is_part else survives)
