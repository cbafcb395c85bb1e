"""Faults that are put into the protocol are found within the histories that `make test` runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from shardckpt.checkpoint.load import source
from shardckpt.checkpoint.run import step_restore
from shardckpt.checkpoint.run.lineage import Lineage
from shardckpt.checkpoint.run.step_saver import BaseFinder
from shardckpt.checkpoint.save import session
from shardckpt.errors import StorageError
from shardckpt.native import apply_retention, run_directory
from shardckpt.native.run_directory import step_name
from shardckpt.native.step_copies import PROCESS, StepCopy
from shardckpt.ranks.linked_group import LinkedGroup
from shardckpt.storage import local
from shardckpt.storage.local_publication import LocalPublication
from shardckpt.storage.publish import JoinedPublication
from shardckpt.storage.remote_publication import BufferedWriter, RemoteFolder
from shardckpt.tiers import memory_tier, tiered_finder
from shardckpt.tiers.capture_tier import TierPlace
from shardckpt.tiers.memory import janitor
from shardckpt.tiers.peers import copy_step
from shardckpt.tiers.peers.node_files import NodeCatalog, NodeReport
from shardckpt.tiers.promoter import Promoter
from shardckpt.tiers.tiered_finder import OwnSaves
from tests.simulation import run_history
from tests.simulation.scheduler import HistoryError
from tests.simulation.test_histories import FEW

HISTORIES = 150


def without_fsync(patch: pytest.MonkeyPatch) -> None:
    """`COMMIT` and payload get their names before their bytes are safe."""
    close = local.LocalWriter.close

    def unsynced(self) -> None:
        system = local.os
        local.os = _Without(system, "fsync")
        try:
            close(self)
        finally:
            local.os = system

    patch.setattr(local.LocalWriter, "close", unsynced)


class _Without:
    def __init__(self, real: Any, name: str) -> None:
        self._real, self._name = real, name

    def __getattr__(self, name: str) -> Any:
        return (lambda *_: None) if name == self._name else getattr(self._real, name)


def pruning_deletes_bases(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(run_directory.RunDirectory, "referred", lambda self, but=(): {})


def ranks_are_answered_before_the_commit(patch: pytest.MonkeyPatch) -> None:
    ask = LinkedGroup.ask_rank0

    def early(self, step: str, message: Any, decide: Any) -> bytes:
        if self.rank or not step.startswith("saving to") or isinstance(message, Exception):
            return ask(self, step, message, decide)
        kept: list[list[bytes]] = []

        def answer_first(messages: list[bytes]) -> list[bytes]:
            kept.append(messages)
            return [b""] * len(messages)

        ask(self, step, message, answer_first)
        return decide(kept[0])[0]

    patch.setattr(LinkedGroup, "ask_rank0", early)


def hashes_are_not_checked(patch: pytest.MonkeyPatch) -> None:
    init = source.CheckpointSource.__init__

    def unverified(self, url: str, verify: Any = "read", *args: Any, **options: Any) -> None:
        init(self, url, False, *args, **options)

    patch.setattr(source.CheckpointSource, "__init__", unverified)


def a_lost_answer_is_a_failure(patch: pytest.MonkeyPatch) -> None:
    """After the answer to the request that creates `COMMIT` is lost, the files are removed, but not `COMMIT`."""
    patch.setattr(BufferedWriter, "is_written", lambda self: False)


def commit_comes_first(patch: pytest.MonkeyPatch) -> None:
    """On a store without rename `COMMIT` is visible when it is closed, before the manifest of an overwritten step."""
    patch.setattr(session, "require_files", lambda *_: None)
    write_file = session._write_file
    waiting: list[tuple[Any, str, bytes]] = []

    def reordered(publication: Any, name: str, data: bytes) -> None:
        if name.endswith(".manifest.json"):
            waiting.append((publication, name, data))
            return
        write_file(publication, name, data)

    commit = {kind: kind.commit for kind in (LocalPublication, RemoteFolder)}

    def late(self) -> None:
        commit[type(self)](self)
        while waiting:
            write_file(*waiting.pop())

    patch.setattr(session, "_write_file", reordered)
    for kind in commit:
        patch.setattr(kind, "commit", late)


def the_newest_step_may_go(patch: pytest.MonkeyPatch) -> None:
    """Retention counts the steps that it removes among those that it keeps."""
    choose = apply_retention.steps_to_delete

    def one_more(steps: Sequence[Any], rules: Any, **options: Any) -> Collection[int]:
        complete = [step.number for step in steps if step.is_complete]
        return [*choose(steps, rules, **options), *complete[1:-1]]

    patch.setattr(apply_retention, "steps_to_delete", one_more)


def rank_0_alone_gives_the_verdict(patch: pytest.MonkeyPatch) -> None:
    """Damage that only another rank reads is not heard of."""

    def decide_alone(coordinator: LinkedGroup, path: str, error: Exception) -> str:
        message: bytes | Exception = str(error).encode() if isinstance(error, step_restore._DAMAGE) else b""

        def decide(messages: list[bytes]) -> list[bytes]:
            if not messages[0]:
                raise error
            return [messages[0]] * len(messages)

        return coordinator.ask_rank0(f"loading {path}", message, decide).decode()

    patch.setattr(step_restore, "_agree_on_damage", decide_alone)


def each_rank_decides_alone(patch: pytest.MonkeyPatch) -> None:
    def decide_alone(coordinator: LinkedGroup, path: str, error: Exception) -> str:
        if isinstance(error, step_restore._DAMAGE):
            return str(error)
        raise error

    patch.setattr(step_restore, "_agree_on_damage", decide_alone)


def a_read_error_is_damage(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(step_restore, "_DAMAGE", (*step_restore._DAMAGE, StorageError))


def a_rank_removes_its_files(patch: pytest.MonkeyPatch) -> None:
    """A rank that gives up removes its files, although rank 0 may have committed them."""
    create, rollback = JoinedPublication.create, JoinedPublication.rollback
    written: dict[JoinedPublication, list[str]] = {}

    def note(self, name: str) -> Any:
        written.setdefault(self, []).append(name)
        return create(self, name)

    def remove(self) -> None:
        rollback(self)
        for name in written.pop(self, []):
            with suppress(StorageError):
                self._store.delete(name)

    patch.setattr(JoinedPublication, "create", note)
    patch.setattr(JoinedPublication, "rollback", remove)


def captures_are_claimed_before_they_are_complete(patch: pytest.MonkeyPatch) -> None:
    def claim_all(place: TierPlace, catalog: NodeCatalog, number: int) -> list[StepCopy]:
        path, save = place.finder.path(step_name(number)), catalog.saves.get(step_name(number))
        return [StepCopy(place.name, path, (PROCESS,), None, save=save)] if save and place.is_found_again() else []

    patch.setattr(tiered_finder, "list_node_copies", claim_all)
    steps_of_other_jobs_are_claimed(patch)


def steps_of_other_jobs_are_claimed(patch: pytest.MonkeyPatch) -> None:
    """Every complete copy of a number counts, whoever has saved it."""
    patch.setattr(OwnSaves, "find", lambda *_: None)


def restored_steps_are_claimed_with_other_attempts(patch: pytest.MonkeyPatch) -> None:
    """After a restore every complete copy of that number counts, as if nobody knew which of them was loaded."""
    patch.setattr(OwnSaves, "record_restore", lambda *_: None)
    patch.setattr(tiered_finder, "find_earlier_saves", lambda _: set())


def emptied_roots_are_not_recorded(patch: pytest.MonkeyPatch) -> None:
    """The run goes on, and claims captures, but the next start knows nothing of that."""
    patch.setattr(Lineage, "follow", lambda *_: None)
    patch.setattr(Lineage, "select_found_again", lambda _, captures, root: captures)


def starts_share_an_epoch(patch: pytest.MonkeyPatch) -> None:
    """A start's steps are not newer than an earlier one's that it has not seen."""
    open_epoch = Lineage.open_epoch

    def open_and_forget(self: Lineage, least: int, *, is_for_root: bool) -> int:
        open_epoch(self, least, is_for_root=is_for_root)
        return least

    patch.setattr(Lineage, "open_epoch", open_and_forget)


def captures_go_with_their_trainers(patch: pytest.MonkeyPatch) -> None:
    """The janitor waits for no idle time once no process uses the captures."""
    look = janitor.look_at
    patch.setattr(janitor, "look_at", lambda folder, seen, _most_s: look(folder, seen, 0.0))


def the_janitor_ignores_locks(patch: pytest.MonkeyPatch) -> None:
    """It takes the time of the last capture for that of the last use."""
    patch.setattr(janitor, "lock_unused", lambda fd: True)


def a_new_start_removes_all_captures(patch: pytest.MonkeyPatch) -> None:
    """A process that uses the folder alone takes what others have committed for unfinished."""

    def remove_all(folder: str) -> None:
        for name in memory_tier.os.listdir(folder):
            if name.startswith("step-"):
                memory_tier.remove(f"{folder}/{name}")

    patch.setattr(memory_tier, "_remove_unfinished", remove_all)


def copies_are_claimed_before_they_are_made(patch: pytest.MonkeyPatch) -> None:
    """All machines of the ranks count, whatever files they have."""
    patch.setattr(NodeCatalog, "count_machines", lambda self, folder: len({each.machine for each in self.nodes}))


def partners_are_on_the_own_machine(patch: pytest.MonkeyPatch) -> None:
    """Nodes of one machine count as two."""
    decode = NodeReport.decode.__func__

    def split(cls, data: bytes) -> NodeReport:
        report = decode(cls, data)
        return replace(report, node=report.node._replace(machine=report.node.name))

    patch.setattr(NodeReport, "decode", classmethod(split))


def copies_are_acknowledged_before_the_hash(patch: pytest.MonkeyPatch) -> None:
    """A copy is what came, and not compared: here one of its bits is another."""
    patch.setattr(copy_step, "VerifiedStore", _DamagingStore)


def captures_go_before_they_are_promoted(patch: pytest.MonkeyPatch) -> None:
    """The rules of a tier do not know which captures are still being copied to the next one."""
    patch.setattr(Promoter, "list_promoted", lambda self, tier: frozenset())


def bases_are_not_read(patch: pytest.MonkeyPatch) -> None:
    """After a restore from memory, saves refer to a step of the root that nobody has read."""
    patch.setattr(BaseFinder, "record_restore", lambda *_: None)


def failed_restores_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Lineage, "record_restore", lambda *_: None)


def overwritten_files_go_first(patch: pytest.MonkeyPatch) -> None:
    """On a store without rename an overwritten step is removed before the new one is complete."""
    flip = RemoteFolder._flip

    def remove_first(self, last: Any) -> None:
        for name in self._old:
            self._store.delete(name)
        flip(self, last)

    patch.setattr(RemoteFolder, "_flip", remove_first)


class _DamagingStore:
    def __init__(self, store: Any, hashed: Any) -> None:
        self._store = store

    def read(self, reads: Sequence[Any]) -> None:
        self._store.read(reads)
        reads[0].buffer[0] ^= 1


MUTANTS: dict[Callable[[pytest.MonkeyPatch], None], int] = {
    without_fsync: 165,
    pruning_deletes_bases: 0,
    ranks_are_answered_before_the_commit: 0,
    hashes_are_not_checked: 63,
    a_lost_answer_is_a_failure: 660,
    commit_comes_first: 0,
    the_newest_step_may_go: 1,
    rank_0_alone_gives_the_verdict: 897,
    each_rank_decides_alone: 379,
    a_read_error_is_damage: 76,
    a_rank_removes_its_files: 257,
    captures_are_claimed_before_they_are_complete: 181,
    starts_share_an_epoch: 19,
    captures_go_with_their_trainers: 22,
    the_janitor_ignores_locks: 22,
    a_new_start_removes_all_captures: 10,
    copies_are_claimed_before_they_are_made: 12,
    partners_are_on_the_own_machine: 195,
    copies_are_acknowledged_before_the_hash: 2,
    captures_go_before_they_are_promoted: 18,
    bases_are_not_read: 751,
    failed_restores_are_not_counted: 6,
    overwritten_files_go_first: 9,
    steps_of_other_jobs_are_claimed: 418,
    emptied_roots_are_not_recorded: 317,
    restored_steps_are_claimed_with_other_attempts: 125,
}
"""Mutants, and a seed that finds each: the first 150 follow if the code changes and it does not any more."""


def test_each_mutant_is_found_by_a_seed_that_make_test_runs() -> None:
    assert max(MUTANTS.values()) < FEW


@pytest.mark.shown_by("simulation/test_histories.py::test_all_invariants_hold_in_every_history")
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_mutant_is_found(mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    first = MUTANTS[mutant]
    mutant(monkeypatch)
    seeds = (first, *range(HISTORIES))
    failures = (run_history(seed).failure for seed in seeds)
    found = next((failure for failure in failures if failure is not None), None)
    assert isinstance(found, HistoryError), "an invariant finds it, not a call that does not fit the code any more"
