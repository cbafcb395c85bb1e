"""The simulated device itself, and what it shows of training on a device that has memory and streams of its own."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.kit.ranks import sim


def test_memory_is_poisoned_when_it_is_given_and_when_it_is_freed():
    def body(rank, world):
        given = torch.empty(4, device="sim")
        kept = torch.ones(4, device="sim")
        kept.untyped_storage().resize_(0)
        kept.untyped_storage().resize_(16)
        return given.isnan().all().item(), kept.isnan().all().item()

    assert sim.ranks(1, body) == [(True, True)]


def test_copies_are_counted_by_who_waits_for_them():
    def body(rank, world):
        on_device, pageable, pinned = torch.ones(4, device="sim"), torch.ones(4), torch.ones(4).pin_memory()
        with sim.counted() as counts:
            on_device.cpu()
            on_device.copy_(pageable, non_blocking=True)
            on_device.copy_(pinned, non_blocking=True)
            on_device.sum().item()
            on_device.copy_(on_device + 1)
        return counts()

    assert sim.ranks(1, body) == [sim.Copies(blocking=1, pageable=1, pinned=1, reads=1)]


def test_a_copy_to_pinned_memory_is_done_when_its_event_is():
    def body(rank, world):
        host, on_device = torch.zeros(4).pin_memory(), torch.ones(4, device="sim")
        before = torch.sim.Event()
        before.record()
        host.copy_(on_device, non_blocking=True)
        after = torch.sim.Event()
        after.record()
        before.synchronize()
        unfinished = host.isnan().all().item()
        on_device.zero_()  # after the copy on the stream, so the copy has the values of before
        after.synchronize()
        return unfinished, host.tolist()

    assert sim.ranks(1, body) == [(True, [1.0] * 4)]


def test_a_copy_from_pinned_memory_reads_it_when_it_is_waited_for():
    def body(rank, world):
        host, on_device = torch.ones(4).pin_memory(), torch.zeros(4, device="sim")
        on_device.copy_(host, non_blocking=True)
        host.fill_(2)  # too early
        early = on_device.tolist()
        on_device.copy_(host, non_blocking=True)
        torch.sim.synchronize()
        host.fill_(3)
        return early, on_device.tolist(), sim.unfinished()

    assert sim.ranks(1, body) == [([2.0] * 4, [2.0] * 4, 0)]


def test_the_group_moves_tensors_of_the_device_and_none_of_the_cpu():
    def body(rank, world):
        value = torch.full((3,), float(rank), device="sim")
        dist.all_reduce(value)
        try:
            dist.all_reduce(torch.ones(3))
        except RuntimeError as error:
            return value.tolist(), str(error)

    assert sim.ranks(2, body) == [([1.0] * 3, "No backend type associated with device type cpu")] * 2


def test_data_of_a_parameter_moves_between_the_device_and_the_cpu():
    def body(rank, world):
        parameter = torch.nn.Parameter(torch.ones(3))
        parameter.data = parameter.data.to("sim")
        there = parameter.device.type
        parameter.data = parameter.data.cpu()
        return there, parameter.device.type

    assert sim.ranks(1, body) == [("sim", "cpu")]


def test_a_missing_compiler_is_told(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(pytest.skip.Exception, match=r"needs a C\+\+ compiler|the pinned torch"):
        sim.library.__wrapped__()
