"""A run on a disk against a model, step -> content: any sequence of calls leaves what the model has."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardckpt
from shardckpt.checkpoint.dedup import BaseHints
from shardckpt.checkpoint.load import source
from shardckpt.checkpoint.save.staging import StagingArea
from shardckpt.errors import CheckpointError, MissingFileError, NoCompleteCheckpoint, UnsupportedError
from shardckpt.native import run_directory
from shardckpt.ranks.linked_group import RankLink
from tests.kit.ranks.forks import is_killed
from tests.kit.stores.disk import killing_at

Content = tuple[int, int, int]
"""Numbers from which the values of the three parts of a state follow; saves that share one write a part once."""

SHORT = settings(
    max_examples=12,
    stateful_step_count=25,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
LONG = settings(SHORT, max_examples=200, stateful_step_count=60, derandomize=False)
QUICK = settings(SHORT, max_examples=60, phases=[Phase.generate], report_multiple_bugs=False)

contents = st.tuples(*[st.integers(0, 2)] * 3)
ROWS, COLUMNS = 13, 3


def build_state(content: Content) -> dict[str, Any]:
    """Return the state of a content, in which equal numbers give equal tensors."""
    a, b, c = content
    weight = torch.arange(float(ROWS * COLUMNS)).reshape(ROWS, COLUMNS) + 1000 * (a + 1)
    return {
        "model": {"weight": weight, "bias": torch.arange(17).bfloat16() + 100 * (b + 1), "mask": torch.ones(5) > b},
        "long": torch.full((3000,), c + 1, dtype=torch.int64),
        "scale": torch.tensor(c + 0.5),
        "content": [*content],
    }


def build_blank_state() -> dict[str, Any]:
    """Return a state to load into, with values that no content has."""
    state = build_state((0, 0, 0))
    for tensor in (*state["model"].values(), state["long"], state["scale"]):
        tensor.zero_()
    return {**state, "content": None}


def read_content(state: dict[str, Any]) -> Content:
    """Return the content of a loaded state, of which every value has to be that of the content."""
    a, b, c = state["content"]
    expected = build_state((a, b, c))
    for name, tensor in {**expected["model"], "long": expected["long"], "scale": expected["scale"]}.items():
        found = state["model"][name] if name in expected["model"] else state[name]
        assert found.dtype == tensor.dtype and torch.equal(found, tensor), f"{name} is not that of {(a, b, c)}"
    return a, b, c


class OneRank(RankLink):
    """A rank without others: what it loads depends on its own part of each tensor alone."""

    def __init__(self) -> None:
        super().__init__(0, 1, timedelta(seconds=1))

    def _refuse(self, *_: object, **__: object) -> Any:
        raise AssertionError("a single rank sends nothing")

    send_message = recv_message = start_send = start_recv = leave_note = find_note = renew = _refuse


@contextmanager
def one_of(world: int, rank: int) -> Iterator[DeviceMesh]:
    """Be a rank of a world whose others do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield DeviceMesh("cpu", list(range(world)))
    finally:
        dist.destroy_process_group()


class RunMachine(RuleBasedStateMachine):
    """A run in a folder, the job that trains in it, and the model of both."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="shardckpt-machine-"))
        self.root = self.folder / "run"
        self.model: dict[int, Content] = {}
        self.orders: dict[int, tuple[int, int]] = {}
        self.made = 0
        self.begin_job(dedup=True)

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    # The model

    def newest(self) -> int | None:
        return max(self.orders, key=lambda number: self.orders[number], default=None)

    def branch_of(self, number: int) -> int:
        """Branch that a save of this number begins or goes on."""
        newest = self.newest()
        if self.branch is None:
            return 0 if newest is None else self.orders[newest][0]
        return self.branch + (self.restored is not None and number < self.restored)

    def note_save(self, number: int, content: Content) -> None:
        self.branch = self.branch_of(number)
        self.restored = None
        self.model[number], self.orders[number] = content, (self.branch, number)

    def forget(self, number: int) -> None:
        del self.model[number], self.orders[number]

    def new_folder(self) -> Path:
        self.made += 1
        return self.folder / f"other-{self.made}"

    def pick(self, at: int) -> int:
        """A step of the model by any number."""
        return sorted(self.model)[at % len(self.model)]

    # Saves

    @rule(dedup=st.booleans())
    def begin_job(self, dedup: bool) -> None:
        """A new process: it knows nothing but the folder."""
        self.job, self.dedup = shardckpt.Checkpointer(self.root, dedup=dedup), dedup
        self.branch: int | None = None
        self.restored: int | None = None

    @rule(content=contents, gap=st.integers(1, 3))
    def save(self, content: Content, gap: int) -> None:
        number = max(self.model, default=0) + gap
        self.job.save(number, build_state(content))
        self.note_save(number, content)

    @rule(content=contents)
    def save_in_the_background(self, content: Content) -> None:
        number, state = max(self.model, default=0) + 1, build_state(content)
        handle = self.job.async_save(number, state)
        for tensor in (*state["model"].values(), state["long"]):
            tensor.fill_(1)  # as the next training step does
        handle.result()
        self.note_save(number, content)

    @precondition(lambda self: self.model)
    @rule(content=contents, at=st.integers(0, 20))
    def overwrite(self, content: Content, at: int) -> None:
        number = self.pick(at)
        with pytest.raises(shardckpt.errors.TargetExistsError):
            self.job.save(number, build_state(content))
        self.job.save(number, build_state(content), overwrite=True)
        self.note_save(number, content)

    @rule(content=contents, k=st.integers(1, 45), is_new=st.booleans(), at=st.integers(0, 20))
    def crash_while_saving(self, content: Content, k: int, is_new: bool, at: int) -> None:
        is_new = is_new or not self.model
        number = max(self.model, default=0) + 1 if is_new else self.pick(at)
        old = self.model.get(number)

        def work() -> None:
            torch.set_num_threads(1)
            with killing_at(k):
                job = shardckpt.Checkpointer(self.root, dedup=self.dedup)
                job.save(number, build_state(content), overwrite=not is_new)

        was_killed = is_killed(work)
        self.begin_job(self.dedup)
        found = read_content(shardckpt.load(self.job.path(number))) if number in self.job.steps() else None
        assert found in ({old, content} if was_killed else {content}), f"a kill at operation {k} leaves {found}"
        if found == content:
            self.note_save(number, content)
            self.begin_job(self.dedup)

    # Removals

    @precondition(lambda self: self.model)
    @rule(kept=st.integers(1, 4))
    def prune(self, kept: int) -> None:
        by_age = sorted(self.orders, key=lambda number: self.orders[number])
        pruned = shardckpt.prune(self.root, keep_last=kept)
        assert [step.number for step in pruned.removed] == by_age[:-kept]
        for number in by_age[:-kept]:
            self.forget(number)

    @precondition(lambda self: len(self.model) > 1)
    @rule(at=st.integers(0, 20))
    def prune_one(self, at: int) -> None:
        number = self.pick(at)
        if number != self.newest():
            shardckpt.prune(self.root, steps=[number])
            self.forget(number)

    @precondition(lambda self: len(self.model) > 1)
    @rule(k=st.integers(1, 12))
    def crash_while_pruning(self, k: int) -> None:
        def work() -> None:
            with killing_at(k):
                shardckpt.prune(self.root, keep_last=1)

        is_killed(work)
        left = {*self.job.steps()}
        assert self.newest() in left <= {*self.model}
        for number in {*self.model} - left:
            self.forget(number)

    # Reads

    @rule()
    def restore(self) -> None:
        state, newest = build_blank_state(), self.newest()
        assert self.job.restore(state) == newest
        if newest is not None:
            assert read_content(state) == self.model[newest]
            self.branch, self.restored = self.orders[newest][0], newest

    @precondition(lambda self: self.model)
    @rule(at=st.integers(0, 20))
    def rewind(self, at: int) -> None:
        """Go on from an older step: what is saved next is newer than all others."""
        number, state = self.pick(at), build_blank_state()
        newest = self.newest()
        assert self.job.restore(state, step=number) == number
        assert read_content(state) == self.model[number]
        assert newest is not None
        self.branch = self.orders[newest][0] + (number != newest)
        self.restored = number

    @precondition(lambda self: self.model)
    @rule(at=st.integers(0, 20), world=st.integers(2, 16), rank=st.integers(0, 15))
    def load_as_a_rank(self, at: int, world: int, rank: int) -> None:
        number, rank = self.pick(at), rank % world
        with one_of(world, rank) as mesh:
            full = build_state(self.model[number])["model"]["weight"]
            step = -(-ROWS // world)
            own = full[min(rank * step, ROWS) : min((rank + 1) * step, ROWS)]
            weight = DTensor.from_local(
                torch.zeros_like(own), mesh, [Shard(0)], run_check=False, shape=full.shape, stride=full.stride()
            )
            state = {"model": {"weight": weight}}
            shardckpt.load(
                state, self.job.path(number), include="model.weight", ignore_extra=True, process_group=OneRank()
            )
            assert torch.equal(weight.to_local(), own)

    @precondition(lambda self: self.model)
    @rule()
    def copy(self) -> None:
        target = self.new_folder()
        copied = shardckpt.copy(self.root, target)
        assert len(copied.copied) >= len(self.model)
        copies = shardckpt.Checkpointer(target)
        assert copies.steps() == self.job.steps()
        assert {n: read_content(shardckpt.load(copies.path(n))) for n in copies.steps()} == self.model
        assert not shardckpt.copy(self.root, target).copied
        shutil.rmtree(target)

    @precondition(lambda self: self.model)
    @rule(at=st.integers(0, 20), verb=st.sampled_from([shardckpt.consolidate, shardckpt.convert]))
    def write_another_format(self, at: int, verb: Any) -> None:
        number, target = self.pick(at), self.new_folder()
        verb(self.job.path(number), target)
        found = {name: tensor for file in target.glob("*.safetensors") for name, tensor in load_file(file).items()}
        expected = build_state(self.model[number])["model"]
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        shutil.rmtree(target)

    @precondition(lambda self: self.model)
    @rule(which=st.integers(0, 1000), byte=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
    def flip_a_bit(self, which: int, byte: float, bit: int) -> None:
        """A reader gets the newest step that is whole, and never other values; then the bit is flipped back."""
        files = sorted(file for file in self.root.rglob("*") if file.is_file() and file.stat().st_size)
        file = files[which % len(files)]
        good = file.read_bytes()
        damaged = bytearray(good)
        damaged[int(byte * len(good))] ^= 1 << bit
        file.write_bytes(damaged)
        whole = {number for number in self.model if self._is_whole(number)}
        try:
            state = build_blank_state()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = shardckpt.Checkpointer(self.root).restore(state)
            assert found == max(whole, key=lambda number: self.orders[number])
            assert read_content(state) == self.model[found]
        except NoCompleteCheckpoint:
            assert not whole
        except UnsupportedError:  # the bit is one of the version's
            assert file.name == "COMMIT"
        finally:
            file.write_bytes(good)

    def _is_whole(self, number: int) -> bool:
        """Load a step, which gives its content or an error; `verify` finds what a load finds."""
        path = self.job.path(number)
        try:
            content = read_content(shardckpt.load(path))
        except (CheckpointError, MissingFileError):
            return False
        assert content == self.model[number]
        return True

    @invariant()
    def the_run_has_the_steps_of_the_model(self) -> None:
        assert list(self.job.steps()) == sorted(self.orders, key=lambda number: self.orders[number])

    @invariant()
    def the_newest_step_is_that_of_the_model(self) -> None:
        newest = self.newest()
        if newest is not None:
            assert read_content(shardckpt.load(self.job.path(newest))) == self.model[newest]


def test_a_run_has_what_the_model_has() -> None:
    run_state_machine_as_test(RunMachine, settings=SHORT)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_run_has_what_the_model_has_after_many_calls() -> None:
    run_state_machine_as_test(RunMachine, settings=LONG)


def pruning_deletes_bases(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(run_directory.RunDirectory, "referred", lambda self, but=(): {})


def every_chunk_is_unchanged(patch: pytest.MonkeyPatch) -> None:
    """An incremental save refers to the base for tensors whose values have changed."""
    patch.setattr(BaseHints, "unchanged", lambda self, *_: tuple(self.digests))


def hashes_are_not_checked(patch: pytest.MonkeyPatch) -> None:
    init = source.CheckpointSource.__init__

    def unverified(self, url: str, verify: Any = "read", *args: Any, **options: Any) -> None:
        init(self, url, False, *args, **options)

    patch.setattr(source.CheckpointSource, "__init__", unverified)


def the_state_is_not_copied(patch: pytest.MonkeyPatch) -> None:
    """A background save writes what the buffers had before."""
    patch.setattr(StagingArea, "_put_bytes", lambda self, data: [None for _ in self._spans(len(data))])


MUTANTS = (pruning_deletes_bases, every_chunk_is_unchanged, hashes_are_not_checked, the_state_is_not_copied)


@pytest.mark.shown_by("::test_a_run_has_what_the_model_has")
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_mutant_is_found(mutant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    with pytest.raises((AssertionError, CheckpointError)):
        run_state_machine_as_test(RunMachine, settings=QUICK)
