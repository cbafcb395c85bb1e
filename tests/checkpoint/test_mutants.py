"""What saves must never do, done on purpose: each mutant turns a check red that is green without it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import pytest
import torch

import shardckpt
from shardckpt.errors import ShardckptError
from shardckpt.ranks.linked_group import LinkedGroup
from shardckpt.storage import retry
from shardckpt.storage.local import LocalWriter
from tests.kit.ranks.harness import RanksError, raised_everywhere
from tests.kit.stores.bucket import Bucket, commit_comes_first
from tests.kit.stores.disk import Disk, watched

# What is checked


def power_cuts(folder: Path) -> None:
    """Cut the power before every operation of a save over another one: a reader gets the old or the new."""
    here, copy = folder / "here", folder / "copy"
    here.mkdir()
    shardckpt.save({"t": torch.full((99,), 1.0)}, here / "c")
    disk = Disk(str(here))

    known: dict[frozenset[tuple[str, bytes]], list[float] | None] = {}

    def value_of(files: dict[str, bytes]) -> list[float] | None:
        place = copy / str(len(known))
        place.mkdir(parents=True)
        for name, data in files.items():
            (place / name).write_bytes(data)
        with suppress(ShardckptError):
            return shardckpt.load(place)["t"].unique().tolist()
        return None

    def look(allowed: set[float]) -> None:
        for outcome in disk.outcomes():
            files = {name.removeprefix("c/"): data for name, data in outcome.items() if name.startswith("c/")}
            key = frozenset(files.items())
            if key not in known:
                known[key] = value_of(files)
            assert known[key] in [[each] for each in allowed], f"a power cut leaves {known[key]}"

    quiet = False

    def before(name: str, args: tuple) -> None:
        nonlocal quiet
        if quiet or str(args[0]).startswith(str(copy)):
            return
        quiet = True  # what the check itself does to the disk is no operation of the save
        look({1.0, 2.0})
        quiet = False

    def after(name: str, args: tuple) -> None:
        if not quiet:
            disk.after(name, args)

    try:
        with watched(before, after):
            shardckpt.save({"t": torch.full((99,), 2.0)}, here / "c", overwrite=True)
        look({2.0})
    finally:
        disk.close()


def broken_requests(folder: Path) -> None:
    """Break every request of a save over another one to a bucket."""
    del folder
    matrix = sibling("test_kill_matrix")
    try:
        matrix.bucket_matrix("killed", {1, 2})
    finally:
        Bucket.reset()


def failing_ranks(folder: Path) -> None:
    """Let a rank fail while it looks at its state, and while it writes: every rank says which one, and why."""

    def capture(rank: int, world: int) -> None:
        shardckpt.save({"t": torch.ones(3), **({"odd": object()} if rank == 1 else {})}, folder / "a")

    def write(rank: int, world: int) -> None:
        if rank == 1:

            def broken(self: LocalWriter, data: bytes) -> None:
                raise OSError(5, "broken disk")

            LocalWriter.write = broken
        shardckpt.save({"own": shardckpt.PerRank(Own(rank)), "t": torch.ones(3)}, folder / "b")

    for body, word in ((capture, "odd"), (write, "broken disk")):
        found = raised_everywhere(2, body)
        assert word in found[0].message, found[0].message
        assert "rank 1" in found[0].message, found[0].message
    assert not any((folder / name).exists() for name in "ab")


class Own:
    """A tensor for each rank to write."""

    def __init__(self, rank: int) -> None:
        self.value = torch.full((1000,), float(rank))

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.value = state["value"]


def sibling(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# What is broken


def nothing_is_made_safe(patch: pytest.MonkeyPatch) -> None:
    """Files and folders are written and never synced."""
    patch.setattr(Disk, "hears_fsync", False)


def errors_stay_at_home(patch: pytest.MonkeyPatch) -> None:
    """A rank that fails tells nobody."""
    whole = LinkedGroup.ask_rank0

    def alone(self, what, say, decide):
        if not isinstance(say, Exception):
            return whole(self, what, say, decide)
        with suppress(ShardckptError):
            whole(self, what, b"", decide)
        raise say

    patch.setattr(LinkedGroup, "ask_rank0", alone)


Check = Callable[[Path], None]
Mutant = Callable[[pytest.MonkeyPatch], None]
CAUGHT: list[tuple[Mutant, Check]] = [
    (nothing_is_made_safe, power_cuts),
    (commit_comes_first, broken_requests),
    (errors_stay_at_home, failing_ranks),
]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "FIRST_PAUSE_S", 0.0)


@pytest.mark.parametrize("check", [check for _, check in CAUGHT], ids=lambda each: each.__name__)
def test_what_is_checked_holds(check: Check, tmp_path: Path) -> None:
    check(tmp_path)


@pytest.mark.shown_by("::test_what_is_checked_holds")
@pytest.mark.parametrize(("mutant", "check"), CAUGHT, ids=lambda each: each.__name__)
def test_a_wrong_save_is_caught(mutant: Mutant, check: Check, tmp_path: Path, monkeypatch) -> None:
    mutant(monkeypatch)
    with pytest.raises((AssertionError, ShardckptError)) as caught:
        check(tmp_path)
    assert not isinstance(caught.value, RanksError), "a finding, not a rank that fell over"
