"""What a save and a load copy from and to a device: every bit, through two pinned buffers, without a blocking copy."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import shardckpt
from shardckpt.checkpoint.load import tensor_loader, uploads
from shardckpt.checkpoint.stateful import tensor_bytes
from shardckpt.checkpoint.stateful.state_stream import build_stream
from shardckpt.checkpoint.stateful.tensor_bytes import PinnedPieces
from shardckpt.errors import PrecisionError
from tests.kit.ranks import sim

KIB = 1 << 10


def use_small_buffers() -> None:
    """Make this rank copy kilobytes at a time, as another one copies gigabytes."""
    tensor_bytes.STAGED_BYTES = uploads.STAGED_BYTES = 16 * KIB
    uploads.PINNED_BYTES = tensor_loader.PINNED_BYTES = tensor_loader.BATCH_BYTES = 64 * KIB


def values() -> dict[str, torch.Tensor]:
    """Return tensors of many types and shapes, larger and smaller than a buffer."""
    made = torch.Generator().manual_seed(1)
    large = torch.randn(70_001, generator=made)
    return {
        "large": large,
        "brain": large[:50_000].bfloat16(),
        "turned": large[:60_000].view(200, 300).t(),
        "columns": large[:60_000].view(200, 300)[:, 3:290],
        "column of a row": large[:3].view(1, 3)[:, 1],
        "complex": torch.randn(9_000, dtype=torch.complex64, generator=made),
        "conjugate": torch.randn(40, dtype=torch.complex64, generator=made).conj(),
        "bits": large[:3_001] > 0,
        "bytes": large[:77_777].view(torch.uint8)[1:],
        "one": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.empty(0, 4),
        **{f"small.{number}": torch.full((number,), number, dtype=torch.int16) for number in range(1, 30)},
    }


def on_device(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return them there, with the same strides."""
    made = {}
    for name, tensor in tensors.items():
        made[name] = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="sim").copy_(tensor)
    return made


def blank(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the same without the values."""
    return {name: tensor.fill_(0) for name, tensor in on_device(tensors).items()}


def wrong(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    return [name for name, tensor in expected.items() if not torch.equal(found[name].cpu(), tensor)]


def save_and_load(rank: int, world: int, folder: str, broadcasts: bool) -> Any:
    """Return how often the host waited for a copy, and what is wrong on the CPU and on the device."""
    use_small_buffers()
    state, again = {"made": on_device(values())}, {"made": blank(values())}
    with sim.counted() as counts:
        shardckpt.save(state, f"{folder}/c")
        saved = counts()
    with sim.counted() as counts:
        shardckpt.load(again, f"{folder}/c", broadcast_reads=broadcasts)
        loaded, unfinished = counts(), sim.unfinished()
    on_host = shardckpt.load(f"{folder}/c")["made"]
    waits = saved.waits, loaded.waits, unfinished
    return waits, saved.pinned > 10 < loaded.pinned, wrong(on_host, values()), wrong(again["made"], values())


@pytest.mark.parametrize(("world", "broadcasts"), [(1, False), (2, False), (2, True)])
def test_every_bit_is_saved_and_loaded_without_a_blocking_copy(tmp_path, world, broadcasts):
    found = sim.ranks(world, save_and_load, str(tmp_path), broadcasts)
    assert found == [((0, 0, 0), True, [], [])] * world


def load_other_types(rank: int, world: int, folder: str) -> Any:
    """Return what is wrong with values that are cast as they are loaded, and whether others are refused."""
    use_small_buffers()
    expected = {"a": torch.randn(50_000), "b": torch.arange(50_000.0), "c": torch.randn(20_000)}
    shardckpt.save(expected, f"{folder}/c")
    types = {"a": torch.bfloat16, "b": torch.int32, "c": torch.complex64}
    state = {name: torch.zeros(tensor.shape, dtype=types[name], device="sim") for name, tensor in expected.items()}
    with sim.counted() as counts:
        shardckpt.load(state, f"{folder}/c", cast=True)
        waits = counts().waits
    try:
        shardckpt.load(
            {"b": torch.zeros(50_000, dtype=torch.int8, device="sim")}, f"{folder}/c", cast=True, include="b"
        )
    except PrecisionError as error:
        refused = "128.0 of float32" in str(error)
    return waits, wrong(state, {name: tensor.to(types[name]) for name, tensor in expected.items()}), refused


def test_casts_are_those_of_the_host_and_copy_nothing_back(tmp_path):
    assert sim.ranks(1, load_other_types, str(tmp_path)) == [(0, [], True)]


def overlap(rank: int, world: int) -> Any:
    """Return for each part how many copies of later parts are under way when it is read, and whether it is right."""
    pieces, data = PinnedPieces(KIB), torch.arange(5 * KIB, dtype=torch.int64, device="sim").to(torch.uint8)
    under_way, found = [], []
    for source in (pieces.add(data[:4500]), pieces.add(data[4500:]), pieces.flush()):
        for part in source:
            under_way.append(sim.unfinished())
            found.append(bytes(part))
    return under_way, list(map(len, found)), b"".join(found) == bytes(data.cpu().numpy())


def test_the_next_piece_is_copied_while_one_is_read():
    assert sim.ranks(1, overlap) == [([1, 1, 1, 2, 0], [KIB] * 5, True)]


def load_on_a_stream(rank: int, world: int, folder: str) -> Any:
    """Return on which threads and streams copies are started, of a load on a stream of the user."""
    use_small_buffers()
    state = {"large": torch.ones(70_001, device="sim")}
    shardckpt.save(state, f"{folder}/c")
    found, start = set(), uploads.PlacedUpload.start

    def noted(placed: uploads.PlacedUpload) -> None:
        found.add((threading.current_thread() is threading.main_thread(), torch.accelerator.current_stream().stream_id))
        start(placed)

    uploads.PlacedUpload.start = noted
    stream = torch.sim.Stream()
    with torch.sim.stream(stream):
        shardckpt.load(state, f"{folder}/c")
    return found == {(False, stream.stream_id)}


def test_the_threads_of_a_load_copy_on_the_current_stream_of_its_caller(tmp_path):
    assert sim.ranks(1, load_on_a_stream, str(tmp_path)) == [True]


def compare_on_a_stream(rank: int, world: int, folder: str) -> Any:
    """Return on which threads and streams a save on a stream of the user copies what it compares with its base."""
    use_small_buffers()
    state = {"a": torch.ones(12 << 20, device="sim"), "b": torch.ones(12 << 20, device="sim")}
    shardckpt.save(state, f"{folder}/a", store_digests=True)
    found, add = set(), PinnedPieces.add

    def noted(pieces: PinnedPieces, data: torch.Tensor) -> Any:
        if threading.current_thread().name.startswith("shardckpt-hash"):
            found.add(torch.accelerator.current_stream().stream_id)
        return add(pieces, data)

    PinnedPieces.add = noted
    stream = torch.sim.Stream()
    with torch.sim.stream(stream):
        shardckpt.save(state, f"{folder}/b", base=f"{folder}/a")
    return found == {stream.stream_id}


def test_threads_that_compare_with_a_base_copy_on_their_callers_current_stream(tmp_path):
    assert sim.ranks(1, compare_on_a_stream, str(tmp_path)) == [True]


def build_behind_an_upload(rank: int, world: int) -> Any:
    """Return what is under way before and after a stream of a state is built, whose bytes another thread may read."""
    tensor = torch.zeros(9, device="sim")
    tensor.copy_(torch.arange(9.0).pin_memory(), non_blocking=True)
    before = sim.unfinished()
    build_stream({"t": tensor})
    return before, sim.unfinished()


def test_a_stream_of_a_state_is_built_when_what_is_queued_is_done():
    assert sim.ranks(1, build_behind_an_upload) == [(1, 0)]


def refer_to_a_base(rank: int, world: int, folder: str) -> Any:
    """Return the waits of a save that refers to another, and what is wrong with it; the hashing is done by threads."""
    use_small_buffers()
    state = {"made": on_device(values()), "more": torch.ones(24 << 20, device="sim")}
    shardckpt.save(state, f"{folder}/a", store_digests=True)
    state["made"]["large"].add_(1)
    with sim.counted() as counts:
        shardckpt.save(state, f"{folder}/b", base=f"{folder}/a")
        waits = counts().waits
    return waits, wrong(shardckpt.load(f"{folder}/b")["made"], {**values(), "large": values()["large"] + 1})


def test_a_save_compares_the_device_with_its_base_without_a_blocking_copy(tmp_path):
    assert sim.ranks(1, refer_to_a_base, str(tmp_path)) == [(0, [])]
