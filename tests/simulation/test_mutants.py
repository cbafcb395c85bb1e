"""Faults that are put into the protocol are found within the histories that `make test` runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest

from shardckpt.checkpoint.coordinator import Coordinator
from shardckpt.checkpoint.load import source
from shardckpt.checkpoint.save import session
from shardckpt.format.native import run_directory
from shardckpt.storage import local
from shardckpt.storage.local_publication import LocalPublication
from shardckpt.storage.remote_publication import BufferedWriter, RemoteFolder
from shardckpt.testing.simulation import run_history

HISTORIES = 200


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
    gather = Coordinator._gather_and_answer

    def early(self, step: str, message: Any, decide: Any) -> bytes:
        if not step.startswith("saving to") or isinstance(message, Exception):
            return gather(self, step, message, decide)
        kept: list[list[bytes]] = []

        def answer_first(messages: list[bytes]) -> list[bytes]:
            kept.append(messages)
            return [b""] * len(messages)

        gather(self, step, message, answer_first)
        return b"\0" + decide(kept[0])[0]

    patch.setattr(Coordinator, "_gather_and_answer", early)


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
    from shardckpt.format import apply_retention

    choose = apply_retention.steps_to_delete

    def one_more(steps: Sequence[Any], rules: Any, **options: Any) -> Collection[int]:
        complete = [step.number for step in steps if step.is_complete]
        return [*choose(steps, rules, **options), *complete[1:-1]]

    patch.setattr(apply_retention, "steps_to_delete", one_more)


MUTANTS: dict[Callable[[pytest.MonkeyPatch], None], int] = {
    without_fsync: 37,
    pruning_deletes_bases: 0,
    ranks_are_answered_before_the_commit: 0,
    hashes_are_not_checked: 168,
    a_lost_answer_is_a_failure: 5,
    commit_comes_first: 0,
    the_newest_step_may_go: 3,
}
"""Mutants, and the seed of the search for each: all others follow if the code changes and it holds no longer."""


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_mutant_is_found(mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    first = MUTANTS[mutant]
    mutant(monkeypatch)
    seeds = (*range(first, HISTORIES), *range(first))
    assert any(run_history(seed).failure is not None for seed in seeds)
