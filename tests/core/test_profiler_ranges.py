"""A profile of a step shows what the engine does, under the names that torch's FSDP2 gives it."""

from __future__ import annotations

import inspect

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_param_group, _fsdp_state

from shardckpt.core.modules.autograd_hooks import profile_range
from tests.kit.models.torch_limits import compares_with_newer_torch
from tests.kit.models.under_test import core
from tests.kit.ranks.harness import run

ROOT = "FSDPSequential"
FORWARD = [
    *("root_pre_forward", f"pre_forward ({ROOT})", f"all_gather ({ROOT})", f"all_gather_copy_out ({ROOT})"),
    *("pre_forward (0)", "all_gather (0)", "all_gather_copy_out (0)", "post_forward (0)"),
    *("pre_forward (1)", "all_gather (1)", "all_gather_copy_out (1)", "post_forward (1)"),
    f"post_forward ({ROOT})",
]
BACKWARD = [
    *(f"pre_backward ({ROOT})", "backward_prefetch for 1", "all_gather (1)"),
    *("pre_backward (1)", "all_gather_copy_out (1)", "backward_prefetch for 0", "all_gather (0)"),
    *("post_backward_reshard (1)", "post_backward_reduce (1)", "post_backward_rs_wait (1)"),
    *("pre_backward (0)", "all_gather_copy_out (0)", "root_post_backward_callback"),
    *("post_backward_reshard (0)", "post_backward_reduce (0)", "post_backward_rs_wait (0)"),
    *(f"post_backward_reshard ({ROOT})", f"post_backward_reduce ({ROOT})", f"post_backward_rs_wait ({ROOT})"),
]


def profiled(rank, world):
    """The ranges of the second step of two units below a root with a head, in the order in which they begin."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    for each in (model[0], model[1], model):
        core.fully_shard(each)
    model(torch.ones(2, 4)).sum().backward()
    with torch.profiler.profile() as profile:
        model(torch.ones(2, 4)).sum().backward()
    events = sorted(profile.events(), key=lambda event: event.time_range.start)
    return [event.name.removeprefix("FSDP::") for event in events if event.name.startswith("FSDP::")]


def test_a_profile_shows_the_phases_of_each_unit_in_order():
    assert run(2, profiled) == [[*FORWARD, *BACKWARD]] * 2


@compares_with_newer_torch
def test_torch_has_the_same_labels():
    theirs = inspect.getsource(_fsdp_param_group) + inspect.getsource(_fsdp_state)
    labels = {each.partition(" ")[0] for each in [*FORWARD, *BACKWARD]}
    labels |= {"inputs_to_device", "cast_forward_inputs", "cast_forward_outputs"}
    labels = {each for each in labels if not each.endswith("_prefetch")}  # made of the pass and this word
    assert {each for each in labels if f"FSDP::{each}" not in theirs} == set()
    assert "_prefetch for " in theirs


def test_without_a_profiler_no_range_is_made():
    assert profile_range("all_gather", "layers.0") is profile_range("pre_forward")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert profile_range("all_gather", "layers.0") is not profile_range("pre_forward")
