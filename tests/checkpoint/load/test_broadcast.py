"""Replicas read every byte once: counted at the file system, right whatever fails, and off where it is not worth it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import shardckpt
from shardckpt.checkpoint.load import load as loading
from shardckpt.checkpoint.load import tensor_loader
from shardckpt.plan.layout import read_sharing
from shardckpt.ranks.linked_group import LinkedGroup
from shardckpt.ranks.process_group import link_group
from shardckpt.storage.fsspec_store import FsspecStore
from tests.kit.ranks.harness import outcomes, raised_everywhere, run
from tests.kit.ranks.message_ends import ENDS, SIDES, VICTIMS, end_in_message, find_named_ranks, survive

SEGMENT = 4 << 20
ROWS = 16


class CountedFiles(LocalFileSystem):
    """Files of this machine as if they lay elsewhere; every byte that is read of payloads is counted."""

    protocol = "counted"
    cachable = False
    nbytes = 0
    requests = 0

    @classmethod
    def _strip_protocol(cls, path):
        return LocalFileSystem._strip_protocol(path.removeprefix("counted://"))

    def cat_file(self, path, start=None, end=None, **kwargs):
        data = super().cat_file(path, start, end, **kwargs)
        if path.endswith(".safetensors"):
            type(self).nbytes += len(data)
            type(self).requests += 1
        return data


@pytest.fixture(scope="module", autouse=True)
def counted():
    fsspec.register_implementation("counted", CountedFiles, clobber=True)


@pytest.fixture(autouse=True)
def short_segments(monkeypatch):
    monkeypatch.setattr(read_sharing, "SEGMENT_BYTES", SEGMENT)


def values() -> dict[str, torch.Tensor]:
    made = {f"large.{n}": torch.arange(n, n + 2_400_000, dtype=torch.float32).view(ROWS, -1) for n in range(3)}
    made.update({f"small.{n}": torch.full((ROWS, 3), float(n)) for n in range(20)})
    made["one"] = torch.tensor(7.5)
    return made


@pytest.fixture(scope="module")
def step(tmp_path_factory) -> Path:
    """A checkpoint of about 29 MB in one file."""
    shardckpt.save({"model": values(), "step": 3}, tmp_path_factory.mktemp("step") / "c")
    return tmp_path_factory.getbasetemp() / next(tmp_path_factory.getbasetemp().glob("step*/c"))


def payload_bytes(step: Path) -> int:
    return sum(path.stat().st_size for path in step.glob("*.safetensors"))


def data_bytes(step: Path) -> int:
    """Return the bytes of the payload without the header: that of a large file is a block, which no rank needs."""
    (path,) = step.glob("*.safetensors")
    with path.open("rb") as file:
        return path.stat().st_size - 8 - int.from_bytes(file.read(8), "little")


def load_and_count(state, step: Path, **how) -> int:
    CountedFiles.nbytes = CountedFiles.requests = 0
    shardckpt.load(state, f"counted://{step}", **how)
    return CountedFiles.nbytes


def is_as_saved(state) -> bool:
    saved = values()
    return all(
        torch.equal(getattr(t, "full_tensor", lambda t=t: t)(), saved[name]) for name, t in state["model"].items()
    )


def empty() -> dict:
    return {"model": {name: torch.full_like(value, -1.0) for name, value in values().items()}, "step": 0}


@pytest.mark.parametrize("verify", [False, "read"])
def test_replicas_together_read_the_checkpoint_once_each_its_share(step: Path, verify) -> None:
    def body(rank: int, world: int):
        state = empty()
        read = load_and_count(state, step, verify=verify)
        return read, is_as_saved(state), state["step"]

    found = run(3, body)
    assert all(right and told == 3 for _, right, told in found)
    assert sum(read for read, _, _ in found) == payload_bytes(step)
    assert max(read for read, _, _ in found) <= payload_bytes(step) / 3 + SEGMENT


def test_each_reads_for_itself_where_that_is_asked_for(step: Path) -> None:
    def body(rank: int, world: int):
        state = empty()
        return load_and_count(state, step, broadcast_reads=False), is_as_saved(state)

    assert run(2, body) == [(data_bytes(step), True)] * 2


@pytest.mark.parametrize(("broadcast_reads", "sends"), [(None, False), (True, True), (False, False)])
def test_a_folder_is_read_by_each_unless_it_is_said_to_be_remote(step: Path, broadcast_reads, sends: bool) -> None:
    def body(rank: int, world: int):
        posted = []
        post = LinkedGroup.send
        LinkedGroup.send = lambda self, row, to: posted.append(row.numel()) or post(self, row, to)
        state = empty()
        shardckpt.load(state, step, broadcast_reads=broadcast_reads)
        return max(posted, default=0) == SEGMENT, is_as_saved(state)

    assert run(2, body) == [(sends, True)] * 2


def test_one_rank_alone_sends_nothing(step: Path) -> None:
    state = empty()
    assert load_and_count(state, step, broadcast_reads=True) == data_bytes(step)
    assert is_as_saved(state)


def test_thousands_of_small_tensors_are_a_few_requests(tmp_path: Path) -> None:
    saved = {f"t{n}": torch.full((16, 16), float(n)) for n in range(3000)}
    shardckpt.save({"model": saved}, tmp_path / "c")

    def body(rank: int, world: int):
        state = {"model": {name: torch.zeros(16, 16) for name in saved}}
        load_and_count(state, tmp_path / "c")
        return CountedFiles.requests, all(torch.equal(t, saved[name]) for name, t in state["model"].items())

    assert run(1, body) == [(1, True)]
    assert sorted(run(2, body)) == [(0, True), (1, True)]


class TestShards:
    def sharded(self, mesh, placements) -> dict:
        made = {
            name: distribute_tensor(torch.full_like(v, -1.0), mesh, placements)
            for name, v in values().items()
            if v.dim()
        }
        return {"model": {**made, "one": torch.tensor(0.0)}, "step": 0}

    def save_sharded(self, path: Path, world: int) -> None:
        def body(rank: int, world: int) -> None:
            mesh = init_device_mesh("cpu", (world,))
            made = {n: distribute_tensor(v, mesh, [Shard(0)]) for n, v in values().items() if v.dim()}
            shardckpt.save({"model": {**made, "one": torch.tensor(7.5)}, "step": 3}, path)

        run(world, body)

    def test_of_replicated_groups_every_byte_is_read_once(self, tmp_path: Path) -> None:
        self.save_sharded(tmp_path / "c", 2)

        def body(rank: int, world: int):
            state = self.sharded(init_device_mesh("cpu", (2, 2)), [Replicate(), Shard(0)])
            read = load_and_count(state, tmp_path / "c")
            return read, is_as_saved(state)

        found = run(4, body)
        assert all(right for _, right in found)
        assert sum(read for read, _ in found) == payload_bytes(tmp_path / "c")

    def test_shards_that_are_nobody_elses_are_read_by_their_rank_alone(self, tmp_path: Path) -> None:
        self.save_sharded(tmp_path / "c", 2)

        def body(rank: int, world: int):
            state = self.sharded(init_device_mesh("cpu", (2,)), [Shard(0)])
            read = load_and_count(state, tmp_path / "c", verify=False)
            return read, is_as_saved(state)

        found = run(2, body)
        assert all(right for _, right in found)
        assert sum(read for read, _ in found) < 1.2 * payload_bytes(tmp_path / "c")

    def test_what_is_converted_or_lies_otherwise_is_read_once_too(self, step: Path, monkeypatch) -> None:
        monkeypatch.setattr(tensor_loader, "BATCH_BYTES", 5 << 20)  # so that it comes in parts

        def body(rank: int, world: int):
            state = {"model": {n: torch.zeros(v.shape, dtype=torch.float64) for n, v in values().items()}, "step": 0}
            state["model"]["large.1"] = torch.zeros(150_000, ROWS).t()
            read = load_and_count(state, step, cast=True)
            expected = values()
            return read, all(torch.equal(t.float(), expected[n]) for n, t in state["model"].items())

        found = run(2, body)
        assert all(right for _, right in found)
        assert sum(read for read, _ in found) == payload_bytes(step)

    def test_columns_that_are_put_together_are_read_by_each(self, tmp_path: Path) -> None:
        def save(rank: int, world: int) -> None:
            mesh = init_device_mesh("cpu", (world,))
            made = {n: distribute_tensor(v, mesh, [Shard(1)]) for n, v in values().items() if v.dim()}
            shardckpt.save({"model": {**made, "one": torch.tensor(7.5)}, "step": 3}, tmp_path / "c")

        def body(rank: int, world: int):
            state = empty()
            load_and_count(state, tmp_path / "c")
            return is_as_saved(state)

        run(2, save)
        assert run(2, body) == [True] * 2

    def test_every_rank_may_want_something_else(self, step: Path) -> None:
        def body(rank: int, world: int):
            saved = values()
            names = [[*saved], ["large.0", "one"], ["large.1", "large.2"]][rank]
            state = {"model": {name: torch.full_like(saved[name], -1.0) for name in names}}
            shardckpt.load(state, f"counted://{step}", ignore_extra=True)
            return is_as_saved(state)

        assert run(3, body) == [True] * 3


class TestFailures:
    def damaged(self, step: Path, folder: Path) -> Path:
        (folder / "c").mkdir()
        for path in step.iterdir():
            (folder / "c" / path.name).write_bytes(path.read_bytes())
        [payload] = (folder / "c").glob("*.safetensors")
        with payload.open("r+b") as file:
            file.seek(SEGMENT + 999)
            file.write(b"\xff\x00\xff")
        return folder / "c"

    def test_a_damaged_block_is_told_to_all_by_the_one_that_read_it(self, step: Path, tmp_path: Path) -> None:
        path = self.damaged(step, tmp_path)
        raised = raised_everywhere(3, lambda rank, world: shardckpt.load(empty(), f"counted://{path}"))
        assert [each.name for each in raised] == ["RankError", "ChecksumError", "RankError"]
        assert all("block 32," in each.message for each in raised)
        assert all("rank 1" in raised[rank].message for rank in (0, 2))

    def test_full_verification_finds_it_before_anything_is_changed(self, step: Path, tmp_path: Path) -> None:
        path = self.damaged(step, tmp_path)

        def body(rank: int, world: int):
            state = empty()
            with pytest.raises((shardckpt.errors.RankError, shardckpt.errors.ChecksumError)) as caught:
                shardckpt.load(state, f"counted://{path}", verify="full")
            return "in part" in str(caught.value), all((t == -1.0).all() for t in state["model"].values())

        assert run(2, body) == [(False, True)] * 2

    @pytest.mark.parametrize("failing", [0, 1, 2])
    def test_a_store_that_fails_one_rank_stops_all(self, step: Path, failing: int) -> None:
        def body(rank: int, world: int):
            cat = FsspecStore._cat

            def broken(self, path, start, end):
                if rank == failing and path.endswith(".safetensors"):
                    raise PermissionError("not for you")
                return cat(self, path, start, end)

            FsspecStore._cat = broken
            shardckpt.load(empty(), f"counted://{step}")

        for rank, raised in enumerate(raised_everywhere(3, body)):
            assert "not for you" in raised.message
            assert "filled in part" in raised.message
            assert rank == failing or f"rank {failing}" in raised.message

    def test_a_rank_that_cannot_begin_keeps_nobody_waiting(self, step: Path) -> None:
        def body(rank: int, world: int):
            whole = loading.CheckpointSource.read_tree

            def broken(self, nest):
                if rank == 1:
                    raise ZeroDivisionError("before it began")
                return whole(self, nest)

            loading.CheckpointSource.read_tree = broken
            shardckpt.load(empty(), f"counted://{step}")

        for rank, raised in enumerate(raised_everywhere(3, body)):
            assert "before it began" in raised.message
            assert rank == 1 or "rank 1" in raised.message

    @pytest.mark.parametrize("gone", [0, 1])
    def test_a_rank_that_dies_in_the_middle_is_named(self, step: Path, gone: int) -> None:
        def body(rank: int, world: int):
            cat = FsspecStore._cat

            def dying(self, path, start, end):
                if rank == gone and path.endswith(".safetensors") and start >= 2 * SEGMENT:
                    os._exit(1)
                return cat(self, path, start, end)

            FsspecStore._cat = dying
            start = time.monotonic()
            with pytest.raises(shardckpt.errors.RankError, match=f"rank {gone}"):
                shardckpt.load(empty(), f"counted://{step}")
            return time.monotonic() - start

        found = outcomes(3, body, group_timeout=1.5, timeout=15.0)
        left = [each for each in found if each.rank != gone]
        assert all(each.value is not None and each.value < 6.0 for each in left), left

    @ENDS
    @SIDES
    @VICTIMS
    def test_a_rank_lost_in_the_middle_of_a_segment_is_named(
        self, step: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how, side: str, victim: int
    ) -> None:
        def body(rank: int, world: int) -> set[int]:
            if rank == victim:
                end_in_message(tmp_path, side, how, SEGMENT)
            return find_named_ranks(
                lambda: shardckpt.load(empty(), f"counted://{step}"),
                lambda: shardckpt.save({"step": 4}, tmp_path / "later"),
            )

        for named in survive(body, tmp_path, victim, monkeypatch):
            assert victim in named
        state = empty()
        shardckpt.load(state, step)
        assert is_as_saved(state)

    def test_a_rank_that_waited_does_not_name_itself(self) -> None:
        def body(rank: int, world: int):
            coordinator = link_group()
            coordinator.ask_rank0("begin", b"", lambda told: told)
            if rank == 2:
                time.sleep(5.0)
                os._exit(1)
            failure: shardckpt.errors.RankError | None = None
            if rank == 0:
                with pytest.raises(shardckpt.errors.RankError) as raised:
                    coordinator.wait(coordinator.send(torch.zeros(SEGMENT, dtype=torch.uint8), 2), 2)
                failure = raised.value
            with pytest.raises(shardckpt.errors.RankError) as last:
                coordinator.ask_rank0("the load", failure or b"", lambda told: told)
            return last.value.rank, last.value.what.split(" is gone")[0]

        found = outcomes(3, body, group_timeout=1.5, timeout=15.0)
        assert [each.value for each in found if each.rank != 2] == [(2, "rank 2 of 3")] * 2, found

    def test_a_rank_that_waits_for_a_waiting_rank_names_the_lost_one(self) -> None:
        def body(rank: int, world: int) -> int:
            coordinator = link_group()
            coordinator.ask_rank0("begin", b"", lambda told: told)
            if rank == 1:
                return 1  # its process stays, and sends nothing
            time.sleep(1.0 if rank == 0 else 0.0)  # so that rank 2 gives up first
            with pytest.raises(shardckpt.errors.RankError) as raised:
                coordinator.recv(torch.empty(SEGMENT, dtype=torch.uint8), 1 if rank == 0 else 0)
            return raised.value.rank

        found = outcomes(3, body, group_timeout=1.5, timeout=25.0)
        assert [each.value for each in found] == [1, 1, 1], found

    def test_a_rank_that_has_begun_the_next_round_names_the_lost_one(self) -> None:
        def body(rank: int, world: int) -> int:
            coordinator = link_group()
            coordinator.ask_rank0("begin", b"", lambda told: told)
            if rank == 1:
                os._exit(1)
            with pytest.raises(shardckpt.errors.RankError) as raised:
                if rank == 0:  # comes to no round after this
                    coordinator.recv(torch.empty(SEGMENT, dtype=torch.uint8), 1)
                else:
                    coordinator.ask_rank0("go on", b"", lambda told: told)
            return raised.value.rank

        found = outcomes(3, body, group_timeout=1.5, timeout=15.0)
        assert [each.value for each in found if each.rank != 1] == [1, 1], found

    def test_ranks_that_opened_different_checkpoints_are_told_so(self, step: Path, tmp_path: Path) -> None:
        shardckpt.save({"model": values(), "step": 4}, tmp_path / "d")

        def body(rank: int, world: int):
            state = empty()
            with pytest.raises(shardckpt.errors.RankError, match="rank 1 opened a different checkpoint than rank 0"):
                shardckpt.load(state, tmp_path / "d" if rank else step)
            return state["step"], all((t == -1.0).all() for t in state["model"].values())

        assert run(2, body) == [(0, True)] * 2
