"""Nothing reads or writes memory on one stream that another one may still be using; see `streams`."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import io
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.kit.models.extensions import Halved, Scaled
from tests.kit.models.models import PLAIN, WIDTH, Case, built, case, floats, rows, square
from tests.kit.models.under_test import LOW, STYLES, TORCH, Strategy, Style, core, grid, no_sync, sharder
from tests.kit.ranks.harness import RanksError, run
from tests.kit.ranks.streams import Checker, UnorderedError, checked

pytestmark = pytest.mark.skipif(TORCH, reason="the engine's own streams are checked")
if not TORCH:
    from shardckpt import devices, state
    from shardckpt.boxes import full_box
    from shardckpt.checkpoint.save import staging
    from shardckpt.checkpoint.save.handle import AsyncSaveTask, SaveHandle
    from shardckpt.checkpoint.save.staging import BufferPool, StagingArea, make_buffer
    from shardckpt.checkpoint.save.write_hooks import install_write_hooks
    from shardckpt.checkpoint.stateful import tensor_bytes
    from shardckpt.checkpoint.stateful.flatten import FlattenedState, flatten_state
    from shardckpt.checkpoint.stateful.state_stream import build_stream, read_stream
    from shardckpt.core import comm_hooks, materialize
    from shardckpt.core.comm import streams as engine_streams
    from shardckpt.core.comm.collectives import ShardGroup
    from shardckpt.core.comm.streams import DeviceStreams, RateLimiter
    from shardckpt.core.params.gradient_reduction import GradientReducer
    from shardckpt.core.params.unsharded_params import UnshardedParams
    from shardckpt.core.runtime import fsdp_unit
    from shardckpt.core.tools.summon_full_params import register_flat_params
    from shardckpt.native.payload import PayloadChunk, PayloadFile, arrange_files
    from shardckpt.state.local.tensor_shards import get_tensor_shards

CPU = torch.device("cpu")
FULL, GRAD_OP, NONE, HYBRID = Strategy.FULL_SHARD, Strategy.SHARD_GRAD_OP, Strategy.NO_SHARD, Strategy.HYBRID_SHARD
WRAPPERS = (Style.FLAT, Style.ORIGINAL)


# ------------------------------------------------------------------------------------------------- the checker


@contextlib.contextmanager
def finds(*words: str):
    """What is done inside is found to be unordered, in a message with these words."""
    with pytest.raises(UnorderedError) as caught, checked():
        yield
    assert [word for word in words if word not in str(caught.value)] == []


def side() -> Any:
    return devices.make_stream(CPU)


def test_a_read_on_another_stream_is_found_with_both_places():
    with finds("read by mul on the other stream", "not ordered after write by fill_ on the compute", "test_streams.py"):
        written = torch.empty(4)
        written.fill_(1)
        with devices.use_stream(side(), CPU):
            written * 2


def test_a_write_on_another_stream_is_found():
    with finds("write by add_ on the other stream", "after read by mul on the compute stream"):
        read = torch.ones(4)
        other = side()
        other.wait_stream(devices.get_current_stream(CPU))
        read * 2
        with devices.use_stream(other, CPU):
            read.add_(1)


def test_a_stream_that_waited_may_read_and_write():
    with checked():
        written, other = torch.ones(4), side()
        event = devices.record_event(CPU)
        other.wait_event(event)
        with devices.use_stream(other, CPU):
            written.add_(1)
        devices.get_current_stream(CPU).wait_stream(other)
        written.mul_(2)


def test_an_event_orders_only_what_was_queued_before_it():
    with finds("read by mul", "write by fill_"):
        written, other = torch.ones(4), side()
        event = devices.record_event(CPU)
        written.fill_(2)
        other.wait_event(event)
        with devices.use_stream(other, CPU):
            written * 2


def test_other_bytes_of_the_same_memory_need_no_order():
    with checked():
        other, memory = side(), torch.ones(8)
        other.wait_stream(devices.get_current_stream(CPU))
        memory[:4].add_(1)
        with devices.use_stream(other, CPU):
            memory[4:].add_(1)


def multiplied_on_the_side(is_recorded: bool = False) -> tuple[torch.Tensor, Any]:
    """Return memory of the compute stream and the other stream, which waits for it and reads it."""
    used, other = torch.ones(4), side()
    other.wait_stream(devices.get_current_stream(CPU))
    with devices.use_stream(other, CPU):
        if is_recorded:
            devices.record_stream(used)
        used * 2
    return used, other


def test_memory_that_is_freed_while_another_stream_uses_it_is_found():
    with finds("memory of the compute stream", "is freed at", "in use by mul on the other stream"):
        used, _ = multiplied_on_the_side()
        del used


def test_memory_that_is_recorded_may_be_freed():
    with checked():
        used, _ = multiplied_on_the_side(is_recorded=True)
        del used


def test_memory_may_be_freed_once_its_own_stream_has_waited():
    with checked():
        used, other = multiplied_on_the_side()
        devices.get_current_stream(CPU).wait_stream(other)
        del used


def filled_on_the_side(waits: bool) -> None:
    """Fill memory of the compute stream on another one, which may not have waited for what was there before."""
    with checked():
        other = side()
        before = torch.ones(1000)
        before * 2
        del before
        if waits:
            other.wait_stream(devices.get_current_stream(CPU))
        memory = torch.empty(1000)
        if waits:
            other.wait_stream(devices.get_current_stream(CPU))
        with devices.use_stream(other, CPU):
            memory.fill_(1)
        devices.get_current_stream(CPU).wait_stream(other)


def test_memory_used_on_a_stream_that_did_not_wait_for_its_allocation_is_found():
    filled_on_the_side(waits=True)
    with pytest.raises(
        UnorderedError, match=r"write by fill_ on the other(.|\n)*after write by allocation on the compute"
    ):
        filled_on_the_side(waits=False)


def test_a_resized_storage_used_on_a_stream_that_did_not_wait_is_found():
    with finds("write by fill_ on the other stream", "after write by allocation on the compute stream"):
        other, memory = side(), torch.empty(4)
        memory.untyped_storage().resize_(0)
        memory.untyped_storage().resize_(16)
        with devices.use_stream(other, CPU):
            memory.fill_(1)
        devices.get_current_stream(CPU).wait_stream(other)


def test_a_record_of_a_storage_that_does_not_own_its_memory_counts_for_nothing():
    with finds("is freed at", "in use by mul on the other stream"):
        whole, other = torch.ones(8), side()
        other.wait_stream(devices.get_current_stream(CPU))
        part = torch.empty(0).set_(whole.untyped_storage()[16:32], 0, (4,))
        with devices.use_stream(other, CPU):
            devices.record_stream(part)
            part * 2
        del whole, part


def gradients_read_on_the_side(is_recorded: bool) -> None:
    """Drop gradients that another stream still copies, as an optimizer on the CPU does."""
    with checked():
        model, other = made(Style.EACH)[0], side()
        square(model(floats(0, 0))).backward()
        other.wait_stream(devices.get_current_stream(CPU))
        with devices.use_stream(other, CPU):
            for parameter in model.parameters():
                parameter.grad.to_local() * 2
                if is_recorded:
                    devices.record_stream(parameter.grad.to_local())
        model.zero_grad()


def test_a_record_of_a_gradient_keeps_the_memory_of_its_bucket():
    run(2, lambda rank, world: gradients_read_on_the_side(is_recorded=True))
    with pytest.raises(RanksError, match=r"is freed at(.|\n)*in use by mul on the other stream"):
        run(2, lambda rank, world: gradients_read_on_the_side(is_recorded=False))


def test_a_storage_that_is_resized_to_nothing_is_freed():
    with finds("is freed at"):
        used, other = torch.ones(4), side()
        other.wait_stream(devices.get_current_stream(CPU))
        with devices.use_stream(other, CPU):
            used * 2
        used.untyped_storage().resize_(0)


def test_a_storage_that_is_a_part_of_another_is_the_same_memory():
    with finds("write by add_", "read by mul"):
        whole, other = torch.ones(8), side()
        other.wait_stream(devices.get_current_stream(CPU))
        part = torch.empty(0).set_(whole.untyped_storage()[16:32], 0, (4,))
        with devices.use_stream(other, CPU):
            part.add_(1)
        whole * 2


def read_on_the_host(waits: bool) -> None:
    with checked() as checker:
        source, buffer, other = torch.ones(4), torch.empty(4), side()
        other.wait_stream(devices.get_current_stream(CPU))
        with devices.use_stream(other, CPU):
            buffer.copy_(source)
        devices.get_current_stream(CPU).wait_stream(other)  # orders the streams, not the host
        if waits:
            other.record_event().synchronize()
        checker.read_on_host(buffer.data_ptr(), buffer.nbytes)


def test_the_host_may_read_what_it_has_waited_for():
    read_on_the_host(waits=True)


def test_a_read_by_the_host_that_has_not_waited_is_found():
    with pytest.raises(UnorderedError, match=r"read by the host at(.|\n)*not waited for write by copy_ on the other"):
        read_on_the_host(waits=False)


def collective(reads_early: bool, other_waits: bool) -> None:
    """A result that is read before the wait, or by a stream that did not wait."""

    def body(rank, world):
        with checked():
            out, mine, other = torch.empty(4), torch.ones(2), side()
            work = dist.all_gather_into_tensor(out, mine, async_op=True)
            if other_waits:
                with devices.use_stream(other, CPU):
                    work.wait()
            if not reads_early:
                work.wait()
            return (out * 2).tolist()

    assert run(2, body) == [[2.0] * 4] * 2


@pytest.mark.parametrize("other_waits", [False, True])
def test_a_collective_is_ordered_for_the_stream_that_waited(other_waits):
    collective(False, other_waits)
    with pytest.raises(AssertionError, match=r"read by mul on the compute stream(.|\n)*after write by _?all_?gather"):
        collective(True, other_waits)


def gathered_twice(other_waits: bool) -> None:
    """Gather what another stream has gathered, both without `async_op`."""

    def body(rank, world):
        with checked():
            first, second, mine, other = torch.empty(4), torch.empty(8), torch.ones(2), side()
            other.wait_stream(devices.get_current_stream(CPU))
            dist.all_gather_into_tensor(first, mine)
            if other_waits:
                other.wait_stream(devices.get_current_stream(CPU))
            with devices.use_stream(other, CPU):
                dist.all_gather_into_tensor(second, first)
            devices.get_current_stream(CPU).wait_stream(other)

    run(2, body)


def test_a_collective_that_is_not_async_runs_on_the_current_stream():
    gathered_twice(other_waits=True)
    with pytest.raises(
        AssertionError, match=r"read by _?all_?gather\w* on the other(.|\n)*write by _?all_?gather\w* on the comp"
    ):
        gathered_twice(other_waits=False)


def test_the_limiter_waits_for_the_device_of_the_unit_whichever_is_current(monkeypatch):
    asked = []

    class Noted(devices.TorchStreams):
        def get_current(self, device: torch.device) -> Any:
            asked.append(device)
            return Checker().current

        def is_capturing(self, device: torch.device) -> bool:
            return False

    monkeypatch.setattr(devices, "_streams", Noted())
    RateLimiter().record_free_event(DeviceStreams(torch.device("cuda", 1)))
    assert asked == [torch.device("cuda", 1)]


# ------------------------------------------------------------------------------------------------- scenarios


def made(style: Style, strategy: Strategy = FULL, which: Case = PLAIN, **more: Any) -> tuple[Any, Any]:
    """A sharded model and its optimizer."""
    model = which.cut(built(which), sharder(style, strategy, **more))
    return model, torch.optim.AdamW(model.parameters())


def train(model: Any, optimizer: Any, steps: int = 2) -> None:
    for step in range(steps):
        square(model(floats(0, step))).backward()
        optimizer.step()
        optimizer.zero_grad()


def trains(style: Style) -> None:
    train(*made(style))


def trains_two_models_on_two_streams(style: Style) -> None:
    """The second backward uses what the first one made for all units, and does not wait for it."""
    engine_streams.get_device_streams(CPU)._ones.clear()
    first, second = (core.fully_shard(nn.Linear(WIDTH, WIDTH), reshard_after_forward=False) for _ in range(2))
    other = side()
    other.wait_stream(devices.get_current_stream(CPU))
    square(first(torch.ones(2, WIDTH))).backward()
    with devices.use_stream(other, CPU):
        square(second(torch.ones(2, WIDTH))).backward()
    devices.get_current_stream(CPU).wait_stream(other)


def trains_in_low_precision(style: Style) -> None:
    train(*made(style, low=True))


def trains_and_keeps_parameters(style: Style) -> None:
    train(*made(style, GRAD_OP))


def trains_without_shards(style: Style) -> None:
    train(*made(style, NONE))


def trains_without_shards_in_low_precision(style: Style) -> None:
    train(*made(style, NONE, low=True))


def trains_with_replicas(style: Style) -> None:
    train(*made(style, HYBRID))


def averages_in_low_precision(style: Style) -> None:
    """Gradients are cast once they are averaged."""
    types = {"param_dtype": LOW}
    wrapped, in_place = (
        {"mixed_precision": core.MixedPrecision(**types)},
        {"mp_policy": core.MixedPrecisionPolicy(**types)},
    )
    train(*made(style, **(wrapped if style.wraps else in_place)))


def accumulates_over_replicas(style: Style) -> None:
    """Sums over the ranks that share shards wait for a sum over replicas."""
    model, optimizer = made(style, HYBRID)
    model.set_requires_all_reduce(False)
    square(model(floats(0, 0))).backward()
    model.set_requires_all_reduce(True)
    train(model, optimizer)


def finalizes_backward_by_a_call(style: Style) -> None:
    """The gradients of some units are kept until then; others are being reduced."""
    model, optimizer = made(style)
    model.set_manual_backward_finalization(True)
    for step in range(2):
        square(model(floats(0, step))).backward()
        handle = model.finalize_backward(async_op=True)
        handle.wait()
        optimizer.step()
        optimizer.zero_grad()


def finalizes_backward_on_a_stream(style: Style) -> None:
    """The handle is waited for where the optimizer runs, of gradients that waited for the call too."""
    model, optimizer = made(style, mp_policy=core.MixedPrecisionPolicy(param_dtype=LOW))  # gradients are cast
    model.set_manual_backward_finalization(True)
    stepping = side()
    for step in range(3):
        with no_sync(model):
            square(model(floats(0, step))).backward()
        if step:
            square(model(floats(1, step))).backward()
        handle = model.finalize_backward(async_op=True)
        stepping.wait_stream(devices.get_current_stream(CPU))
        with devices.use_stream(stepping, CPU):
            handle.wait()
            optimizer.step()
        model.set_post_optim_event(stepping.record_event())
        devices.get_current_stream(CPU).wait_stream(stepping)
        optimizer.zero_grad()


def finalizes_sums_over_replicas(style: Style) -> None:
    """Sums over the ranks that share shards wait for the call."""
    model, optimizer = made(style, HYBRID)
    model.set_manual_backward_finalization(True)
    for is_summed in (False, True):
        model.set_requires_all_reduce(is_summed)
        square(model(floats(0, 0))).backward()
    model.finalize_backward(async_op=True).wait()
    optimizer.step()


def fails_to_finalize_backward(style: Style) -> None:
    """Gradients that were being reduced are dropped, and the next iteration works."""
    model, optimizer = made(style)
    model.set_manual_backward_finalization(True)

    with no_sync(model):
        square(model(floats(0, 0))).backward()
    model.blocks[1].set_all_reduce_hook(_fail)
    with contextlib.suppress(ValueError):
        model.finalize_backward(async_op=True)
    model.blocks[1].set_all_reduce_hook(lambda _: None)
    square(model(floats(0, 0))).backward()
    model.finalize_backward()
    optimizer.step()


def resets_on_a_stream(style: Style) -> None:
    """Gradients that are being reduced are dropped by another stream than that of the backward."""
    model, optimizer = made(style)
    model.set_manual_backward_finalization(True)
    other = side()
    for failing in (False, True):
        model.blocks[0].set_all_reduce_hook(_fail if failing else lambda _: None)
        with contextlib.suppress(ValueError):
            square(model(floats(0, 0))).backward()
        with devices.use_stream(other, CPU):
            model.reset_iter_state()
    devices.get_current_stream(CPU).wait_stream(other)
    model.blocks[0].set_all_reduce_hook(lambda _: None)
    square(model(floats(0, 0))).backward()
    model.finalize_backward()
    optimizer.step()


def resets_on_a_stream_alone(style: Style) -> None:
    """The same where each rank has everything: the input of a reduction is its output."""
    model, _ = made(style, mesh=grid(2))
    model.blocks[0].set_all_reduce_hook(_fail)
    with contextlib.suppress(ValueError):
        square(model(floats(0, 0))).backward()
    model.reset_iter_state()


def resets_one_unit(style: Style) -> None:
    """No later reduction orders the memory of the one that was dropped."""
    model = core.fully_shard(nn.Linear(4, 4))
    model.set_manual_backward_finalization(True)
    for _ in range(2):
        model(torch.ones(2, 4, requires_grad=True)).sum().backward()
        model.reset_iter_state()


def accumulates_alone(style: Style) -> None:
    """Each rank has everything; a sum is added to by another before both are summed over ranks."""
    model, optimizer = made(style, mesh=grid(2))
    model.set_requires_all_reduce(False)
    square(model(floats(0, 0))).backward()
    model.set_requires_all_reduce(True)
    train(model, optimizer)


def averages_over_replicas_in_low_precision(style: Style) -> None:
    """Gradients are cast once they are summed over replicas."""
    policy = core.MixedPrecisionPolicy(param_dtype=LOW)
    train(*made(style, HYBRID, mp_policy=policy))


class _Collective:
    """A user's collective, which runs beside the stream that starts it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, out: torch.Tensor, full: torch.Tensor, group: Any, op: Any = None, **_: Any) -> Any:
        options = {} if op is None else {"op": op}
        return self._function(out, full, group=group, async_op=True, **options)


def uses_collectives_of_the_user(style: Style) -> None:
    model, optimizer = made(style)
    for module in [model, *model.blocks]:
        module.set_custom_all_gather(_Collective(dist.all_gather_into_tensor))
        module.set_custom_reduce_scatter(_Collective(dist.reduce_scatter_tensor))
    train(model, optimizer)
    model(floats(0, 0))
    model.blocks[0].unshard(async_op=True)
    model.blocks[0].reshard()


def drops_extended_parameters_of_a_users_collective(style: Style) -> None:
    model = core.fully_shard(extended())
    model.set_custom_all_gather(_Collective(dist.all_gather_into_tensor))
    train_extended(model)
    model.unshard(async_op=True)
    model.reshard()


def _fail(_: torch.Tensor) -> None:
    raise ValueError("on purpose")


def is_dropped_while_gradients_are_reduced(style: Style) -> None:
    model, _ = made(style)
    model.set_is_last_backward(False)
    square(model(floats(0, 0))).backward()
    del model
    gc.collect()


def is_dropped_on_another_stream(style: Style) -> None:
    """Its gradients are still being reduced."""
    model, _ = made(style)
    model.set_is_last_backward(False)
    square(model(floats(0, 0))).backward()
    with devices.use_stream(side(), CPU):
        del model
        gc.collect()


def accumulates_and_clips(style: Style) -> None:
    model, optimizer = made(style)
    with no_sync(model):
        square(model(floats(0, 0))).backward()
    square(model(floats(0, 1))).backward()
    clip = model.clip_grad_norm_ if style.wraps else functools.partial(core.clip_grad_norm_, model)
    clip(1.0)
    optimizer.step()
    train(model, optimizer, 1)


def unshards_by_hand_after_a_step(style: Style) -> None:
    model, optimizer = made(style)
    train(model, optimizer, 1)
    model._unshard() if style.wraps else model.unshard()
    train(model, optimizer, 1)
    handle = model._unshard(async_op=True) if style.wraps else model.unshard(async_op=True)
    handle.wait()
    train(model, optimizer, 1)


def drops_parameters_that_are_gathered(style: Style) -> None:
    """They are resharded without having been used."""
    model, optimizer = made(style)
    train(model, optimizer, 1)
    if style.wraps:
        model._unshard(async_op=True)
        with core.FullyShardedDataParallel.summon_full_params(model):
            pass
    else:
        model.unshard(async_op=True)
        model.reshard()
    train(model, optimizer, 1)


def drops_extended_parameters_that_are_gathered(style: Style) -> None:
    model = core.fully_shard(extended())
    train_extended(model)
    model.unshard(async_op=True)
    model.reshard()
    train_extended(model)


def runs_a_unit_below_the_root_after_a_step(style: Style) -> None:
    model, optimizer = made(style)
    train(model, optimizer, 1)
    model.blocks[0](torch.ones(2, WIDTH))
    train(model, optimizer, 1)


def ties_across_units(style: Style) -> None:
    made(style, which=case("tied across units"))


def is_dropped_while_it_is_unsharded(style: Style) -> None:
    model, _ = made(style, GRAD_OP)
    model(floats(0, 0))
    del model
    gc.collect()


def loads_between_the_passes(style: Style) -> None:
    model, optimizer = made(style)
    train(model, optimizer, 1)
    loss = square(model(floats(0, 0)))
    state.load_model_state_dict(model, {name: value * 1.5 for name, value in state.model_state_dict(model).items()})
    loss.backward()


def writes_between_the_passes(style: Style) -> None:
    """By operations of torch alone, which the engine does not see."""
    model, _ = made(style)
    loss = square(model(floats(0, 0)))
    with torch.no_grad():
        for parameter in model.blocks.parameters():
            parameter.mul_(1.5)
    loss.backward()


def loads_a_state_dict_between_the_passes(style: Style) -> None:
    """By torch's own method."""
    model, _ = made(style)
    loss = square(model(floats(0, 0)))
    model.blocks.load_state_dict({name: value * 1.5 for name, value in model.blocks.state_dict().items()})
    loss.backward()


def replaces_data_between_the_passes(style: Style) -> None:
    model, _ = made(style)
    loss = square(model(floats(0, 0)))
    for parameter in model.blocks.parameters():
        parameter.data = parameter.data * 2
    loss.backward()


def replaces_data_within_a_forward(style: Style) -> None:
    """Of a unit that has not computed yet."""
    model, _ = made(style)

    def replace(*_: Any) -> None:
        for parameter in model.blocks[1].parameters():
            parameter.data = parameter.data * 2

    model.blocks[0].register_forward_hook(replace)
    square(model(floats(0, 0))).backward()


def loads_within_a_forward(style: Style) -> None:
    """Into a unit that has not computed yet."""
    model, optimizer = made(style)
    train(model, optimizer, 1)
    values = {name: value * 1.5 for name, value in state.model_state_dict(model.blocks[1]).items()}

    def load(*_: Any) -> None:
        state.load_model_state_dict(model.blocks[1], values)

    model.blocks[0].register_forward_hook(load)
    square(model(floats(0, 0))).backward()


def replaces_types_between_the_passes(style: Style) -> None:
    model, _ = made(style)
    model(floats(0, 0))
    model.double()
    model(floats(0, 0).double())


def changes_kept_parameters(style: Style, *, overlaps: bool = False) -> None:
    """They are written back when they are gathered again in another type, within a forward."""
    model, _ = made(style, GRAD_OP, low=True)
    if overlaps:
        overlap_copies({"model": model})
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setenv("FSDP_USE_FULL_PREC_IN_EVAL", "1")
        model.eval()
        model(floats(0, 0))
        for parameter in model.blocks.parameters():
            parameter.mul_(2)
        model.train()
        model(floats(0, 0))


def puts_a_full_parameter_between_the_passes(style: Style) -> None:
    model, _ = made(style)
    loss = square(model(floats(0, 0)))
    up = model.blocks[1].up
    up.weight = nn.Parameter(torch.ones(up.out_features, up.in_features))
    loss.backward()


def summons(style: Style) -> None:
    model, optimizer = made(style)
    square(model(floats(0, 0))).backward()
    with core.FullyShardedDataParallel.summon_full_params(model, with_grads=style is not Style.FLAT):
        for parameter in model.parameters():
            parameter.data.mul_(2)
    train(model, optimizer, 1)


def gives_its_full_state(style: Style) -> None:
    model, optimizer = made(style)
    train(model, optimizer, 1)
    state.model_state_dict(model)
    state.optim_state_dict(model, optimizer)
    train(model, optimizer, 1)


def fails_in_backward(style: Style) -> None:
    model, optimizer = made(style)

    x = floats(0, 0).requires_grad_()
    x.register_hook(_fail)
    with contextlib.suppress(ValueError):
        square(model(x)).backward()
    train(model, optimizer, 1)


def reduces_by_a_hook(style: Style) -> None:
    model, optimizer = made(style)
    model.register_comm_hook(comm_hooks.DefaultState(dist.group.WORLD), comm_hooks.reduce_scatter_hook)
    train(model, optimizer)


def averages_by_a_hook(style: Style) -> None:
    model, optimizer = made(style, NONE)
    model.register_comm_hook(comm_hooks.DefaultState(dist.group.WORLD), comm_hooks.allreduce_hook)
    train(model, optimizer)


def changes_gradients_on_a_stream(style: Style) -> None:
    model, optimizer = made(style)
    model.set_all_reduce_hook(lambda gradient: gradient.mul_(2), stream=side())
    train(model, optimizer)


def steps_on_a_stream(style: Style) -> None:
    """The optimizer runs beside the computation, which waits for it in the gathers alone."""
    model, optimizer = made(style)
    stepping = side()
    for number in range(4):
        square(model(floats(0, number))).backward()
        stepping.wait_stream(devices.get_current_stream(CPU))
        with devices.use_stream(stepping, CPU):
            optimizer.step()
        model.set_post_optim_event(stepping.record_event())
        if number == 2:
            model.unshard()
    devices.get_current_stream(CPU).wait_stream(stepping)


def steps_on_a_stream_alone(style: Style) -> None:
    """The same where each rank has everything: parameters are cast on the stream of the computation."""
    stepping = side()
    model, optimizer = made(style, mesh=grid(2), low=True)
    for number in range(3):
        square(model(floats(0, number))).backward()
        stepping.wait_stream(devices.get_current_stream(CPU))
        with devices.use_stream(stepping, CPU):
            optimizer.step()
        model.set_post_optim_event(stepping.record_event())
    devices.get_current_stream(CPU).wait_stream(stepping)


def gathers_by_extensions(style: Style) -> None:
    train_extended(core.fully_shard(extended()))


def gathers_by_extensions_from_itself(style: Style) -> None:
    """Each rank stores everything."""
    train_extended(core.fully_shard(extended(), mesh=grid(2)))


class _Noted(Halved):
    """Its metadata is a tensor."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        inputs, _ = super().fsdp_pre_all_gather(mesh)
        return inputs, self.data_.new_ones(1) * 0

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: torch.Tensor | None = None
    ) -> Any:
        return super().fsdp_post_all_gather((outputs[0] + metadata,), None, param_dtype, out=out)


def gathers_by_extensions_with_metadata(style: Style) -> None:
    module = nn.Linear(6, 8)
    module.weight = nn.Parameter(_Noted(module.weight.detach()))
    train_extended(core.fully_shard(module))


def gathers_by_extensions_within_another_unit(style: Style) -> None:
    """The parameter is freed as soon as its unit has computed."""
    model = nn.Sequential(extended())
    core.fully_shard(model[0])
    train_extended(core.fully_shard(model))


def extended() -> nn.Module:
    module = nn.Linear(6, 8)
    module.weight = nn.Parameter(Scaled(module.weight.detach()))
    return module


def train_extended(model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(3):
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if number == 1:
            model.unshard()


def keeps_slices(style: Style) -> None:
    train(*made(style, reshard_after_forward=2))


class Twice(nn.Module):
    """Computes by the same module twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.inner(x))


def twice_in_slices() -> Any:
    """The second call gathers the slices that the first one keeps."""
    model = Twice()
    core.fully_shard(model.inner, reshard_after_forward=2)
    return core.fully_shard(model)


def keeps_slices_within_a_forward(style: Style) -> None:
    model = twice_in_slices()
    train(model, torch.optim.SGD(model.parameters()))


def drops_slices_that_are_gathered(style: Style) -> None:
    """The parameters are resharded while they are gathered for a backward that does not come."""
    model, _ = made(style, reshard_after_forward=2)
    model(floats(0, 0))
    for block in model.blocks:
        block.unshard(async_op=True)
        block.reshard()


class TwiceExtended(nn.Module):
    """A unit gathered by extensions that runs twice in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = core.fully_shard(extended())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.inner(2 * x)


def twice_into_kept_storage() -> Any:
    """The second call gathers into the memory that the first one reads."""
    model = core.fully_shard(TwiceExtended())
    model.set_keep_unsharded_storage(True)
    return model


def gathers_into_kept_storage(style: Style) -> None:
    train_extended(twice_into_kept_storage())


def twice_cast_into_kept_storage() -> Any:
    """The second call casts parameters into the memory that the first one reads; each rank stores everything."""
    model = Twice()
    settings = {"mesh": grid(2), "mp_policy": core.MixedPrecisionPolicy(param_dtype=LOW)}
    core.fully_shard(model.inner, **settings)
    core.fully_shard(model, **settings)
    model.set_keep_unsharded_storage(True)
    return model


def casts_into_kept_storage(style: Style) -> None:
    model = twice_cast_into_kept_storage()
    train(model, torch.optim.SGD(model.parameters()))


def copies_for_a_background_save(style: Style, *, deferred: frozenset[str] = frozenset()) -> None:
    """What a state on a device goes through in `async_save`, steps that change it, and what is written: twice."""
    tensors = {"turned": torch.zeros(300, 200).t(), "flat": torch.zeros(50_000), "last": torch.zeros(50_000)}
    arrays = {(name,): get_tensor_shards(tensor) for name, tensor in tensors.items()}
    chunks = [PayloadChunk(path, each.shape, "float32", full_box(each.shape)) for path, each in arrays.items()]
    files, pool = arrange_files(tuple(chunks)), BufferPool(make_buffer)
    for _ in range(2):
        for tensor in tensors.values():
            tensor.add_(1)
        area = StagingArea(pool, None)
        area.fill(files, FlattenedState(arrays=arrays), {(name,) for name in deferred})
        for name, tensor in tensors.items():
            if name in deferred:
                devices.wait_for_deferred_copies()
            tensor.add_(1)
        for file in files:
            for part in area.blocks(PayloadFile("f", b"", file.chunks, (), (), file.nbytes)):
                devices._streams.checker.read_on_host(address_of(part), len(part))


def defers_copies_for_a_background_save(style: Style) -> None:
    copies_for_a_background_save(style, deferred=frozenset({"flat"}))


def overlap_copies(saved: Any, *, overlaps: bool = True) -> None:
    """Copy a state as `async_save(..., overlap_staging=True)` does."""
    flattened = flatten_state(saved, dist.get_rank(), dist.get_world_size())
    chunks = [
        PayloadChunk(path, shard.box.size, "float32", shard.box)
        for path, array in flattened.arrays.items()
        for shard in array.shards
    ]
    deferred = flattened.find_step_written() if overlaps else frozenset()
    assert bool(deferred) is overlaps
    install_write_hooks(flattened.modules.values())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_bytes, "SMALL_BYTES", -1)  # small tensors on the CPU are copied by the host
        StagingArea(BufferPool(make_buffer), None).fill(arrange_files(tuple(chunks)), flattened, deferred)


def steps_after_overlapped_copies(style: Style) -> None:
    model, optimizer = made(style)
    train(model, optimizer, 1)
    for _ in range(2):
        overlap_copies({"model": model, "optim": optimizer})
        train(model, optimizer, 1)


def frees_a_state_after_overlapped_copies(style: Style) -> None:
    model, optimizer = made(style)
    train(model, optimizer, 1)
    overlap_copies({"model": model, "optim": optimizer})
    del model, optimizer
    gc.collect()


def trains_buffers_after_overlapped_copies(style: Style) -> None:
    """Its forward writes them."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    overlap_copies({"model": model, "numbers": torch.ones(3)})
    model(torch.ones(2, 4))


def loads_after_overlapped_copies(style: Style) -> None:
    model, optimizer = made(style)
    train(model, optimizer, 1)
    values = {name: value * 1.5 for name, value in state.model_state_dict(model).items()}
    overlap_copies({"model": model})
    state.load_model_state_dict(model, values)


def loads_an_optimizer_after_overlapped_copies(style: Style) -> None:
    model, optimizer = made(style)
    train(model, optimizer, 1)
    values = state.optim_state_dict(model, optimizer)
    overlap_copies({"model": model, "optim": optimizer})
    state.load_optim_state_dict(model, optimizer, values)


def loads_by_torch_after_overlapped_copies(style: Style) -> None:
    """Into a part of a model that is saved."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    values = {name: value * 1.5 for name, value in model[0].state_dict().items()}
    overlap_copies({"model": model})
    model[0].load_state_dict(values)


def receives_after_overlapped_copies(style: Style) -> None:
    model = nn.Linear(4, 4)
    sent = io.BytesIO(b"".join(bytes(part) for part in build_stream({"w": torch.ones(4, 4)})))
    overlap_copies({"model": model})
    read_stream(sent.readinto, {"w": model.weight.detach()})


def broadcasts_after_overlapped_copies(style: Style) -> None:
    model = nn.Linear(4, 4)
    overlap_copies({"model": model})
    materialize.sync_module_states(model)


def writes_by_hand_after_overlapped_copies(style: Style) -> None:
    model = nn.Linear(4, 4)
    overlap_copies({"model": model})
    SaveHandle(AsyncSaveTask("step", None)).wait_for_staging()
    with torch.no_grad():
        model.weight.mul_(2)


def summons_after_overlapped_copies(style: Style) -> None:
    model, _ = made(style)
    overlap_copies({"model": model})
    with core.FullyShardedDataParallel.summon_full_params(model):
        pass


def registers_flats_after_overlapped_copies(style: Style) -> None:
    model, _ = made(style)
    overlap_copies({"model": model})
    unit = model.sharding_unit
    with register_flat_params([(model, unit)], "flat"):
        model.flat.data = model.flat.data * 2


def puts_a_parameter_after_overlapped_copies(style: Style) -> None:
    model, _ = made(style)
    overlap_copies({"model": model})
    up = model.blocks[1].up
    up.weight = nn.Parameter(torch.ones(up.out_features, up.in_features))
    model(floats(0, 0))


def replaces_data_after_overlapped_copies(style: Style) -> None:
    """The full parameters alias the stored ones."""
    model, _ = made(style, NONE)
    overlap_copies({"model": model})
    for parameter in model.parameters():
        parameter.data = parameter.data * 2
    model(floats(0, 0))


def changes_kept_parameters_after_overlapped_copies(style: Style) -> None:
    changes_kept_parameters(style, overlaps=True)


def address_of(data: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(data))


Scenario = Callable[[Style], None]
EVERYWHERE: tuple[Scenario, ...] = (
    *(trains, trains_in_low_precision, trains_and_keeps_parameters, trains_without_shards, accumulates_and_clips),
    *(trains_without_shards_in_low_precision, averages_in_low_precision),
    *(
        drops_parameters_that_are_gathered,
        unshards_by_hand_after_a_step,
        runs_a_unit_below_the_root_after_a_step,
        ties_across_units,
    ),
    *(is_dropped_while_it_is_unsharded, loads_between_the_passes),
    *(writes_between_the_passes, replaces_data_between_the_passes, replaces_types_between_the_passes),
    *(replaces_data_within_a_forward, loads_within_a_forward),
    *(gives_its_full_state, fails_in_backward, steps_after_overlapped_copies, frees_a_state_after_overlapped_copies),
    *(loads_after_overlapped_copies, loads_an_optimizer_after_overlapped_copies),
    replaces_data_after_overlapped_copies,
)
WRAPPED: tuple[Scenario, ...] = (summons, reduces_by_a_hook, averages_by_a_hook, summons_after_overlapped_copies)
IN_PLACE: tuple[Scenario, ...] = (
    *(changes_gradients_on_a_stream, steps_on_a_stream, steps_on_a_stream_alone, changes_kept_parameters),
    *(gathers_by_extensions, gathers_by_extensions_from_itself, is_dropped_while_gradients_are_reduced),
    *(copies_for_a_background_save, drops_extended_parameters_that_are_gathered),
    *(loads_a_state_dict_between_the_passes, gathers_by_extensions_within_another_unit),
    *(gathers_into_kept_storage, casts_into_kept_storage),
    *(finalizes_backward_by_a_call, finalizes_backward_on_a_stream),
    *(resets_on_a_stream_alone, resets_one_unit, accumulates_alone, gathers_by_extensions_with_metadata),
    *(uses_collectives_of_the_user, drops_extended_parameters_of_a_users_collective),
    *(fails_to_finalize_backward, resets_on_a_stream, is_dropped_on_another_stream, trains_two_models_on_two_streams),
    *(trains_buffers_after_overlapped_copies, loads_by_torch_after_overlapped_copies, receives_after_overlapped_copies),
    *(broadcasts_after_overlapped_copies, writes_by_hand_after_overlapped_copies, defers_copies_for_a_background_save),
    changes_kept_parameters_after_overlapped_copies,
)
FOUR_RANKS: tuple[Scenario, ...] = (
    *(trains_with_replicas, accumulates_over_replicas, keeps_slices, keeps_slices_within_a_forward),
    *(finalizes_sums_over_replicas, drops_slices_that_are_gathered, averages_over_replicas_in_low_precision),
)


def found(scenario: Scenario, style: Style) -> list[str]:
    """What the checker finds in a scenario."""
    warnings.simplefilter("ignore")
    with contextlib.suppress(UnorderedError), checked() as checker:
        scenario(style)
    assert checker.operations
    return list(checker.found.values())


def all_found(world: int, scenarios: list[tuple[Scenario, Style]]) -> dict[str, list[str]]:
    """What is found in scenarios on some ranks, by their names."""

    def body(rank, world):
        rows = [(f"{scenario.__name__} ({style.value})", found(scenario, style)) for scenario, style in scenarios]
        return {name: texts for name, texts in rows if texts}

    return {f"{name} on rank {i}": texts for i, each in enumerate(run(world, body)) for name, texts in each.items()}


@pytest.mark.parametrize("style", list(Style), ids=[style.value for style in Style])
def test_all_accesses_are_ordered(style):
    scenarios = EVERYWHERE + (WRAPPED if style.wraps else IN_PLACE)
    more = (
        puts_a_full_parameter_between_the_passes,
        puts_a_parameter_after_overlapped_copies,
        registers_flats_after_overlapped_copies,
    )
    more = more if style is Style.FLAT else ()
    assert all_found(2, [(each, style) for each in scenarios + more]) == {}


def test_all_accesses_of_several_groups_are_ordered():
    rows = [(trains_with_replicas, style) for style in Style]
    in_place = [(scenario, Style.EACH) for scenario in FOUR_RANKS[1:]]
    assert all_found(4, rows + in_place) == {}


def sums_that_are_awaited_early(style: Style, strategy: Strategy, latest: int) -> tuple[int, int]:
    """How often gradients were reduced while the latest sums over replicas ran, and how many sums were awaited."""
    sums: list[tuple[Any, int]] = []
    is_awaited: list[bool] = []
    sum_over_replicas, start = ShardGroup.all_reduce, fsdp_unit.start_reduce_scatters
    with checked() as checker, pytest.MonkeyPatch.context() as patch:

        def noted_sum(group: ShardGroup, *args: Any) -> Any:
            pending = sum_over_replicas(group, *args)
            stream = checker.current
            sums.append((stream, stream.clock[stream.number]))
            return pending

        def noted_start(reducers: list[GradientReducer], settings: Any) -> None:
            known = checker.current.clock
            is_awaited.extend(known.get(stream.number, 0) >= number for stream, number in sums[-latest:])
            start(reducers, settings)

        patch.setattr(ShardGroup, "all_reduce", noted_sum)
        patch.setattr(fsdp_unit, "start_reduce_scatters", noted_start)
        train(*made(style, strategy), 1)
    return len(is_awaited), sum(is_awaited)


def gathers_that_are_awaited_early(style: Style) -> tuple[int, int]:
    """How often parameters were awaited while later ones were gathered, and how often these were awaited too."""
    gathered: dict[UnshardedParams, int] = {}
    is_awaited: list[bool] = []
    start, wait = fsdp_unit.start_all_gathers, UnshardedParams.wait_all_gather
    with checked() as checker, pytest.MonkeyPatch.context() as patch:
        stream = engine_streams.get_device_streams(CPU)._get_gather_stream()

        def noted_start(buckets: list[UnshardedParams], **settings: Any) -> None:
            start(buckets, **settings)
            gathered.update(dict.fromkeys(buckets, stream.clock[stream.number]))

        def noted_wait(params: UnshardedParams, **settings: Any) -> int:
            own, address = gathered.pop(params, None), wait(params, **settings)
            later = [number for number in gathered.values() if own is not None and number > own]
            if later:
                is_awaited.append(checker.current.clock.get(stream.number, 0) >= min(later))
            return address

        patch.setattr(fsdp_unit, "start_all_gathers", noted_start)
        patch.setattr(UnshardedParams, "wait_all_gather", noted_wait)
        model, optimizer = made(style, low=True)  # shards are cast on the stream of the gathers
        model.set_modules_to_forward_prefetch([*model.blocks])
        model.blocks[-1].set_modules_to_backward_prefetch([*model.blocks[:-1]])
        train(model, optimizer, 1)
    return len(is_awaited), sum(is_awaited)


def test_parameters_are_not_awaited_with_those_that_were_prefetched_later():
    for count, early in run(2, lambda rank, world: gathers_that_are_awaited_early(Style.EACH)):
        assert count >= 2
        assert early == 0


@dataclass
class Ahead:
    """How far all-gathers ran ahead of the computation in two steps."""

    units: int = 0  # freed when another was gathered, and whose computation the host did not wait for
    outputs: int = 0  # alive at once, until their copies are ordered before later all-gathers
    host_waits: int = 0  # for the limit


def gathers_ahead(style: Style) -> Ahead:
    ahead, freed, seen = Ahead(), [], WeakSet()
    start, reshard = fsdp_unit.start_all_gathers, UnshardedParams.reshard
    wait = engine_streams.RateLimiter.wait
    with checked() as checker, pytest.MonkeyPatch.context() as patch:

        def noted_start(buckets: list[UnshardedParams], **settings: Any) -> None:
            start(buckets, **settings)
            known = checker.host.get(checker.current.number, 0)
            ahead.units = max(ahead.units, sum(number > known for number in freed))
            for params in buckets:
                seen.update(params._rows)
            ahead.outputs = max(ahead.outputs, len(seen))

        def noted_reshard(params: UnshardedParams, **settings: Any) -> None:
            if params.is_unsharded:
                freed.append(checker.current.clock[checker.current.number])
            reshard(params, **settings)

        def noted_wait(limiter: engine_streams.RateLimiter) -> None:
            ahead.host_waits += 1
            wait(limiter)

        patch.setattr(fsdp_unit, "start_all_gathers", noted_start)
        patch.setattr(UnshardedParams, "reshard", noted_reshard)
        patch.setattr(engine_streams.RateLimiter, "wait", noted_wait)
        train(*made(style))
    return ahead


@pytest.mark.parametrize("style", [style for style in Style if style.wraps])
def test_gathers_run_at_most_three_units_ahead_of_the_computation(style):
    assert max(ahead.units for ahead in run(2, lambda rank, world: gathers_ahead(style))) <= 3


def test_fully_shard_has_two_gather_outputs_and_never_waits_on_the_host():
    for ahead in run(2, lambda rank, world: gathers_ahead(Style.EACH)):
        assert ahead.outputs == 2
        assert ahead.host_waits == 0


def copies_that_are_awaited(style: Style, *, overlaps: bool) -> list[bool]:
    """Whether a stream waits for a save's copies: behind the call, a forward and backward, and an optimizer step."""
    awaited = []
    with checked() as checker:
        model, optimizer = made(style)
        train(model, optimizer, 1)
        overlap_copies({"model": model, "optim": optimizer}, overlaps=overlaps)
        copying = staging._side_streams[CPU]
        last = copying.clock[copying.number]

        def note() -> None:
            others = [stream for stream in checker.streams if stream is not copying]
            awaited.append(any(stream.clock.get(copying.number, 0) >= last for stream in others))

        note()
        square(model(floats(0, 1))).backward()
        note()
        optimizer.step()
        note()
    return awaited


@STYLES
def test_only_the_optimizer_step_waits_for_overlapped_copies(style):
    def body(rank, world):
        return [copies_that_are_awaited(style, overlaps=overlaps) for overlaps in (True, False)]

    assert run(2, body) == [[[False, False, True], [True, True, True]]] * 2


@pytest.mark.parametrize("keeps", [False, True], ids=["", "kept storage"])
@STYLES
def test_a_graph_can_capture_forward_and_backward(style, keeps):
    """The host waits for nothing meanwhile, streams wait for no event from outside, and none is left behind."""

    def body(rank: int, world: int) -> int:
        with checked() as checker:
            model, optimizer = made(style, low=True)
            if keeps and not style.wraps:
                model.set_keep_unsharded_storage(True)
            train(model, optimizer)
            with checker.capturing():
                for _ in range(2):
                    square(model(floats(0, 0))).backward()
            train(model, optimizer)
            return checker.operations

    assert min(run(2, body)) > 0


@pytest.mark.parametrize(
    ("world", "make", "width"),
    [(4, twice_in_slices, 5), (2, twice_into_kept_storage, 6), (2, twice_cast_into_kept_storage, 5)],
)
def test_a_graph_can_capture_a_unit_that_runs_twice(world, make, width):
    """The second gather waits for what the first run does with the memory that it reads or fills."""

    def body(rank: int, world: int) -> None:
        with checked() as checker:
            model = make()
            model(torch.ones(2, width)).sum().backward()
            with checker.capturing():
                for _ in range(2):
                    model(torch.ones(2, width)).sum().backward()

    run(world, body)


@pytest.mark.parametrize(("world", "strategy", "latest"), [(2, NONE, 1), (4, HYBRID, 9)], ids=["no shards", "replicas"])
def test_a_sum_over_replicas_runs_beside_the_backward_of_later_units(world, strategy, latest):
    """Without shards the sum is made in the memory of the gradients: one runs beside the next unit."""

    def body(rank, world):
        return [sums_that_are_awaited_early(style, strategy, latest) for style in Style]

    found = [row for each in run(world, body) for row in each]
    assert all(count > 1 for count, _ in found)
    assert [early for _, early in found] == [0] * len(found)


@STYLES
def test_gradients_that_only_another_rank_has_are_added_once(style):
    """With streams the host reads at the end of the backward which ranks have them, without it at once."""
    which = case("used on some ranks")

    def gradients(rank: int) -> list[Any]:
        model, _ = made(style, which=which)
        square(model((rows(rank, 0), {rank, 1}))).backward()
        grads = [each.grad for each in model.parameters()]
        return [None if each is None else (each if style.wraps else each.to_local()).tolist() for each in grads]

    def body(rank, world):
        expected = gradients(rank)
        with checked():
            return gradients(rank) == expected

    assert run(2, body) == [True, True]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("suite", ["order", "parity", "gaps"])
def test_all_accesses_of_a_suite_are_ordered(suite):
    path = Path(__file__).with_name(f"test_{suite}.py")
    environment = {**os.environ, "SHARDCKPT_TEST_STREAMS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-20000:]
