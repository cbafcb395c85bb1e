"""What training must give: the unsharded model with a hand-written all-reduce; what a sharded one holds, gathered."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.utils import _pytree as pytree

from tests.kit.models.models import Case, square
from tests.kit.models.under_test import LOW, is_unit, no_sync
from tests.kit.ranks.stepping import whole_dtensors

SEGMENTS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
Grad = torch.Tensor | None
_Packed = tuple[torch.dtype, bytes]  # a tensor's elements


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
    """Clean prefixes of the modules that are units."""
    return [clean(name) for name, module in model.named_modules() if is_unit(module)]


def owner(names: list[str], prefixes: Iterable[str]) -> str:
    """The unit that manages the parameter of these clean names: the innermost with all of its users below it."""
    return max((p for p in prefixes if not p or all(name.startswith(p + ".") for name in names)), key=len)


def groups(model: nn.Module, plain: nn.Module, orig: bool) -> list[Group]:
    """Return the parameters that `model` registers, from those of its unsharded twin."""
    prefixes, every = units(model), list(plain.named_parameters(remove_duplicate=False))
    found: dict[Any, Group] = {}
    for name, parameter in plain.named_parameters():
        unit = owner([other for other, each in every if each is parameter], prefixes)
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
    mine = {name: None if value is None else _packed(value.detach()) for name, value in values.items()}
    found: list[dict[str, _Packed | None]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, mine)
    return {name: [None if each[name] is None else _unpacked(*each[name]) for each in found] for name in values}


def _packed(tensor: torch.Tensor) -> _Packed:
    """As bytes, which pickle much faster than a tensor."""
    copied = storage_order(tensor).clone()  # NumPy lets nobody resize a storage that it has seen
    return tensor.dtype, copied.view(torch.uint8).numpy().tobytes()


def _unpacked(dtype: torch.dtype, content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=dtype) if content else torch.empty(0, dtype=dtype)


def of_one_group(pieces: list[Grad], replicas: int) -> list[Grad]:
    """The pieces of the first of so many groups of ranks, each of which holds them all."""
    size = len(pieces) // replicas
    for start in range(size, len(pieces), size):
        for one, other in zip(pieces[:size], pieces[start : start + size], strict=True):
            assert one is other is None or torch.equal(one, other), "replicas differ"
    return pieces[:size]


def whole(pieces: list[Grad], numel: int, replicated: bool) -> Grad:
    """The full 1-D tensor of which each rank holds a piece, or all of it; None where no rank holds any.

    SHARD_GRAD_OP shows whole parameters in `no_sync` too, and so may any strategy after an exception.
    """
    held = [piece for piece in pieces if piece is not None and piece.numel()]
    if not held:
        return None
    if replicated or (len(held) == len(pieces) and all(piece.numel() == numel for piece in held)):
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
    model: nn.Module,
    plain: nn.Module,
    shared: list[Group],
    replicated: bool,
    close: Callable[..., Any],
    replicas: int = 1,
) -> list[str]:
    """Where the sharded model's parameters and gradients differ from its twin's; the same answer on every rank."""
    parameters, twins, wrong = exposed(model), dict(plain.named_parameters()), []
    matched = {group.names[0]: _match(group, parameters) for group in shared}
    if any(isinstance(parameter, DTensor) for parameter in matched.values()):
        return _everywhere([each for name, p in matched.items() for each in _differs_here(name, p, twins[name], close)])
    gradients = {f"{name}.grad": parameter.grad for name, parameter in matched.items()}
    held = {name: of_one_group(pieces, replicas) for name, pieces in gathered({**matched, **gradients}).items()}
    for group in shared:
        name, members = group.names[0], [twins[each] for each in group.names]
        numel = sum(member.numel() for member in members)
        wanted = torch.cat([storage_order(member.detach()) for member in members])
        wrong += differs(name, whole(held[name], numel, replicated), wanted, close)
        wrong += differs(f"{name}.grad", whole(held[f"{name}.grad"], numel, replicated), _gradient(members), close)
    return wrong


def _differs_here(name: str, found: nn.Parameter, wanted: nn.Parameter, close: Callable[..., Any]) -> Iterable[str]:
    """Where this rank's part of a DTensor, or of its gradient, is another than it must be."""
    if not isinstance(found, DTensor):
        return [f"{name}: a {type(found).__name__} among DTensors"]
    if found.shape != wanted.shape or found.stride() != wanted.contiguous().stride():
        return [f"{name}: a DTensor of {tuple(found.shape)} and {found.stride()}, expected {tuple(wanted.shape)}"]
    if found.grad is not None and found.grad.placements != found.placements:
        return [f"{name}.grad: placed as {found.grad.placements}, the parameter as {found.placements}"]
    pairs = {name: (found, wanted.detach()), f"{name}.grad": (found.grad, wanted.grad)}
    return [
        each
        for key, (whole_, twin) in pairs.items()
        for each in differs(
            key,
            None if whole_ is None else here(whole_).detach(),
            None if twin is None else mine(twin, found),
            close,
        )
    ]


def mine(whole_: torch.Tensor, like: DTensor) -> torch.Tensor:
    """This rank's part of a tensor, cut as a DTensor is: in chunks, the last ones smaller or empty."""
    mesh = like.device_mesh
    for dim, placement in enumerate(like.placements):
        if isinstance(placement, Replicate):
            continue
        parts = whole_.chunk(mesh.size(dim), placement.dim)
        rank = mesh.get_local_rank(dim)
        whole_ = parts[rank] if rank < len(parts) else whole_.narrow(placement.dim, 0, 0)
    return whole_


def _gradient(members: list[nn.Parameter]) -> Grad:
    if all(member.grad is None for member in members):
        return None
    return torch.cat([torch.zeros(m.numel(), dtype=m.dtype) if m.grad is None else _as(m, m.grad) for m in members])


def _as(parameter: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
    """A gradient in the order of its parameter's memory, whatever its own strides are."""
    order = sorted(range(parameter.dim()), key=lambda d: -parameter.stride(d))
    return gradient.permute(order).reshape(-1)


def differs(name: str, found: Grad, wanted: Grad, close: Callable[..., Any]) -> list[str]:
    """What parts one tensor, or none, from the other; what is equal in all bits is asked no more."""
    if found is not None and wanted is not None and found.dtype == wanted.dtype and torch.equal(found, wanted):
        return []
    if found is None or wanted is None:
        messages = [f"{name}: found {_brief(found)}, expected {_brief(wanted)}"]
        return [] if found is None and wanted is None else messages
    try:
        close(found, wanted)
    except AssertionError as error:
        return [f"{name}: {' '.join(str(error).split())[:300]}"]
    return []


def roughly(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-3)


def _brief(value: Grad) -> str:
    return "None" if value is None else f"a tensor of {value.numel()} with norm {value.double().norm():.3g}"


# --------------------------------------------------------------------------------------------------- run


@dataclass
class Training:
    """How a case is trained: steps of micro batches, with or without `no_sync` for all but the last of a step.

    With `low` the twin computes in bf16 with copies of its parameters, and adds up gradients in fp32. `equal` says that
    there is nothing between the two when training begins, `replicas` that so many groups of ranks hold the whole each.
    `by_pieces` lets DTensors be stepped as `ByPieces` says; what is about optimizers steps the DTensors themselves.
    """

    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    steps: int = 2  # what the first left behind meets the second
    micro: int = 1
    no_sync: bool = False
    low: bool = False
    equal: bool = True
    replicas: int = 1
    by_pieces: bool = True
    close: Callable[..., Any] = field(default=lambda a, b: torch.testing.assert_close(a, b, rtol=2e-5, atol=1e-6))

    def stepper(self, model: nn.Module) -> Any:
        """What steps the model's parameters and lets go of their gradients."""
        parameters = list(model.parameters())
        is_wanted = self.by_pieces and any(isinstance(p, DTensor) for p in parameters)
        return ByPieces(self.optimizer, parameters) if is_wanted else self.optimizer(parameters)


class ByPieces:
    """Steps what this rank holds of DTensors, element by element, as the pieces of a flat parameter are stepped.

    torch's way through DTensors gives the same and takes ten times as long, most of what a short training takes.
    """

    def __init__(self, optimizer: Callable[..., torch.optim.Optimizer], parameters: list[nn.Parameter]) -> None:
        self.parameters, self.pieces = parameters, [_piece(p) for p in parameters]
        self.optimizer = optimizer(self.pieces)

    def step(self) -> None:
        for parameter, piece in zip(self.parameters, self.pieces, strict=True):
            assert piece.data_ptr() == here(parameter).data_ptr(), "what a rank holds stays where it is"
            piece.grad = None if parameter.grad is None else here(parameter.grad)
        self.optimizer.step()

    def zero_grad(self) -> None:
        """Drop the gradients of the optimizer's parameters."""
        self.optimizer.zero_grad()
        for parameter, piece in zip(self.parameters, self.pieces, strict=True):
            parameter.grad = None if piece.grad is None else parameter.grad


def _piece(parameter: nn.Parameter) -> torch.Tensor:
    """What this rank holds of a parameter, in the same memory, to be stepped by itself."""
    return here(parameter).detach().requires_grad_(parameter.requires_grad)


@torch.no_grad()
def here(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW whose epsilon keeps tiny gradients from deciding steps."""
    return torch.optim.AdamW(
        [p for p in parameters if p.requires_grad], lr=1e-2, weight_decay=0.1, eps=1e-4, foreach=True
    )


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD with momentum, where a zero gradient and none make a difference."""
    return torch.optim.SGD(
        [p for p in parameters if p.requires_grad], lr=0.1, momentum=0.9, weight_decay=0.01, foreach=True
    )


def compare(
    case: Case, model: nn.Module, plain: nn.Module, how: Training, *, orig: bool, replicated: bool
) -> list[str]:
    """Train both side by side and tell where losses, gradients or parameters part, with the step."""
    shared = groups(model, plain, orig)
    if any(p.dtype in (torch.bfloat16, torch.float16) for p in plain.parameters()) or (how.low and how.micro > 1):
        how = dataclasses.replace(how, close=roughly)  # sums of gradients are made in their own type, or may be
    ours, theirs = how.stepper(model), how.stepper(plain)
    backward = _in_low(plain) if how.low else functools.partial(_backward, plain)
    differing = functools.partial(
        mismatches, model, plain, shared, replicated=replicated, close=how.close, replicas=how.replicas
    )
    wrong = differing() if how.equal else []
    if wrong:
        return [f"before: {each}" for each in wrong]
    rank, apart = dist.get_rank(), []
    for step in range(how.steps):
        for micro in range(how.micro):
            batch = case.batch(rank, step * how.micro + micro)
            held_back = how.no_sync and micro + 1 < how.micro
            with no_sync(model) if held_back else contextlib.nullcontext():
                loss = _backward(model, batch)
            apart += differs(f"loss of step {step}", loss, backward(batch), how.close)
        reduce_gradients(plain, shared)
        with contextlib.nullcontext() if how.by_pieces else whole_dtensors():
            ours.step()
        theirs.step()
        found = differing()
        if found:
            return [f"step {step}: {each}" for each in [*_everywhere(apart), *found]]
        ours.zero_grad()
        theirs.zero_grad()
    return _everywhere(apart)


def _backward(net: nn.Module, batch: Any) -> torch.Tensor:
    loss = square(net(batch))
    loss.backward()
    return loss.detach()


def _in_low(plain: nn.Module) -> Callable[[Any], torch.Tensor]:
    """A forward and backward of `plain` with its parameters and inputs in bf16; gradients are left in fp32."""
    low = copy.deepcopy(plain).to(LOW)

    def backward(batch: Any) -> torch.Tensor:
        pairs = list(zip(plain.parameters(), low.parameters(), strict=True))
        with torch.no_grad():
            for parameter, copied in pairs:
                copied.copy_(parameter)
                copied.grad = None
        loss = _backward(low, pytree.tree_map_only(torch.Tensor, _lowered, batch))
        for parameter, copied in pairs:
            if copied.grad is not None:
                wide = copied.grad.to(parameter.dtype)
                parameter.grad = wide if parameter.grad is None else parameter.grad + wide
        return loss

    return backward


def _lowered(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(LOW) if tensor.is_floating_point() else tensor


def _everywhere(wrong: list[str]) -> list[str]:
    """The findings of all ranks, so that all of them stop at the same place."""
    found: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, wrong)
    return [f"rank {rank}: {each}" for rank, messages in enumerate(found) for each in messages] if any(found) else []


def product(**axes: Iterable[Any]) -> list[dict[str, Any]]:
    """Every combination of the axes, as keyword arguments."""
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
