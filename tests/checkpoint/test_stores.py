"""Saving, overwriting, loading and the steps of a run on every store there is: the same calls, the same bits."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import s3fs
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import shardckpt
from shardckpt import Checkpointer
from shardckpt.errors import ShardckptError, StorageError, TargetExistsError
from shardckpt.offline.verify import verify
from shardckpt.storage.fsspec_writer import FsspecWriter
from shardckpt.storage.local import LocalWriter
from shardckpt.storage.resolve_url import open_store
from shardckpt.storage.store import read_bytes
from tests.kit.ranks.harness import run
from tests.kit.stores.faulty import faulty


def state(value: float) -> dict:
    torch.manual_seed(int(value))
    return {"w": torch.rand(700, 300), "half": torch.full((33,), value, dtype=torch.bfloat16), "step": int(value)}


def names(url: str) -> set[str]:
    return {entry.name for entry in open_store(url).list()}


def assert_holds(url: str, value: float) -> None:
    found, expected = shardckpt.load(url), state(value)
    assert found["step"] == expected["step"]
    assert torch.equal(found["w"], expected["w"])
    assert torch.equal(found["half"], expected["half"])
    assert found["half"].dtype == torch.bfloat16
    assert verify(url).ok


def test_what_is_saved_comes_back_and_is_replaced_only_when_asked(place: str) -> None:
    target = f"{place}/c"
    shardckpt.save(state(1), target)
    assert_holds(target, 1)
    before = names(target)
    with pytest.raises(TargetExistsError):
        shardckpt.save(state(2), target)
    assert names(target) == before
    assert_holds(target, 1)
    shardckpt.save(state(2), target, overwrite=True)
    assert_holds(target, 2)
    assert len(names(target)) <= len(before), "files of the old checkpoint stay"
    assert shardckpt.open(target)["w"][5:6].shape == (1, 300)


def test_a_save_in_the_background_stores_what_was_there_when_it_began(place: str) -> None:
    moving = state(3)
    handle = shardckpt.async_save(moving, f"{place}/c")
    moving["w"].zero_()
    handle.result()
    assert_holds(f"{place}/c", 3)


def test_the_steps_of_a_run_are_kept_removed_and_restored(place: str) -> None:
    ck = Checkpointer(place, keep_last=2)
    assert ck.restore(state(0)) is None
    for number in (1, 2):
        ck.save(number, state(number))
    ck.async_save(3, state(3)).result()
    assert ck.steps() == (2, 3)
    assert names(place) == {"step-00000002", "step-00000003"}
    open_store(ck.path(3)).delete("COMMIT")
    into = state(0)
    with pytest.warns(UserWarning, match="restored step 2"):
        assert Checkpointer(place).restore(into) == 2
    assert torch.equal(into["w"], state(2)["w"])
    ck.save(3, state(9))
    assert_holds(ck.path(3), 9)


def test_a_flipped_byte_is_found_there_too(place: str) -> None:
    shardckpt.save(state(1), f"{place}/c")
    store = open_store(f"{place}/c")
    (payload,) = (entry for entry in store.list() if entry.name.endswith(".safetensors"))
    whole = bytearray(read_bytes(store, payload.name, 0, payload.size))
    whole[-9] ^= 4
    with store.create(payload.name) as writer:
        writer.write(whole)
    with pytest.raises(shardckpt.errors.ChecksumError, match="block 6,"):
        shardckpt.load(f"{place}/c")
    assert not verify(f"{place}/c").ok


def test_a_checkpoint_moves_from_store_to_store(place: str, tmp_path: Path, monkeypatch) -> None:
    shardckpt.save(state(4), f"{place}/c")
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)
    shardckpt.reshard(f"{place}/c", str(tmp_path / "two"), world_size=2)
    shardckpt.reshard(str(tmp_path / "two"), f"{place}/back", world_size=1)
    assert_holds(f"{place}/back", 4)
    assert os.listdir(empty) == []


def sharded(value: float) -> dict:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    whole = state(value)
    return {**whole, "w": distribute_tensor(whole["w"], mesh, [Shard(0)])}


def test_two_ranks_save_overwrite_and_restore(shared_place: str) -> None:
    def body(rank: int, world: int) -> tuple:
        shardckpt.save(sharded(1), f"{shared_place}/c")
        shardckpt.async_save(sharded(2), f"{shared_place}/c", overwrite=True).result()
        ck = Checkpointer(f"{shared_place}/steps", keep_last=1)
        for number in (5, 6):
            ck.save(number, sharded(number))
        into = sharded(0)
        return ck.restore(into), into["step"], torch.equal(into["w"].to_local(), sharded(6)["w"].to_local())

    assert run(2, body, timeout=90.0, group_timeout=60.0) == [(6, 6, True)] * 2
    assert_holds(f"{shared_place}/c", 2)
    assert len(names(f"{shared_place}/c")) == 4
    assert names(f"{shared_place}/steps") == {"step-00000006"}


def test_nothing_is_left_of_a_save_that_fails_on_one_rank(shared_place: str) -> None:
    def body(rank: int, world: int) -> str:
        for kind in (LocalWriter, FsspecWriter):
            whole = kind.close

            def broken(self, whole=whole) -> None:
                whole(self)
                raise StorageError("no route to the store")

            kind.close = broken if rank == 1 else whole
        with pytest.raises(ShardckptError) as caught:
            shardckpt.save(sharded(1), f"{shared_place}/c")
        return str(caught.value)

    told = run(2, body, timeout=90.0, group_timeout=60.0)
    assert all("no route to the store" in each for each in told)
    assert "rank 1" in told[0]
    assert names(f"{shared_place}/c") == set()


RANK = """
import sys, torch, shardckpt
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
torch.distributed.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
make = lambda value: {"w": distribute_tensor(torch.full((64, 8), value), mesh, [Shard(0)])}
ck = shardckpt.Checkpointer(sys.argv[1], keep_last=1)
for number in (1, 2):
    ck.async_save(number, make(float(number))).result()
into = make(0.0)
assert ck.restore(into) == 2 and bool((into["w"].to_local() == 2).all())
torch.distributed.destroy_process_group()
"""


def test_ranks_of_torchrun_save_and_restore_by_obstore(obstore_s3: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(RANK)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, str(tmp_path / "train.py"), f"{obstore_s3}/run"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert names(f"{obstore_s3}/run") == {"step-00000002"}


def test_requests_are_few(s3_bucket: str, s3_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers of docs/storage.md."""
    s3fs.S3FileSystem.clear_instance_cache()
    with faulty(s3_server) as front, monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", front.url)
        url, run_url = f"{s3_bucket}/c", f"{s3_bucket}/run"

        def requests(act: Callable[[], object]) -> int:
            front.heal()
            act()
            return len(front.requests)

        assert requests(lambda: shardckpt.save(state(1), url)) <= 9
        assert requests(lambda: shardckpt.save(state(2), url, overwrite=True)) <= 16
        assert requests(lambda: shardckpt.load(url)) <= 6
        assert requests(lambda: shardckpt.open(url)["w"][0]) <= 6
        ck = Checkpointer(run_url, keep_last=1)
        ck.save(1, state(1))
        assert requests(lambda: ck.save(2, state(2))) <= 30
        assert requests(lambda: ck.restore(state(0))) <= 12
    s3fs.S3FileSystem.clear_instance_cache()
