"""A flipped bit of any file is found: by `verify` wherever it is, by a load in the blocks that it reads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import shardckpt
from shardckpt.errors import ShardckptError
from shardckpt.native.payload import BLOCK_BYTES
from shardckpt.offline.verify import verify
from tests.kit.ranks.harness import run

PADDING_STRIDE = 100
INDEX = "model.safetensors.index.json"


def offsets(name: str, data: bytes) -> Iterator[int]:
    """Every byte of a file; of the spaces that fill a header every so many."""
    for at, byte in enumerate(data):
        if byte != 0x20 or not name.endswith(".safetensors") or at % PADDING_STRIDE == 0:
            yield at


@pytest.fixture
def small(tmp_path: Path) -> Path:
    shardckpt.save({"model": torch.nn.Linear(3, 2), "n": [1, "two"]}, tmp_path / "c")
    return tmp_path / "c"


def test_every_byte_of_a_small_checkpoint(small: Path) -> None:
    flips = 0
    assert {name.partition(".")[2] for name in os.listdir(small)} == {"safetensors", "manifest.json", INDEX[6:], ""}
    for name in sorted(os.listdir(small)):
        whole = (small / name).read_bytes()
        for at in offsets(name, whole):
            changed = bytearray(whole)
            changed[at] ^= 1 << at % 8
            (small / name).write_bytes(changed)
            flips += 1
            if name == INDEX:  # which is for others, and no load of ours reads it
                assert flips % 9 or shardckpt.load(small)
            else:
                with pytest.raises(ShardckptError) as caught:
                    shardckpt.load(small)
                assert name in str(caught.value), (at, str(caught.value))
            if flips % 4 == 0 or name == INDEX:  # tests of verify flip all
                found = verify(str(small))
                assert not found.ok, f"byte {at} of {name}"
                assert name in found.problems[0].message
        (small / name).write_bytes(whole)
    assert verify(str(small)).ok
    print(f"{flips} bytes flipped, all found")


def test_a_sample_of_every_block_of_every_file_of_a_larger_one(tmp_path: Path) -> None:
    rows, columns = 140, 2048  # 1.1 MB in two files of five blocks each

    def body(rank: int, world: int) -> None:
        values = torch.arange(rows * columns, dtype=torch.float32).view(rows, columns)
        sharded = distribute_tensor(values, init_device_mesh("cpu", (world,)), [Shard(0)])
        shardckpt.save({"w": sharded, "b": torch.ones(5)}, tmp_path / "c")

    run(2, body)
    found = 0
    for file in sorted((tmp_path / "c").iterdir()):
        size = file.stat().st_size
        for block in range(-(-size // BLOCK_BYTES)):
            for at in {block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, size) - 1}:
                flip(file, at)
                report = verify(str(tmp_path / "c"))
                assert not report.ok, f"byte {at} of {file.name}"
                assert file.name in report.problems[0].message
                if file.suffix == ".safetensors":
                    assert f"block {block}," in report.problems[0].message
                for way in ("read", "full"):
                    with pytest.raises(ShardckptError, match=file.name.replace(".", r"\.")):
                        shardckpt.load(tmp_path / "c", verify=way)
                flip(file, at)
                found += 1
    assert verify(str(tmp_path / "c")).ok
    print(f"{found} bytes flipped, all found")
    assert found >= 24


def test_a_part_is_read_where_other_blocks_are_damaged_and_refused_where_its_own_are(tmp_path: Path) -> None:
    shardckpt.save({"w": torch.arange(3 * BLOCK_BYTES // 4, dtype=torch.int32)}, tmp_path / "c")
    (file,) = (tmp_path / "c").glob("*.safetensors")
    flip(file, 2 * BLOCK_BYTES + 5)
    saved = shardckpt.open(tmp_path / "c")["w"]
    assert saved[:100].tolist() == list(range(100))
    near = (2 * BLOCK_BYTES - file.stat().st_size % BLOCK_BYTES) // 4
    with pytest.raises(shardckpt.errors.ChecksumError, match="block 2"):
        saved[near + 2000 : near + 300_000]


def flip(file: Path, at: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(at)
        (byte,) = opened.read(1)
        opened.seek(at)
        opened.write(bytes([byte ^ 16]))
