"""Kernels and engine features that only a GPU has or checks: extensions, aligned addresses, float8, graphs.

Each case trains in the fake world of `late_collectives`, and returns what went wrong. They run on the CPU too, where
float8 is multiplied in float32, and a graph is a second call.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardckpt import core
from tests.kit.models.extensions import KEPT
from tests.kit.models.models import Block, Stack
from tests.kit.ranks import gpu_scenarios as scenarios
from tests.kit.ranks.late_collectives import WORLD, replaced_collectives

WIDTH = 64
ROWS = 128
LOW = torch.bfloat16
FLOAT8 = torch.float8_e4m3fn


def shard_blocks(model: nn.Module, device: str, **settings: Any) -> nn.Module:
    """Shard the children of a model, and the model."""
    mesh = init_device_mesh(device, (WORLD,))
    for block in model.children():
        core.fully_shard(block, mesh=mesh, **settings)
    return core.fully_shard(model, mesh=mesh, **settings)


def train(model: nn.Module, device: str, steps: int = 3) -> list[float]:
    """Train on one batch, and return the losses."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.01), []
    inputs = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).to(device)
    with replaced_collectives(device, is_late=True):
        for _ in range(steps):
            loss = model(inputs).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def check_losses(losses: list[float]) -> list[str]:
    """Return what is wrong with losses that have to fall."""
    is_falling = all(later < earlier for earlier, later in itertools.pairwise(losses))
    return [] if is_falling else [f"the losses do not fall: {losses}"]


# -------------------------------------------------------------------------------------------------------- extensions


def cast_to_low(self: torch.Tensor, mesh: Any) -> Any:
    return (self.detach().as_subclass(torch.Tensor).to(LOW),), None


def show_gathered(self: torch.Tensor, outputs: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
    return None if out is not None else (outputs[0], outputs)


def train_with_extensions(device: str) -> list[str]:
    """Train weights whose unsharded form is a view of what was gathered, with collectives that copy in Python."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(2)))
    shard_blocks(model.to(device), device, mp_policy=core.MixedPrecisionPolicy(LOW, torch.float32))
    for parameter in model.parameters():
        local = parameter._local_tensor
        local.fsdp_pre_all_gather = cast_to_low.__get__(local)
        local.fsdp_post_all_gather = show_gathered.__get__(local)
    return check_losses(train(model, device))


# --------------------------------------------------------------------------------------------------------- alignment


def multiply_groups(x: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """Multiply each group of as many rows by its expert."""
    size = len(x) // len(experts)
    ends = torch.arange(size, len(x) + 1, size, dtype=torch.int32, device=x.device)
    return torch._grouped_mm(x, experts, offs=ends)


class Experts(nn.Module):
    """Experts behind a head of odd size, which would move them off their alignment."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 10)
        self.experts = nn.Parameter(torch.randn(WORLD, WIDTH, WIDTH) / WIDTH)
        self.addresses: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.addresses += [parameter.data_ptr() for parameter in self.parameters()]
        return x + multiply_groups(x, self.experts) + self.head(x).mean(1, keepdim=True)


def find_missing_grouped_mm(device: str) -> str:
    """Return why experts cannot be multiplied here; empty if they can."""
    if not hasattr(torch, "_grouped_mm"):
        return f"torch {torch.__version__} has no _grouped_mm"
    experts = torch.zeros(WORLD, WIDTH, WIDTH, dtype=LOW, device=device, requires_grad=True)
    try:
        multiply_groups(experts[0].repeat(ROWS // WIDTH, 1), experts).square().sum().backward()
    except (RuntimeError, NotImplementedError) as error:
        return f"_grouped_mm does not run here: {error}"
    return ""


def train_experts(device: str) -> list[str]:
    """Train `_grouped_mm`, which needs addresses that 16 divides."""
    torch.manual_seed(0)
    model = shard_blocks(
        nn.Sequential(*(Experts() for _ in range(2))).to(device),
        device,
        mp_policy=core.MixedPrecisionPolicy(LOW, torch.float32),
    )
    found = check_losses(train(model, device))
    addresses = [address for block in model for address in block.addresses]
    addresses += [scenarios.get_local(parameter).data_ptr() for parameter in model.parameters()]
    return found + [f"address {address} % 16 = {address % 16}" for address in addresses if address % 16]


# ------------------------------------------------------------------------------------------------------------ float8


class Float8Weight(torch.Tensor):
    """A gathered weight: float8 with a scale for each row."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, data.size(), dtype=LOW, device=data.device)

    def __init__(self, data: torch.Tensor, scale: torch.Tensor) -> None:
        self.data_, self.scale = data, scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in KEPT:
            return cls(args[0].data_, args[0].scale)
        raise NotImplementedError(f"{func} on float8")


def cast_to_float8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows in float8 and their scales."""
    scale = x.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / torch.finfo(FLOAT8).max
    return (x / scale).to(FLOAT8), scale


class ScaledMatmul(torch.autograd.Function):
    """x @ weight.t() in float8; its backward computes in bfloat16."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        rows, scale = cast_to_float8(x)
        if x.device.type == "cuda":
            return torch._scaled_mm(
                rows, weight.data_.t(), scale_a=scale, scale_b=weight.scale.t().contiguous(), out_dtype=LOW
            )
        return ((rows.float() * scale) @ (weight.data_.float() * weight.scale).t()).to(LOW)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad @ (weight.data_.to(LOW) * weight.scale.to(LOW)), grad.t() @ x


class Float8Linear(nn.Linear):
    """A linear layer whose weight is gathered in float8."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ScaledMatmul.apply(x, self.weight)


def send_float8(self: torch.Tensor, mesh: Any) -> Any:
    return cast_to_float8(self.detach().as_subclass(torch.Tensor)), None


def show_float8(self: torch.Tensor, outputs: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
    return None if out is not None else (Float8Weight(*outputs), outputs)


def find_missing_float8(device: str) -> str:
    """Return why float8 cannot be multiplied here; empty if it can."""
    if device == "cuda" and torch.cuda.get_device_capability() < (9, 0):
        return "scales of rows need a GPU of compute capability 9.0"
    return ""


def train_in_float8(device: str) -> list[str]:
    """Train weights that are gathered in float8, and multiplied by `_scaled_mm` on a GPU."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(Float8Linear(WIDTH, WIDTH, bias=False), nn.RMSNorm(WIDTH)) for _ in range(2)),
        nn.Sequential(Float8Linear(WIDTH, WIDTH, bias=False)),
    )
    shard_blocks(model.to(device), device, mp_policy=core.MixedPrecisionPolicy(LOW, torch.float32))
    for parameter in model.parameters():
        local = parameter._local_tensor
        if local.dim() == 2:
            local.fsdp_pre_all_gather = send_float8.__get__(local)
            local.fsdp_post_all_gather = show_float8.__get__(local)
    return check_losses(train(model, device))


# ------------------------------------------------------------------------------------------------------------ graphs


class Twice(Stack):
    """Every block runs twice in a forward."""

    block = Block

    def call(self, block: nn.Module, x: torch.Tensor, index: int) -> Any:
        return block(block(x))


def capture(device: str, work: Callable[[], None]) -> Callable[[], None]:
    """Return what replays a graph of some work; on the CPU the work."""
    if device != "cuda":
        return work
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def replay_graph(device: str, low: bool = False, keeps: bool = False, **settings: Any) -> list[str]:
    """Capture forward and backward, and replay them in three steps; return which shards differ from those without."""
    policy = core.MixedPrecisionPolicy(LOW, torch.float32) if low else core.MixedPrecisionPolicy()

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = scenarios.build(device, "in place", Twice, mp_policy=policy, **settings)
        model.set_keep_unsharded_storage(keeps)
        return model, torch.optim.SGD(model.parameters(), lr=0.01)

    eager, captured = build(), build()
    inputs = torch.zeros(4, 5, device=device)

    def run() -> None:
        captured[0].zero_grad(set_to_none=True)
        scenarios.compute_loss(captured[0], inputs).backward()

    with replaced_collectives(device, is_late=True):
        scenarios.compute_loss(captured[0], inputs).backward()  # what is built at a first step is not captured
        replay = capture(device, run)
        for step in range(3):
            batch = scenarios.get_batch(step, 0, device)
            inputs.copy_(batch)
            replay()
            captured[1].step()
            eager[0].zero_grad()
            scenarios.compute_loss(eager[0], batch).backward()
            eager[1].step()
    pairs = zip(*(map(scenarios.get_local, each[0].parameters()) for each in (eager, captured)), strict=True)
    return [f"parameter {index}" for index, pair in enumerate(pairs) if not torch.equal(*pair)]
