"""The most memory that a training step needs, in bytes of the simulated device: no more than torch's own engine."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import init_device_mesh

from tests.core.test_sim_training import FRONTS, batch
from tests.core.test_sim_training import build as build_small
from tests.kit.models.under_test import TORCH, core
from tests.kit.ranks import sim
from tests.kit.ranks.harness import run

if not TORCH:
    from shardckpt.core.params.gradient_reduction import GradientReducer
    from shardckpt.core.runtime import fsdp_unit

pytestmark = pytest.mark.skipif(TORCH, reason="our engine is compared with torch's")

WIDTH, DEPTH, ROWS = 64, 4, 4


class Model(nn.Module):
    """Blocks, and two layers of the root's own; their parameters need more memory than a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(DEPTH)
        )
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def build(engine: Any, front_end: str, low: torch.dtype | None, reduce: torch.dtype | None) -> nn.Module:
    torch.default_generator.manual_seed(3)
    model = Model().to("sim")
    if front_end == "in place":
        policy = engine.MixedPrecisionPolicy(param_dtype=low, reduce_dtype=reduce)
        settings = {"mesh": init_device_mesh("sim", (dist.get_world_size(),)), "mp_policy": policy}
        for block in model.blocks:
            engine.fully_shard(block, **settings)
        return engine.fully_shard(model, **settings)
    settings = {
        "use_orig_params": front_end == "orig",
        "device_id": torch.device("sim"),
        "mixed_precision": engine.MixedPrecision(param_dtype=low, reduce_dtype=reduce),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for index, block in enumerate(model.blocks):
            model.blocks[index] = engine.FullyShardedDataParallel(block, **settings)
        return engine.FullyShardedDataParallel(model, **settings)


def peaks(engine: Any, front_end: str, low: torch.dtype | None, reduce: torch.dtype | None) -> dict[str, int]:
    """Return the peaks of the third step in forward, backward and the optimizer, above what was there before."""
    before = sim.peak(lambda: None)
    model = build(engine, front_end, low, reduce)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    found: dict[str, int] = {}
    losses: list[torch.Tensor] = []
    inputs = torch.ones(ROWS, WIDTH, device="sim", dtype=low)

    def forward() -> None:
        losses.append(model(inputs).float().square().mean())

    def backward() -> None:
        losses.pop().backward()

    for _ in range(3):
        found = {each.__name__: sim.peak(each) for each in (forward, backward, optimizer.step)}
        optimizer.zero_grad()
    return {name: each - before for name, each in found.items()}


def our_peaks(rank: int, world: int, *settings: Any) -> dict[str, int]:
    return peaks(core, *settings)


def torch_peaks(rank: int, world: int, *settings: Any) -> dict[str, int]:
    return peaks(torch_fsdp, *settings)


@pytest.mark.shown_by("[flat-*]", "orig-*")
@pytest.mark.parametrize(
    ("low", "reduce"), [(None, None), (torch.bfloat16, torch.float32)], ids=["fp32", "bf16, sums in fp32"]
)
@FRONTS
def test_a_step_needs_no_more_memory_than_torch(front_end, low, reduce):
    ours, torchs = (sim.ranks(2, each, front_end, low, reduce) for each in (our_peaks, torch_peaks))
    for found, allowed in zip(ours, torchs, strict=True):
        assert found["forward"] <= allowed["forward"]
        assert found["backward"] <= allowed["backward"]
        assert max(found.values()) <= max(allowed.values())


BLOCK, ROOT = 4 * (2 * 4 * WIDTH * WIDTH + 5 * WIDTH), 4 * 2 * (WIDTH * WIDTH + WIDTH)
FLAGS = 1024  # flags of parameters and padding of rows
SLACK = BLOCK // 8  # activations, flags of parameters and padding of rows


def peaks_with_slow_reductions(rank: int, world: int, *settings: Any) -> dict[str, int]:
    """Return the peaks if no reduction is over before the computation waits for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GradientReducer, "is_done", False)
        return peaks(core, *settings)


@pytest.mark.parametrize("low", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("reduce", [None, torch.float32], ids=["sums as computed", "sums in fp32"])
def test_slow_reductions_need_no_more_memory_than_torch(low, reduce):
    ours, torchs = (sim.ranks(2, each, "in place", low, reduce) for each in (peaks_with_slow_reductions, torch_peaks))
    for found, allowed in zip(ours, torchs, strict=True):
        assert found["backward"] <= allowed["backward"] + FLAGS


@FRONTS
def test_a_slow_reduction_holds_one_buffer(front_end):
    """The peak is when the last gradient of the last block but one is there."""
    shards = 3 * (DEPTH * BLOCK + ROOT) // 2  # with the moments of AdamW
    gradients = BLOCK // 2 * 2 + ROOT // 2  # reduced: of the blocks before; not reduced: of the root's last layer
    units = ROOT + 2 * BLOCK  # parameters of the root, the block and the next one
    held = shards + gradients + units + BLOCK + BLOCK  # gradients of the block, the buffer of the block before
    for found in sim.ranks(2, peaks_with_slow_reductions, front_end, None, None):
        assert found["backward"] <= held + SLACK


def order_of_reductions(rank: int, world: int, front_end: str, buffers: int) -> str:
    """Return which reductions start (s) and are waited for (w) in a backward."""
    model, notes = build_small(front_end, "cpu"), []
    if front_end == "in place":
        model.set_reduce_scatter_max_input_buffers(buffers)
    start, wait = fsdp_unit.start_reduce_scatters, GradientReducer.wait_reduce_scatter

    def noted_start(reducers: list[GradientReducer], settings: Any) -> None:
        notes.append("s")
        start(reducers, settings)

    def noted_wait(reducer: GradientReducer) -> Any:
        notes.append("w" if reducer._reduction is not None else "")
        return wait(reducer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fsdp_unit, "start_reduce_scatters", noted_start)
        patch.setattr(GradientReducer, "wait_reduce_scatter", noted_wait)
        patch.setattr(GradientReducer, "is_done", False)
        model(batch(0, "cpu")).sum().backward()
    return "".join(notes)


@FRONTS
def test_without_streams_a_reduction_is_over_before_the_next_unit_computes(front_end):
    """The threads of gloo hold a copy of what they send."""
    for found in run(2, order_of_reductions, front_end, 1):
        assert found == "sw" * 4


def test_without_streams_more_buffers_let_reductions_run_beside_the_next_unit():
    for found in run(2, order_of_reductions, "in place", 2):
        assert found == "s" + "sw" * 3 + "w"
