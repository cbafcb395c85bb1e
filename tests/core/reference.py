"""What training must give: the unsharded model with a hand-written all-reduce; what a sharded one holds, gathered."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from models import Case, square
from torch import nn
from under_test import FSDP

SEGMENTS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
Grad = torch.Tensor | None


def clean(name: str) -> str:
    """A name without the segments that wrappers add."""
    for segment in SEGMENTS:
        name = name.replace(segment, "").removesuffix(segment[:-1])
    return name.rstrip(".")


@dataclass(frozen=True)
class Group:
    """Parameters that the user sees as one: a flat parameter's, or a single original."""

    unit: str
    names: tuple[str, ...]
    dtype: torch.dtype
    trains: bool
    flat: bool


def units(model: nn.Module) -> list[str]:
    """Clean prefixes of the wrapped modules."""
    return [clean(name) for name, module in model.named_modules() if isinstance(module, FSDP)]


def owner(names: list[str], prefixes: Iterable[str]) -> str:
    """The unit that manages the parameter of these clean names: the innermost with all of its users below it."""
    return max((p for p in prefixes if not p or all(name.startswith(p + ".") for name in names)), key=len)


def groups(model: nn.Module, plain: nn.Module, orig: bool) -> list[Group]:
    """What `model` exposes, told by the parameters of its unsharded twin."""
    prefixes = units(model)
    found: dict[Any, Group] = {}
    for name, parameter in plain.named_parameters():
        unit = owner(
            [other for other, each in plain.named_parameters(remove_duplicate=False) if each is parameter], prefixes
        )
        key = name if orig else (unit, parameter.dtype, parameter.requires_grad)
        names = (*found[key].names, name) if key in found else (name,)
        found[key] = Group(unit, names, parameter.dtype, parameter.requires_grad, not orig)
    return list(found.values())


# --------------------------------------------------------------------------------------------- unsharded


def reduce_gradients(plain: nn.Module, shared: list[Group]) -> None:
    """Mean over ranks in fp32 (fp64 stays); unused on all ranks is None, zeros where a group mate is used."""
    parameters = dict(plain.named_parameters())
    used = torch.tensor([float(p.grad is not None) for p in parameters.values()])
    dist.all_reduce(used)
    uses, alive = dict(zip(parameters, used.tolist(), strict=True)), []
    for group in shared:
        if not group.trains:
            continue
        if any(uses[name] for name in group.names):
            alive += [parameters[name] for name in group.names]
    _means(alive)


def _means(parameters: list[nn.Parameter]) -> None:
    """Average the gradients in place, one all-reduce a dtype."""
    wide = {p: torch.float64 if p.dtype == torch.float64 else torch.float32 for p in parameters}
    for dtype in (torch.float32, torch.float64):
        members = [p for p in parameters if wide[p] == dtype]
        if not members:
            continue
        parts = [(p.grad if p.grad is not None else torch.zeros_like(p)).to(dtype).reshape(-1) for p in members]
        total = torch.cat(parts)
        dist.all_reduce(total)
        total /= dist.get_world_size()
        for parameter, part in zip(members, total.split([p.numel() for p in members]), strict=True):
            parameter.grad = part.view(parameter.shape).to(parameter.dtype)


# ----------------------------------------------------------------------------------------------- sharded


def gathered(values: dict[str, Grad]) -> dict[str, list[Grad]]:
    """What each rank holds under each name, 1-D, by one exchange; None where it holds nothing."""
    mine = {name: None if value is None else storage_order(value.detach()).clone() for name, value in values.items()}
    found: list[dict[str, Grad]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, mine)
    return {name: [theirs[name] for theirs in found] for name in values}


def whole(pieces: list[Grad], numel: int, replicated: bool) -> Grad:
    """The full 1-D tensor of which each rank holds a piece, or all of it; None where no rank holds any.

    SHARD_GRAD_OP shows whole parameters in `no_sync` too, and so may any strategy after an exception.
    """
    held = [piece for piece in pieces if piece is not None and piece.numel()]
    if not held:
        return None
    if replicated or (len(held) == dist.get_world_size() and all(piece.numel() == numel for piece in held)):
        assert all(torch.equal(held[0], piece) for piece in held), "replicas differ"
        return held[0][:numel]
    joined = torch.cat(held)
    assert joined.numel() >= numel, f"the ranks hold {joined.numel()} elements of {numel}"
    assert not joined[numel:].count_nonzero(), "padding is not zero"
    return joined[:numel]


def exposed(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters as an optimizer sees them, by clean name."""
    return {clean(name): parameter for name, parameter in model.named_parameters()}


def _match(group: Group, parameters: dict[str, nn.Parameter]) -> nn.Parameter:
    if not group.flat:
        return parameters[group.names[0]]
    prefix = f"{group.unit}." if group.unit else ""
    fitting = [
        parameter
        for name, parameter in parameters.items()
        if name.startswith(f"{prefix}_flat_param")
        and parameter.dtype == group.dtype
        and parameter.requires_grad == group.trains
    ]
    assert len(fitting) == 1, f"unit {group.unit!r} exposes {sorted(parameters)}, wanted one flat parameter for {group}"
    return fitting[0]


def storage_order(tensor: torch.Tensor) -> torch.Tensor:
    """1-D, in the order of memory, as a parameter is flattened."""
    order = sorted(range(tensor.dim()), key=lambda d: -tensor.stride(d))
    return tensor.permute(order).reshape(-1)


def mismatches(
    model: nn.Module, plain: nn.Module, shared: list[Group], replicated: bool, close: Callable[..., Any]
) -> list[str]:
    """Where the sharded model's parameters and gradients differ from its twin's; the same answer on every rank."""
    parameters, twins, wrong = exposed(model), dict(plain.named_parameters()), []
    matched = {group.names[0]: _match(group, parameters) for group in shared}
    gradients = {f"{name}.grad": parameter.grad for name, parameter in matched.items()}
    held = gathered({**matched, **gradients})
    for group in shared:
        name, members = group.names[0], [twins[each] for each in group.names]
        numel = sum(member.numel() for member in members)
        wanted = torch.cat([storage_order(member.detach()) for member in members])
        wrong += _differs(name, whole(held[name], numel, replicated), wanted, close)
        wrong += _differs(f"{name}.grad", whole(held[f"{name}.grad"], numel, replicated), _gradient(members), close)
    return wrong


def _gradient(members: list[nn.Parameter]) -> Grad:
    if all(member.grad is None for member in members):
        return None
    return torch.cat([torch.zeros(m.numel(), dtype=m.dtype) if m.grad is None else _as(m, m.grad) for m in members])


def _as(parameter: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
    """A gradient in the order of its parameter's memory, whatever its own strides are."""
    order = sorted(range(parameter.dim()), key=lambda d: -parameter.stride(d))
    return gradient.permute(order).reshape(-1)


def _differs(name: str, found: Grad, wanted: Grad, close: Callable[..., Any]) -> list[str]:
    if found is None or wanted is None:
        told = [f"{name}: found {_brief(found)}, expected {_brief(wanted)}"]
        return [] if found is None and wanted is None else told
    try:
        close(found, wanted)
    except AssertionError as error:
        return [f"{name}: {' '.join(str(error).split())[:300]}"]
    return []


def _roughly(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-3)


def _brief(value: Grad) -> str:
    return "None" if value is None else f"a tensor of {value.numel()} with norm {value.double().norm():.3g}"


# --------------------------------------------------------------------------------------------------- run


@dataclass
class Training:
    """How a case is trained: steps of micro batches, with or without `no_sync` for all but the last of a step."""

    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    steps: int = 3
    micro: int = 1
    no_sync: bool = False
    close: Callable[..., Any] = field(default=lambda a, b: torch.testing.assert_close(a, b, rtol=2e-5, atol=1e-6))


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW whose epsilon keeps tiny gradients from deciding steps."""
    return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=1e-2, weight_decay=0.1, eps=1e-4)


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD with momentum, where a zero gradient and none make a difference."""
    return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.1, momentum=0.9, weight_decay=0.01)


def compare(
    case: Case, model: nn.Module, plain: nn.Module, how: Training, *, orig: bool, replicated: bool
) -> list[str]:
    """Train both side by side and tell where losses, gradients or parameters part, with the step."""
    shared = groups(model, plain, orig)
    if any(p.dtype in (torch.bfloat16, torch.float16) for p in plain.parameters()):
        how = dataclasses.replace(how, close=_roughly)  # without a reduce dtype, gradients are averaged in their own
    ours, theirs = how.optimizer(model.parameters()), how.optimizer(plain.parameters())
    rank, wrong = dist.get_rank(), mismatches(model, plain, shared, replicated, how.close)
    for step in range(how.steps):
        for micro in range(how.micro):
            batch = case.batch(rank, step * how.micro + micro)
            apart = how.no_sync and micro + 1 < how.micro
            with model.no_sync() if apart else contextlib.nullcontext():
                loss = square(model(batch))
                loss.backward()
            expected = square(plain(batch))
            expected.backward()
            wrong += _differs("loss", loss.detach(), expected.detach(), how.close)
        reduce_gradients(plain, shared)
        ours.step()
        theirs.step()
        wrong = _everywhere([f"step {step}: {each}" for each in wrong])
        wrong += [f"step {step}: {each}" for each in mismatches(model, plain, shared, replicated, how.close)]
        if wrong:
            break
        ours.zero_grad()
        theirs.zero_grad()
    return wrong


def _everywhere(wrong: list[str]) -> list[str]:
    """The findings of all ranks, so that all of them stop at the same place."""
    found: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, wrong)
    return [f"rank {rank}: {each}" for rank, told in enumerate(found) for each in told] if any(found) else []


def product(**axes: Iterable[Any]) -> list[dict[str, Any]]:
    """Every combination of the axes, as keyword arguments."""
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
