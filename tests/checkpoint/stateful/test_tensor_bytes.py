"""Small tensors are copied together, byte for byte."""

from __future__ import annotations

import pytest
import torch

from shardckpt.checkpoint.stateful.tensor_bytes import SMALL_BYTES, flat_bytes, join_small

DTYPES = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64),
    *(torch.int64, torch.uint16, torch.uint8, torch.bool),
)


def joined(tensors: list[torch.Tensor]) -> list[bytes]:
    return [part if isinstance(part, bytes) else expected_bytes(part) for part in join_small(tensors)]


def expected_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(flat_bytes(tensor.detach().resolve_conj().resolve_neg().contiguous()))


def make(dtype: torch.dtype, shape: tuple[int, ...], count: int) -> list[torch.Tensor]:
    return [torch.randint(0, 100, shape).to(dtype) for _ in range(count)]


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (0, 4)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_of_every_dtype_keep_their_bytes_and_order(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensors = [*make(torch.float32, (7,), 3), *make(dtype, shape, 20), *make(torch.float32, (7,), 3)]
    assert b"".join(joined(tensors)) == b"".join(map(expected_bytes, tensors))


def test_views_and_parameters_are_joined_by_their_elements() -> None:
    turned = [tensor.t() for tensor in make(torch.float32, (3, 5), 20)]
    conjugate = [tensor.conj() for tensor in make(torch.complex64, (4,), 20)]
    negative = [torch.rand(4, dtype=torch.complex64).conj().imag for _ in range(20)]
    parameters = [torch.nn.Parameter(tensor) for tensor in make(torch.float32, (6,), 20)]
    tensors = [*turned, *conjugate, *negative, *parameters]
    assert b"".join(joined(tensors)) == b"".join(map(expected_bytes, tensors))


def test_many_tensors_of_one_shape_are_copied_by_few_calls() -> None:
    assert len(joined(make(torch.float32, (16, 16), 2000))) == 8


def test_joint_copies_do_not_follow_later_changes() -> None:
    tensors = make(torch.float32, (16,), 100)
    before = b"".join(map(expected_bytes, tensors))
    parts = list(join_small(tensors))
    for tensor in tensors:
        tensor.zero_()
    assert b"".join(part if isinstance(part, bytes) else expected_bytes(part) for part in parts) == before


def test_large_tensors_are_not_copied() -> None:
    tensors = make(torch.uint8, (SMALL_BYTES + 1,), 10)
    assert [id(part) for part in join_small(tensors)] == list(map(id, tensors))
