"""Buffers of a save in the background: never more than the budget, kept from save to save, contents byte for byte."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardckpt.boxes import full_box
from shardckpt.checkpoint.save import staging
from shardckpt.checkpoint.save.payload_writer import iter_contents
from shardckpt.checkpoint.save.staging import (
    BUFFER_BYTES,
    UNBOUNDED_BUFFER_BYTES,
    BufferPool,
    StagingArea,
    buffer_size,
    default_budget,
    make_buffer,
    memory_size,
)
from shardckpt.checkpoint.stateful.flatten import FlattenedState
from shardckpt.checkpoint.stateful.stateful import dtype_name
from shardckpt.errors import UsageError
from shardckpt.native.payload import FileLayout, PayloadChunk, PayloadFile, arrange_files, build_payloads
from shardckpt.state.local.tensor_shards import get_tensor_shards

MIB = 1 << 20


class TestPool:
    @given(st.integers(MIB, 1 << 40))
    def test_a_budget_has_room_for_four_buffers_of_whole_pages_or_more(self, budget: int) -> None:
        size = buffer_size(budget)
        assert 0 < size <= BUFFER_BYTES and size % 4096 == 0 and 4 * size <= budget

    @given(st.integers(MIB, 1 << 40))
    def test_buffers_have_sizes_that_pinned_memory_is_given_in(self, budget: int) -> None:
        size = buffer_size(budget)
        assert size & (size - 1) == 0 and (size == BUFFER_BYTES or 8 * size > budget)

    def test_a_budget_too_small_for_anything_is_refused(self) -> None:
        with pytest.raises(UsageError, match="1 MiB"):
            BufferPool(bytearray).open(MIB - 1)

    def test_no_more_buffers_are_made_than_the_budget_allows(self) -> None:
        pool = BufferPool(bytearray)
        pool.open(MIB)
        taken = [pool.take(wait=False) for _ in range(4)]
        assert [len(each) for each in taken] == [MIB // 4] * 4
        assert pool.take(wait=False) is None
        assert (pool.made, pool.nbytes) == (4, MIB)

    def test_buffers_are_reused_within_a_save_and_by_the_next(self) -> None:
        pool = BufferPool(object_of_size)
        pool.open(None)
        first, second = pool.take(wait=False), pool.take(wait=False)
        pool.give(first)
        assert pool.take(wait=False) is first
        pool.open(None)  # though nobody gave them back: the save before was broken off
        assert {id(pool.take(wait=False)), id(pool.take(wait=False))} == {id(first), id(second)}
        assert pool.made == 2

    def test_a_smaller_budget_lets_buffers_go(self) -> None:
        pool = BufferPool(object_of_size)
        pool.open(8 * BUFFER_BYTES)
        for _ in range(6):
            pool.take(wait=False)
        pool.open(4 * BUFFER_BYTES)
        assert pool.nbytes == 4 * BUFFER_BYTES
        pool.open(MIB)
        assert pool.nbytes == 0

    def test_buffers_that_are_outdated_go_when_a_save_begins(self) -> None:
        outdated: list[object] = []
        pool = BufferPool(object_of_size, lambda each: each in outdated)
        pool.open(None)
        first, second = pool.take(wait=False), pool.take(wait=False)
        outdated.append(first)
        assert pool.nbytes == 2 * UNBOUNDED_BUFFER_BYTES
        pool.open(None)
        assert pool.nbytes == UNBOUNDED_BUFFER_BYTES and pool.take(wait=False) is second

    @pytest.mark.parametrize("budget", [None, 4 * BUFFER_BYTES, MIB])
    def test_what_files_still_need_is_known_before_it_is_made(self, budget: int | None) -> None:
        pool = BufferPool(object_of_size)
        pool.open(budget)
        pool.take(wait=False)
        size = buffer_size(budget)
        files = [size + 1, 1, size * 2]  # in 5 buffers
        most = 5 if budget is None else min(5, budget // size)
        assert pool.count_missing(files) == (most - 1) * size

    def test_who_waits_gets_what_another_thread_gives_back(self) -> None:
        pool = BufferPool(bytearray)
        pool.open(MIB)
        taken = [pool.take(wait=False) for _ in range(4)]
        giver = threading.Timer(0.05, pool.give, [taken[2]])
        giver.start()
        assert pool.take(wait=True) is taken[2]
        giver.join()

    def test_who_waits_is_told_when_nothing_will_come(self) -> None:
        pool = BufferPool(bytearray)
        pool.open(MIB)
        for _ in range(4):
            pool.take(wait=False)
        closer = threading.Timer(0.05, pool.close)
        closer.start()
        assert pool.take(wait=True) is None
        closer.join()


class TestDefault:
    def test_without_a_gpu_buffers_take_what_a_rank_writes(self) -> None:
        assert default_budget() is None

    @pytest.mark.parametrize(
        ("ranks", "accelerators", "share"), [("4", 8, 8), ("", 8, 16), ("", 0, 2), ("0", 8, 16), ("²", 8, 16)]
    )
    def test_with_one_the_ranks_share_half_of_the_memory(
        self, monkeypatch: pytest.MonkeyPatch, ranks: str, accelerators: int, share: int
    ) -> None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        monkeypatch.setattr(staging, "is_gpu_used", lambda: True)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: accelerators)
        assert default_budget() == memory_size() // share

    @pytest.mark.parametrize(("limit", "is_less"), [("max\n", False), ("1000000\n", True), ("9" * 30, False)])
    def test_a_container_has_what_it_may_use(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: str, is_less: bool
    ) -> None:
        (tmp_path / "memory.max").write_text(limit)
        monkeypatch.setattr(staging, "_MEMORY_LIMITS", ("/no/such/file", str(tmp_path / "memory.max")))
        assert (memory_size() == 1_000_000) is is_less


def object_of_size(nbytes: int) -> object:
    del nbytes
    return object()


def planned(
    tensors: dict[str, torch.Tensor],
) -> tuple[tuple[FileLayout, ...], tuple[PayloadFile, ...], FlattenedState]:
    """Return the files of some tensors, several of them, without and with headers, and what they are filled from."""
    arrays = {(name,): get_tensor_shards(tensor) for name, tensor in tensors.items()}
    chunks = [PayloadChunk(path, a.shape, dtype_name(a.dtype), full_box(a.shape)) for path, a in arrays.items()]
    files = arrange_files(tuple(chunks), 2 * MIB)
    return files, build_payloads("s", 0, files), FlattenedState(arrays=arrays)


def drained(stage: StagingArea, payloads: tuple[PayloadFile, ...]) -> Iterator[bytes]:
    for payload in payloads:
        yield b"".join(bytes(part) for part in stage.blocks(payload))


TENSORS = {
    "large": torch.rand(900_000),
    "turned": torch.rand(300, 500).t(),
    "tiny": torch.tensor(3, dtype=torch.int8),
    "empty": torch.empty(0, 4),
    "conjugate": torch.rand(40, dtype=torch.complex64).conj(),
    "odd": torch.arange(77_777, dtype=torch.uint8)[1:],
    "brain": torch.rand(70_001).bfloat16(),
}


class TestStage:
    @pytest.mark.parametrize("budget", [None, 64 * MIB])
    def test_what_fits_is_copied_at_once_and_is_what_lay_there(self, budget: int | None) -> None:
        tensors = {name: tensor.clone() for name, tensor in TENSORS.items()}
        files, payloads, state = planned(tensors)
        expected = [b"".join(bytes(part) for part in iter_contents(payload, state)) for payload in payloads]
        stage = StagingArea(BufferPool(make_buffer), budget)
        stage.fill(files, state)
        for tensor in tensors.values():
            tensor.zero_()
        assert stage.rounds == 1 and stage.is_filled
        assert list(drained(stage, payloads)) == expected
        assert len(payloads) > 1 and list(map(len, expected)) == [
            payload.nbytes - len(payload.header) for payload in payloads
        ]

    def test_what_does_not_fit_goes_in_rounds_within_the_budget(self) -> None:
        files, payloads, state = planned(TENSORS)
        expected = [b"".join(bytes(part) for part in iter_contents(payload, state)) for payload in payloads]
        pool = BufferPool(make_buffer)
        stage = StagingArea(pool, MIB)
        loop = threading.Thread(target=stage.fill, args=(files, state))
        loop.start()
        loop.join(0.1)
        assert loop.is_alive() and not stage.is_filled, "the loop does not wait for the writer"
        assert list(drained(stage, payloads)) == expected
        loop.join()
        assert stage.is_filled and stage.rounds > 3 and pool.nbytes <= MIB

    def test_a_writer_that_gave_up_ends_the_copying(self) -> None:
        files, payloads, state = planned(TENSORS)
        stage = StagingArea(BufferPool(make_buffer), MIB)
        loop = threading.Thread(target=stage.fill, args=(files, state))
        loop.start()
        next(stage.blocks(payloads[0]))
        stage.close()
        loop.join(5)
        assert not loop.is_alive()

    def test_a_copy_that_fails_is_told_to_the_writer(self) -> None:
        _, payloads, _ = planned(TENSORS)
        stage = StagingArea(BufferPool(make_buffer), None)
        stage.fail(MemoryError("no more"))
        with pytest.raises(MemoryError, match="no more"):
            list(drained(stage, payloads))

    def test_buffers_made_in_inference_mode_serve_outside_of_it(self) -> None:
        pool = BufferPool(make_buffer)
        for mode in (True, False):
            files, _payloads, state = planned({"t": torch.rand(200_000)})
            stage = StagingArea(pool, None)
            with torch.inference_mode(mode):
                stage.fill(files, state)
        assert pool.made == 1

    @pytest.mark.parametrize("is_pinned", [False, True])
    def test_only_pinned_buffers_are_filled_beside_the_host(self, monkeypatch, is_pinned: bool) -> None:
        """A device without streams, such as "mps", has no event for what it copies to other memory."""
        asked: set[bool] = set()
        copy = torch.Tensor.copy_

        def noted(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
            asked.add(non_blocking)
            return copy(target, source, non_blocking)

        monkeypatch.setattr(torch.Tensor, "copy_", noted)
        files, _payloads, state = planned({"t": torch.rand(200_000)})
        pool = BufferPool(lambda size: make_buffer(size)._replace(is_pinned=is_pinned))
        StagingArea(pool, None).fill(files, state)
        assert asked == {is_pinned}
