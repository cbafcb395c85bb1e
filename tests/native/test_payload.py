"""Payload files are ordinary safetensors files that describe themselves; block hashes cover every byte."""

from __future__ import annotations

import json
import random
import re
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from shardckpt.boxes import Box, full_box
from shardckpt.errors import UnsupportedError
from shardckpt.manifest import Path as TreePath
from shardckpt.native import payload as payload_module
from shardckpt.native.payload import (
    BLOCK_ALIGNED_BYTES,
    BLOCK_BYTES,
    DATA_ALIGNMENT,
    GROUP_BLOCKS,
    GROUP_BYTES,
    KEY,
    BlockHasher,
    PayloadChunk,
    PayloadFile,
    group_hashes,
    hf_index,
    new_save_id,
    plan_payloads,
)
from tests.kit.writers.native_writer import dtype_name, write_step


def chunk(path: TreePath, shape: tuple[int, ...], dtype: str = "float32", box: Box | None = None) -> PayloadChunk:
    return PayloadChunk(path, shape, dtype, box or full_box(shape))


def told(payload: PayloadFile) -> dict[str, object]:
    header = json.loads(payload.header[8:])
    found: dict[str, object] = json.loads(header["__metadata__"][KEY])
    return found


def test_ids_are_short_and_sort_by_time() -> None:
    ids = [new_save_id() for _ in range(50)]
    assert len(set(ids)) == 50
    assert [i[:9] for i in ids] == sorted(i[:9] for i in ids)
    assert all(i.isalnum() and i == i.lower() and len(i) == 15 for i in ids)


@pytest.mark.parametrize(("year", "start"), [(-50, "000000000"), (0, "000000000"), (9999, "zzzzzzzzz")])
def test_a_clock_before_1970_or_after_5188_gives_an_id_as_any_other(
    year: int, start: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time_ns", lambda: year * 365 * 86400 * 10**9)
    assert re.fullmatch(rf"{start}[0-9a-z]{{6}}", new_save_id())


def test_files_open_with_the_format_s_own_library(tmp_path: Path) -> None:
    tensors = {
        "a": torch.arange(6.0).reshape(2, 3),
        "b": torch.tensor(1 << 40),
        "h": torch.ones(3, dtype=torch.bfloat16),
        "e": torch.zeros(0, 4),
        "m": torch.tensor([True, False, True]),
        "c": torch.ones(2, dtype=torch.complex128),
    }
    write_step(tmp_path, tensors)
    [file] = tmp_path.glob("*.safetensors")
    found = load_file(file)
    for name, tensor in tensors.items():
        expected = tensor if name != "c" else tensor.view(torch.uint8)
        assert torch.equal(found[f"{name}@0"], expected), name
    with safe_open(file, "pt") as opened:
        assert opened.metadata()["format"] == "pt"


def test_data_begins_aligned_and_every_chunk_is_aligned_to_its_type() -> None:
    shapes = [
        ((3,), "uint8"),
        ((5,), "float64"),
        ((16, 4), "float32"),
        ((7,), "float16"),
        ((64,), "int8"),
        ((), "int64"),
    ]
    [payload] = plan_payloads("s", 0, [chunk((str(i),), *each) for i, each in enumerate(shapes)])
    assert len(payload.header) % DATA_ALIGNMENT == 0
    at = len(payload.header)
    for each, offset in zip(payload.chunks, payload.offsets, strict=True):
        assert offset == at
        at += each.nbytes
        assert offset % getattr(torch, each.dtype).itemsize == 0
    assert payload.nbytes == at
    sizes = [c.nbytes % 64 == 0 for c in payload.chunks]
    assert sizes == sorted(sizes, reverse=True), "sizes that are multiples of 64 first"


@given(
    st.lists(st.sampled_from([1, 64, 4096, BLOCK_BYTES, 3 * BLOCK_BYTES, BLOCK_BYTES + 64]), max_size=20),
    st.integers(0, 8),
)
def test_in_a_large_file_chunks_of_complete_blocks_begin_at_one(sizes: list[int], before: int) -> None:
    sizes.insert(min(before, len(sizes)), BLOCK_ALIGNED_BYTES)
    [payload] = plan_payloads("s", 0, [chunk((str(at),), (size,), "uint8") for at, size in enumerate(sizes)])
    offsets = [
        offset for offset, each in zip(payload.offsets, payload.chunks, strict=True) if each.nbytes % BLOCK_BYTES == 0
    ]
    assert offsets
    assert [offset % BLOCK_BYTES for offset in offsets] == [0] * len(offsets)


def test_the_header_of_a_small_file_is_small() -> None:
    [payload] = plan_payloads("s", 0, [chunk(("a",), (BLOCK_ALIGNED_BYTES - 1,), "uint8")])
    assert len(payload.header) == DATA_ALIGNMENT


def test_a_file_says_itself_what_it_holds() -> None:
    boxes = [Box((0, 0), (2, 4)), Box((2, 0), (2, 4))]
    chunks = [chunk(("model", "w"), (4, 4), box=box) for box in boxes]
    [payload] = plan_payloads("save1", 3, chunks, carry={"nest": {"n": 7}})
    assert payload.name == "save1-00003-00.safetensors"
    assert payload.keys == ("model.w@0", "model.w@1")
    assert told(payload) == {
        "version": 1,
        "save": "save1",
        "writer": 3,
        "chunks": [
            [["model", "w"], "float32", [4, 4], [0, 0], [2, 4]],
            [["model", "w"], "float32", [4, 4], [2, 0], [2, 4]],
        ],
        "carry": {"nest": {"n": 7}},
    }


def test_what_is_laid_out_again_says_what_its_own_save_is() -> None:
    chunks = [chunk(("model", "w"), (4, 4)), chunk(("model", "b"), (4,))]
    [first] = plan_payloads("save1", 0, chunks, carry={"nest": {"step": 9}})
    [again] = plan_payloads("save2", 5, chunks, carry={"nest": {"step": 1000}})
    [bare] = plan_payloads("save3", 0, chunks)
    assert [told(each).get("carry") for each in (first, again, bare)] == [
        {"nest": {"step": 9}},
        {"nest": {"step": 1000}},
        None,
    ]
    assert [(told(each)["save"], told(each)["writer"]) for each in (first, again, bare)] == [
        ("save1", 0),
        ("save2", 5),
        ("save3", 0),
    ]
    assert told(first)["chunks"] == told(again)["chunks"] == told(bare)["chunks"]
    assert again.name == "save2-00005-00.safetensors"


def test_paths_that_read_alike_keep_two_names() -> None:
    paths: list[TreePath] = [
        ("a.b",),
        ("a", "b"),
        ("a", 0),
        ("a", "0"),
        ("a.b@0",),
        ("x\ud800",),
        (),
        ("__metadata__",),
    ]
    [payload] = plan_payloads("s", 0, [chunk(path, (1,)) for path in paths])
    assert len(set(payload.keys)) == len(paths)
    assert [tuple(row[0]) for row in told(payload)["chunks"]] == paths  # type: ignore[attr-defined]


def test_files_are_cut_at_a_size_and_a_large_chunk_stands_alone() -> None:
    chunks = [chunk((name,), (n,), "uint8") for name, n in [("a", 60), ("b", 50), ("c", 300), ("d", 1)]]
    payloads = plan_payloads("s", 0, chunks, most_bytes=100)
    assert [[c.path[0] for c in p.chunks] for p in payloads] == [["a"], ["b"], ["c"], ["d"]]
    assert [p.name for p in payloads] == [f"s-00000-0{i}.safetensors" for i in range(4)]


def test_a_writer_without_chunks_writes_nothing_unless_it_carries_the_nest() -> None:
    assert plan_payloads("s", 1, []) == ()
    [payload] = plan_payloads("s", 0, [], carry={"nest": None})
    assert payload.nbytes == len(payload.header) == DATA_ALIGNMENT


def test_one_writer_leaves_a_hugging_face_folder() -> None:
    paths: list[TreePath] = [("optim", "w"), ("model", "w"), ("model", "b.c"), ("model", "b", "c"), ("n",)]
    payloads = plan_payloads("s", 0, [chunk(path, (2,)) for path in paths], model=("model",), carry={})
    assert [p.keys for p in payloads] == [("optim.w@0", "n@0"), ("w", "b.c", "model.b.c@0")]
    index = json.loads(hf_index(payloads, ("model",)))
    assert index == {
        "metadata": {"total_size": 24},
        "weight_map": dict.fromkeys(("w", "b.c", "model.b.c@0"), "s-00000-01.safetensors"),
    }


def test_a_type_without_a_name_is_refused_by_its_path() -> None:
    with pytest.raises(UnsupportedError, match=r"^model\.w: .*float7"):
        plan_payloads("s", 0, [chunk(("model", "w"), (2,), "float7")])


def hash_blocks(data: bytes, block_bytes: int) -> bytes:
    return b"".join(xxhash.xxh3_64_digest(data[at : at + block_bytes]) for at in range(0, len(data), block_bytes))


@pytest.mark.parametrize("step", [1, 4096, BLOCK_BYTES - 1, BLOCK_BYTES, GROUP_BYTES - 1, 3 * GROUP_BYTES], ids=str)
def test_blocks_are_hashed_however_the_bytes_come(step: int) -> None:
    data = torch.arange(GROUP_BYTES // 2 + 7, dtype=torch.int32).numpy().tobytes()
    if step == 1:
        data = data[:1000]
    hasher = BlockHasher()
    for at in range(0, len(data), step):
        hasher.update(data[at : at + step])
    assert hasher.digests() == hash_blocks(data, BLOCK_BYTES)
    assert BlockHasher().digests() == b""


@given(parts=st.lists(st.binary(max_size=40), max_size=6), most=st.integers(1, 4), rng=st.randoms())
def test_blocks_are_hashed_in_any_order_of_their_tasks(parts: list[bytes], most: int, rng: random.Random) -> None:
    with patch.multiple(payload_module, GROUP_BYTES=8, BLOCK_BYTES=4, _LOCKED_BYTES=2):
        hasher = BlockHasher()
        for part in parts:
            tasks = hasher.split(memoryview(part), most)
            assert len(tasks) <= most + 1
            rng.shuffle(tasks)
            for task in tasks:
                task()
        assert hasher.digests() == hash_blocks(b"".join(parts), 4)


def test_a_task_that_waits_leaves_its_groups_to_the_others() -> None:
    """Each group of a task that is behind would wait for the interpreter's lock, after the bytes are written."""
    data = bytes(range(64))
    with patch.multiple(payload_module, GROUP_BYTES=8, BLOCK_BYTES=4, _LOCKED_BYTES=2):
        hasher = BlockHasher()
        _waits, runs = hasher.split(memoryview(data), 2)
        runs()
        assert hasher.digests() == hash_blocks(data, 4)


def test_a_group_is_hashed_with_one_call_that_releases_the_lock() -> None:
    sizes: list[int] = []

    class Noted:
        def __init__(self) -> None:
            self._hasher = xxhash.xxh3_64()
            self.digest, self.reset = self._hasher.digest, self._hasher.reset

        def update(self, data: memoryview) -> None:
            sizes.append(len(data))
            self._hasher.update(data)

    with patch.object(payload_module, "xxhash", SimpleNamespace(xxh3_64=Noted)):
        hasher = BlockHasher()
        hasher.update(bytes(GROUP_BYTES))
    assert hasher.digests() == hash_blocks(bytes(GROUP_BYTES), BLOCK_BYTES)
    assert [size for size in sizes if size > 1 << 16] == [BLOCK_BYTES]
    assert len(sizes) == 2 * GROUP_BLOCKS - 1


@pytest.mark.parametrize("blocks", [0, 1, 2, 32, 33, 64, 70])
def test_a_group_has_the_hash_of_its_hashes_and_a_single_block_its_own(blocks: int) -> None:
    hashes = [xxhash.xxh3_64_digest(bytes([number])) for number in range(blocks)]
    groups = [b"".join(hashes[at : at + GROUP_BLOCKS]) for at in range(0, blocks, GROUP_BLOCKS)]
    expected = [each if len(each) == 8 else xxhash.xxh3_64_digest(each) for each in groups]
    assert group_hashes(b"".join(hashes)) == b"".join(expected)


def test_every_type_that_torch_stores_plainly_has_a_place(tmp_path: Path) -> None:
    kinds = [torch.complex32, torch.complex128, torch.float8_e4m3fn, torch.uint16, torch.bool]
    kinds += [torch.float8_e8m0fnu] if hasattr(torch, "float8_e8m0fnu") else []
    for kind in kinds:
        name = dtype_name(torch.empty(0, dtype=kind))
        [payload] = plan_payloads("s", 0, [chunk(("t",), (3,), name)])
        assert payload.nbytes - len(payload.header) == 3 * kind.itemsize
