"""Errors of collectives say whose fault they are: this rank's memory, this rank's device, or another rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardckpt.errors import NoMemoryError, RankError
from tests.kit.models.under_test import TORCH

pytestmark = pytest.mark.skipif(TORCH, reason="errors of the engine")
if not TORCH:
    from shardckpt.core.comm.collectives import Pending

NCCL = (
    "NCCL error in: NCCLUtils.cpp:94, unhandled cuda error (run with NCCL_DEBUG=INFO for details)\n"
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure "
)


class Failing:
    """A collective that fails."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def wait(self) -> None:
        raise self._error


def raised(error: Exception, monkeypatch: pytest.MonkeyPatch) -> BaseException:
    """What waiting for a collective raises that fails with an error."""
    monkeypatch.setattr(dist, "get_rank", lambda *_: 3)
    with pytest.raises(Exception) as caught:
        Pending(Failing(error), "gather blocks.1").wait()
    return caught.value


OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    dist.DistBackendError(NCCL + "2 'out of memory'"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: 8 bytes"),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=["of the device", "of NCCL", "of the host"])
def test_too_little_memory_for_a_collective_is_told_and_names_the_unit(error, monkeypatch):
    found = raised(error, monkeypatch)
    assert isinstance(found, torch.OutOfMemoryError)
    assert isinstance(found, NoMemoryError)
    assert not isinstance(found, RankError)
    assert str(found).startswith("rank 3 ran out of memory to gather blocks.1: ")
    assert "another rank left" not in str(found).lower()
    assert found.__cause__ is error


OF_THE_DEVICE: list[Any] = [
    getattr(torch, "AcceleratorError", RuntimeError)("CUDA error: an illegal memory access was encountered"),
    RuntimeError("CUDA error: device-side assert triggered"),
    dist.DistBackendError(NCCL + "700 'an illegal memory access was encountered'"),
]


@pytest.mark.parametrize("error", OF_THE_DEVICE, ids=["by its type", "by its text", "of NCCL"])
def test_an_error_of_an_operation_that_was_queued_earlier_is_not_another_ranks(error, monkeypatch):
    assert raised(error, monkeypatch) is error


def test_any_other_error_is_another_ranks(monkeypatch):
    found = raised(RuntimeError("Connection closed by peer"), monkeypatch)
    assert isinstance(found, RankError)
    assert "rank 3 could not gather blocks.1" in str(found)
