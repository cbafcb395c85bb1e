"""Faults that were reproduced in other libraries (A1 to A18, N1 to N7 of the reference): here they are right.

A5 to A9, A14 to A16 and A18 are about merging and reading: see tests/offline and tests/readers; N5 is about
saves that go on in the background.
"""

from __future__ import annotations

import errno
import os
import pickletools
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import shardckpt
from shardckpt.errors import ChecksumError, NoSpaceError, TargetExistsError
from shardckpt.offline.verify import verify
from shardckpt.storage.local import LocalWriter
from shardckpt.storage.orphans import sibling_path
from tests.kit.ranks.harness import raised_everywhere, run


def rows(values: torch.Tensor) -> torch.Tensor:
    return distribute_tensor(values, init_device_mesh("cpu", (torch.distributed.get_world_size(),)), [Shard(0)])


def files(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def test_a1_and_a2_a_flipped_bit_anywhere_in_the_bytes_that_are_read_is_no_value(tmp_path: Path) -> None:
    shardckpt.save({"t": torch.arange(300)}, tmp_path / "c")
    (file,) = (tmp_path / "c").glob("*.safetensors")
    whole = file.read_bytes()
    for at in range(0, len(whole), 97):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 8]) + whole[at + 1 :])
        with pytest.raises(ChecksumError):
            shardckpt.load(tmp_path / "c")
        assert not verify(str(tmp_path / "c")).ok
    file.write_bytes(whole)
    assert torch.equal(shardckpt.load(tmp_path / "c")["t"], torch.arange(300))


def test_a3_a_full_disk_is_never_a_success(tmp_path: Path, monkeypatch) -> None:
    whole, count = LocalWriter.write, [0]

    def full(self, data) -> None:
        count[0] += len(data)
        if count[0] > 100_000:
            raise NoSpaceError("no space left")
        whole(self, data)

    monkeypatch.setattr(LocalWriter, "write", full)
    with pytest.raises(OSError, match="no space"):
        shardckpt.save({f"t{n}": torch.rand(10_000) for n in range(20)}, tmp_path / "c")
    assert os.listdir(tmp_path) == []


def test_a4_a_save_over_a_checkpoint_is_asked_for_and_no_mix_of_both(tmp_path: Path) -> None:
    shardckpt.save({"t": torch.zeros(3)}, tmp_path / "c")
    before = files(tmp_path / "c")
    with pytest.raises(TargetExistsError):
        shardckpt.save({"t": torch.ones(3)}, tmp_path / "c")
    assert files(tmp_path / "c") == before
    shardckpt.save({"t": torch.ones(3)}, tmp_path / "c", overwrite=True)
    assert not set(before) & (set(files(tmp_path / "c")) - {"COMMIT", "model.safetensors.index.json"})


def test_a10_a_tied_weight_is_written_once_by_several_ranks_too(tmp_path: Path) -> None:
    def body(rank: int, world: int) -> None:
        tensor = rows(torch.rand(50_000))
        shardckpt.save({"a": tensor, "b": {"c": tensor}}, tmp_path / "c")

    run(2, body)
    assert sum(map(len, files(tmp_path / "c").values())) < 1.2 * 200_000
    found = shardckpt.load(tmp_path / "c")
    assert found["a"] is found["b"]["c"]


def test_a11_twenty_thousand_small_tensors_are_few_files_and_few_bytes(tmp_path: Path) -> None:
    state = {f"layer.{n}.scale": torch.tensor([float(n)]) for n in range(20_000)}
    shardckpt.save(state, tmp_path / "c")
    assert len(files(tmp_path / "c")) < 6
    assert sum(map(len, files(tmp_path / "c").values())) < 10_000_000
    found = shardckpt.load(tmp_path / "c")
    assert list(found) == list(state) and all(int(found[name]) == n for n, name in enumerate(state))


def test_a12_what_the_model_lacks_is_reported(tmp_path: Path) -> None:
    shardckpt.save({"model": {"w": torch.zeros(2), "old": torch.zeros(2)}}, tmp_path / "c")
    with pytest.raises(shardckpt.errors.MismatchError, match=r"unexpected: model\.old"):
        shardckpt.load({"model": {"w": torch.zeros(2)}}, tmp_path / "c")


def test_a13_nothing_is_cast_unasked(tmp_path: Path) -> None:
    shardckpt.save({"w": torch.tensor([200.6])}, tmp_path / "c")
    into = torch.tensor([7], dtype=torch.int8)
    with pytest.raises(shardckpt.errors.MismatchError, match="found float32, expected int8"):
        shardckpt.load({"w": into}, tmp_path / "c")
    assert into.tolist() == [7]


def test_a14_nothing_that_is_written_is_a_pickle(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optim = torch.optim.Adam(model.parameters())
    shardckpt.save({"model": model, "optim": optim, "rng": shardckpt.RNGState(), "n": (1, {2})}, tmp_path / "c")
    for name, data in files(tmp_path / "c").items():
        assert not zipfile.is_zipfile(tmp_path / "c" / name)
        with pytest.raises(ValueError, match=r"."):
            list(pickletools.genops(data))


@pytest.mark.parametrize("world", [1, 2])
def test_a17_a_plan_of_before_is_not_used_for_another_type_or_shape(tmp_path: Path, world: int) -> None:
    def body(rank: int, size: int) -> None:
        for number, dtype in enumerate((torch.float32, torch.bfloat16, torch.float32)):
            shardckpt.save({"t": rows(torch.arange(12 + number).to(dtype))}, tmp_path / str(number))

    run(world, body)
    for number, dtype in enumerate((torch.float32, torch.bfloat16, torch.float32)):
        found = shardckpt.load(tmp_path / str(number))["t"]
        assert torch.equal(found, torch.arange(12 + number).to(dtype)) and found.dtype == dtype


@pytest.mark.parametrize("nbytes", [1, 4095, 4097, (4 << 20) - 1, (4 << 20) + 1])
def test_n1_and_n2_any_size_is_saved_by_ranks_on_the_cpu(tmp_path: Path, nbytes: int) -> None:
    data = torch.arange(nbytes, dtype=torch.int64).to(torch.uint8)
    run(2, lambda rank, world: shardckpt.save({"t": rows(data), "u": data}, tmp_path / "c"))
    found = shardckpt.load(tmp_path / "c")
    assert torch.equal(found["t"], data) and torch.equal(found["u"], data)


@pytest.mark.parametrize(("saved", "into"), [((4,), (3,)), ((4,), (1,)), ((4,), (6,)), ((3, 3), (3, 5)), ((4,), ())])
def test_n3_a_template_of_another_shape_is_refused_and_not_filled_in_part(tmp_path: Path, saved, into) -> None:
    shardckpt.save({"t": torch.ones(saved)}, tmp_path / "c")
    template = torch.zeros(into)
    with pytest.raises(shardckpt.errors.MismatchError, match="size mismatch for t"):
        shardckpt.load({"t": template}, tmp_path / "c")
    assert not template.any()


def test_n4_values_of_single_ranks_are_not_taken_for_everyones(tmp_path: Path) -> None:
    def body(rank: int, world: int) -> None:
        shardckpt.save({"t": torch.full((3,), rank)}, tmp_path / "c")

    assert all("t" in raised.message and "differ" in raised.message for raised in raised_everywhere(4, body))
    assert os.listdir(tmp_path) == []


def test_n6_files_of_an_abandoned_save_are_not_published(tmp_path: Path) -> None:
    abandoned = Path(sibling_path(str(tmp_path / "c"), "partial"))
    for leftover in (abandoned, tmp_path / "c"):
        leftover.mkdir()
    stale = abandoned / "0mwqkzsavex3s13-00002-00.safetensors"
    stale.write_bytes(b"of four ranks")
    run(2, lambda rank, world: shardckpt.save({"t": torch.ones(3)}, tmp_path / "c"))
    assert os.listdir(tmp_path) == ["c"]
    assert not any(name.startswith("0mwqkzsavex3s13") for name in files(tmp_path / "c"))


def test_n7_no_rank_reports_success_for_what_was_not_put_in_place(tmp_path: Path) -> None:
    def body(rank: int, world: int) -> None:
        whole = os.rename

        def broken(source: str, target: str) -> None:
            if str(target).endswith("/c"):
                raise OSError(errno.EIO, "broken rename")
            whole(source, target)

        os.rename = broken
        shardckpt.save({"t": torch.ones(3)}, tmp_path / "c")

    for raised in raised_everywhere(3, body):
        assert "broken rename" in raised.message or "Input/output error" in raised.message
    assert os.listdir(tmp_path) == []
