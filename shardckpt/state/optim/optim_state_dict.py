"""Build an optimizer's state dict by FQN, in any kind."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from shardckpt.core.modules.dtensors import gather_full_tensor, is_strided, local, wrap_local
from shardckpt.core.params.full_params import Staging
from shardckpt.errors import ShardckptError, StateMismatchError, UnsupportedError
from shardckpt.plan.optim.param_groups import settings
from shardckpt.ranks.group import Group
from shardckpt.ranks.torch_group import TorchGroup, get_group_device
from shardckpt.state.adapters import torch_fsdp1
from shardckpt.state.adapters.base import ShardingAdapter
from shardckpt.state.adapters.engine_flat import EngineFlatAdapter
from shardckpt.state.adapters.model_index import ModelIndex, index_complete_model, reshard_all, unwrap
from shardckpt.state.keys.kinds import StateKind, outside_inference_mode, parse_kind_to_take
from shardckpt.state.keys.slots import (
    Form,
    OpaqueStateError,
    Slot,
    StateLayout,
    Survey,
    ask_layout,
    build_survey,
    copy_value,
    find_wrapped_slot,
    group_by_slot,
    merge_surveys,
    pack_survey,
    unpack_survey,
)
from shardckpt.state.keys.validation import digest
from shardckpt.state.model.model_state_dict import with_metadata


class ForeignParameterError(ShardckptError, ValueError):
    """An optimizer has a parameter that does not belong to the model."""


class OptimizerLike(Protocol):
    """Param groups and their state: an optimizer, or a stand-in for one."""

    param_groups: list[dict[str, Any]]

    @property
    def state(self) -> Any:
        """State by parameter."""


@dataclass(frozen=True)
class AdapterParams:
    """An adapter's parameters that an optimizer updates."""

    adapter: ShardingAdapter
    positions: tuple[int, ...]  # indices among the adapter's exposed parameters

    def names(self, position: int) -> list[str]:
        """Return an exposed parameter's FQNs; a flat one has all its members'."""
        entries = self.adapter.entries
        return [entry.name for entry in entries] if self.is_flat else [entries[position].name]

    def has_part(self, position: int) -> bool:
        """Return True if this rank has a part of an exposed parameter: without elements it has no gradient either."""
        is_divided = isinstance(self.adapter, EngineFlatAdapter) and self.adapter.is_sharded
        return not is_divided or local(self.adapter.exposed[position]).numel() > 0

    def is_saving(self, position: int) -> bool:
        """Return True if this rank's optimizer state for an exposed parameter is saved."""
        # A rank without elements does not save the state: its optimizer never updates the parameter, so its step count
        # stays behind. If no rank has elements, one rank saves the state.
        return self.has_part(position) or self.adapter.is_reporting_rank(position)

    @property
    def is_flat(self) -> bool:
        """Return True if one exposed parameter contains all entries."""
        return isinstance(self.adapter, EngineFlatAdapter) and self.adapter.flat_name is not None


@dataclass(frozen=True)
class OptimizerParams:
    """An optimizer's parameters by adapter and by FQN."""

    by_adapter: tuple[AdapterParams, ...]
    groups: tuple[tuple[str, ...], ...]  # FQNs in each param group

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Parameters in the same order on all ranks."""
        return [params.adapter.exposed[position] for params in self.by_adapter for position in params.positions]

    @property
    def shared(self) -> bytes:
        """Digest over the parameters that all ranks share; it must be equal on all ranks."""
        sharded = [params for params in self.by_adapter if params.adapter.is_sharded and params.adapter.is_everywhere]
        return digest([params.names(at) for params in sharded for at in params.positions])


def map_optimizer_params(model_index: ModelIndex, optim: OptimizerLike) -> OptimizerParams:
    """Map an optimizer's parameters to adapters and FQNs."""
    where = {
        id(parameter): (adapter, position)
        for adapter in model_index.adapters
        for position, parameter in enumerate(adapter.exposed)
    }
    positions: dict[int, set[int]] = {}
    groups = []
    for index, group in enumerate(optim.param_groups):
        names: list[str] = []
        for parameter in group["params"]:
            if id(parameter) not in where:
                raise ForeignParameterError(
                    "the optimizer holds a parameter that the model does not have",
                    where=f"param_groups[{index}]",
                    found="a lazy module's parameter" if is_lazy(parameter) else tuple(parameter.shape),
                    fix="Make the optimizer from the sharded model's parameters, after sharding.",
                )
            adapter, position = where[id(parameter)]
            positions.setdefault(id(adapter), set()).add(position)
            names += AdapterParams(adapter, ()).names(position)
        groups.append(tuple(names))
    params = [AdapterParams(h, tuple(sorted(positions[id(h)]))) for h in model_index.adapters if id(h) in positions]
    return OptimizerParams(tuple(params), tuple(groups))


def _check_same(group: Group, digests: Sequence[bytes]) -> None:
    """Refuse optimizers with different parameters on the ranks: state is incomplete."""
    odd = [str(group.global_rank(rank)) for rank, value in enumerate(digests) if value != digests[0]]
    if odd:
        raise StateMismatchError(
            "optimizers on different ranks cover different shared parameters",
            found=f"others on rank {', '.join(odd)} than on rank {group.global_rank(0)}",
            fix="Give every rank's optimizer the same parameters.",
        )


def gather_survey(of: OptimizerParams, optim: OptimizerLike, group: Group) -> Survey:
    """Return a survey over all ranks' optimizers. Collective if a rank may lack a part of some parameter."""
    mine = build_survey([(parameter, optim.state.get(parameter, {})) for parameter in of.parameters])
    if all(own.is_flat or not own.adapter.is_sharded or own.adapter.has_parts_everywhere for own in of.by_adapter):
        return mine
    is_reporting = [own.adapter.is_reporting_rank(position) for own in of.by_adapter for position in own.positions]
    reported = pack_survey([row if reports else {} for row, reports in zip(mine, is_reporting, strict=True)])
    return merge_surveys([*(unpack_survey(survey) for survey in group.all_gather(reported)), mine])


@outside_inference_mode
def optim_state_dict(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    kind: StateKind | str = StateKind.FULL,
    *,
    offload_to_cpu: bool = False,
    rank0_only: bool = False,
    state_layout: StateLayout | None = None,
) -> dict[str, Any]:
    """Return an optimizer's state dict by FQN. Collective.

    Args:
        model: As for `model_state_dict`.
        optim: Optimizer for some or all of the model's parameters.
        kind: FULL: full tensors. SHARDED: a DTensor for each sharded tensor. LOCAL: this rank's shards as stored.
        offload_to_cpu: Return tensors on the CPU.
        rank0_only: With FULL, return the state on rank 0 only; other ranks get an empty dict.
        state_layout: Function that returns the sharding for tensors that do not have their parameter's shape.

    Returns:
        `{"state": {name: {slot: value}}, "param_groups": [{"params": [name, ...], ...}]}`; entries do not share
        tensors.

    Raises:
        UsageError: The kind is unknown, or `rank0_only` with another kind than FULL.
        ForeignParameterError: The optimizer has a parameter that does not belong to the model.
        OpaqueStateError: A tensor's sharding is unknown.
        StateMismatchError: Optimizers on different ranks have different sharded parameters.
        UnsupportedError: A moment is a tensor of a low-bit class; `shardckpt.save` takes the optimizer.
    """
    kind = parse_kind_to_take(kind, rank0_only=rank0_only)
    model = unwrap(model)
    if torch_fsdp1.is_foreign(model):
        torch_fsdp1.refuse_local(kind)
        if kind is StateKind.SHARDED:
            return torch_fsdp1.sharded_optim_state(model, optim, offload=offload_to_cpu)
        return torch_fsdp1.full_optim_state(model, optim, offload=offload_to_cpu, first_only=rank0_only)
    reshard_all(model)
    index = index_complete_model(model)
    with index.ranks.group.collective("find the parameters of the optimizer") as piggyback:
        of = map_optimizer_params(index, optim)
        _require_dense_slots(of, optim)
        piggyback.local = of.shared
    _check_same(index.ranks.group, piggyback.gathered)
    if kind is StateKind.LOCAL:
        kept = build_survey([(parameter, optim.state.get(parameter, {})) for parameter in of.parameters])
    else:
        kept = gather_survey(of, optim, index.ranks.group)
    collector = _StateCollector(optim, kind, rank0_only, offload_to_cpu, state_layout)
    state: dict[str, dict[str, Any]] = {}
    rows = iter(kept)
    for params in of.by_adapter:
        collector.add_state(params, [next(rows) for _ in params.positions], state)
    if rank0_only and not index.ranks.is_first:
        return with_metadata(OrderedDict(state={}, param_groups=[]), kind, index)
    groups = [
        {**settings(live), "params": list(names)} for live, names in zip(optim.param_groups, of.groups, strict=True)
    ]
    ordered = {name: state[name] for name in index.names if name in state}  # the same order on all ranks
    return with_metadata(OrderedDict(state={**ordered, **state}, param_groups=groups), kind, index)


def _require_dense_slots(of: OptimizerParams, optim: torch.optim.Optimizer) -> None:
    """Refuse low-bit moments, whose elements are in several tensors."""
    exposed = ((params, position) for params in of.by_adapter for position in params.positions)
    found = find_wrapped_slot({p.names(at)[0]: optim.state.get(p.adapter.exposed[at], {}) for p, at in exposed})
    if found is not None:
        name, slot, kind = found
        raise UnsupportedError(
            "a state dict cannot contain this moment",
            where=f"{name}/{slot}",
            found=f"a tensor of the class {kind}",
            fix='Save the optimizer itself: `shardckpt.save({"model": model, "optim": optim}, path)`.',
        )


class _StateCollector:
    """Collects an optimizer's state, one adapter at a time."""

    def __init__(
        self,
        optim: torch.optim.Optimizer,
        kind: StateKind,
        first_only: bool,
        offload: bool,
        layout: StateLayout | None,
    ) -> None:
        self._optim = optim
        self._kind = kind
        self._first_only = first_only
        self._staging = Staging()
        self._offload = offload
        self._layout = layout

    def add_state(
        self, params: AdapterParams, rows: Sequence[dict[str, Slot]], state: dict[str, dict[str, Any]]
    ) -> None:
        """Add the optimizer state for an adapter's parameters. Collective."""
        for name, slot, indices in group_by_slot(rows):
            having = [params.positions[index] for index in sorted(indices)]
            if slot.form is Form.SCALAR:
                self._scalars(params, name, dict(zip(params.positions, rows, strict=True)), having, state)
            elif slot.form is Form.SHAPED:
                self._shaped(params, name, slot, having, state)
            else:
                self._opaque(params, name, slot, having, state)

    def _own(self, params: AdapterParams, position: int, slot: str) -> Any:
        return self._optim.state.get(params.adapter.exposed[position], {}).get(slot)

    def _scalars(
        self,
        params: AdapterParams,
        slot: str,
        rows: dict[int, dict[str, Slot]],
        having: Sequence[int],
        state: dict[str, dict[str, Any]],
    ) -> None:
        if self._first_only and not params.adapter.ranks.is_first:
            return
        for position in having:
            own = self._own(params, position, slot)
            for name in self._names(params, position):
                value = rows[position][slot].scalar()  # as reported: ranks without a part may have another count
                if isinstance(value, torch.Tensor) and isinstance(own, torch.Tensor) and not self._offload:
                    value = value.to(own.device)
                state.setdefault(name, {})[slot] = value

    def _names(self, params: AdapterParams, position: int) -> list[str]:
        if self._kind is StateKind.LOCAL and params.is_flat:
            assert isinstance(params.adapter, EngineFlatAdapter) and params.adapter.flat_name is not None
            return [params.adapter.flat_name]
        return params.names(position)

    def _shaped(
        self, params: AdapterParams, slot: str, surveyed: Slot, having: Sequence[int], state: dict[str, dict[str, Any]]
    ) -> None:
        adapter = params.adapter
        parts = [
            self._own(params, position, slot) if position in having else None
            for position in range(len(adapter.exposed))
        ]
        stays = self._kind is StateKind.LOCAL or (self._kind is StateKind.SHARDED and adapter.is_stored_as_sharded)
        if stays and all(parts[position] is not None for position in having):
            self._get_local(params, slot, parts, state)
            return
        has = set(range(len(adapter.entries))) if params.is_flat else set(having)
        for index, (entry, value) in enumerate(
            zip(adapter.entries, self._moved(adapter, parts, surveyed), strict=False)
        ):
            if index in has:
                own = value.clone() if _is_within(value, parts[0 if params.is_flat else index]) else value
                state.setdefault(entry.name, {})[slot] = own.cpu() if self._offload else own

    def _moved(
        self, adapter: ShardingAdapter, parts: Sequence[torch.Tensor | None], surveyed: Slot
    ) -> Iterable[torch.Tensor]:
        """Return each entry's value in the requested kind; empty on ranks that do not get values. Collective."""
        if self._kind is StateKind.SHARDED:
            return adapter.to_sharded(adapter.pack(parts, surveyed.torch_dtype), self._staging)
        packed = adapter.pack(parts, surveyed.torch_dtype, self._staging)
        return adapter.to_full(packed, self._staging, first_only=self._first_only) or ()

    def _get_local(
        self, params: AdapterParams, slot: str, parts: Sequence[torch.Tensor | None], state: dict[str, dict[str, Any]]
    ) -> None:
        """Copy this rank's shards; flat parameters without padding."""
        adapter = params.adapter
        owned = adapter.unpadded_size if isinstance(adapter, EngineFlatAdapter) and params.is_flat else None
        is_sharded = self._kind is StateKind.SHARDED
        with torch.no_grad():
            for position, part in enumerate(parts):
                if part is not None:
                    own = _place_like(part, adapter.exposed[position]) if is_sharded else local(part)
                    own = (own if owned is None else own[:owned]).clone()
                    name = self._names(params, position)[0]
                    state.setdefault(name, {})[slot] = own.cpu() if self._offload else own

    def _opaque(
        self, params: AdapterParams, slot: str, surveyed: Slot, having: Sequence[int], state: dict[str, dict[str, Any]]
    ) -> None:
        gives = not self._first_only or params.adapter.ranks.is_first
        for position in having:
            own = self._own(params, position, slot)
            for name in self._names(params, position):
                value = self._joined(params, name, slot, surveyed, own)
                if gives:
                    moves = self._offload and isinstance(value, torch.Tensor)
                    state.setdefault(name, {})[slot] = value.cpu() if moves else value

    def _joined(self, params: AdapterParams, name: str, slot: str, surveyed: Slot, own: Any) -> Any:
        """Return a value with another shape than its parameter, concatenated if sharded."""
        if isinstance(own, DTensor):
            return gather_full_tensor(own) if self._kind is StateKind.FULL else own.detach().clone()
        if self._kind is StateKind.LOCAL or not params.adapter.is_sharded:
            return copy_value(own)
        if surveyed.dtype and params.adapter.shard_group is not None:
            piece = torch.empty(0, dtype=surveyed.torch_dtype) if own is None else own.detach()
            answer = ask_layout(self._layout, name, slot, piece)
            several = params.is_flat and len(params.adapter.entries) > 1  # the concatenation has no single parameter
            if answer == "replicated" or (isinstance(answer, int) and not several):
                pieces = gather_uneven(own, surveyed.torch_dtype, params.adapter.shard_group)
                return torch.cat(pieces, dim=answer) if isinstance(answer, int) else pieces[0]
        raise OpaqueStateError(
            "state is neither shaped like its parameter nor a number, and state_layout did not return how it is "
            "sharded",
            where=f"{name}/{slot}",
            found=tuple(own.shape) if isinstance(own, torch.Tensor) else type(own).__name__,
            expected=next((e.shape for e in params.adapter.entries if e.name == name), None),
            fix="Pass state_layout, or take the state as LOCAL, which restores on the same ranks.",
        )


def _place_like(part: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return a value that is placed as its parameter, with the stride that torch's arithmetic may have dropped."""
    if not isinstance(parameter, DTensor) or not isinstance(part, DTensor) or is_strided(parameter) == is_strided(part):
        return part
    return wrap_local(local(part), parameter.device_mesh, parameter.placements, part.shape, part.stride())


def _is_within(value: torch.Tensor, part: torch.Tensor | None) -> bool:
    """Return True if a value starts inside the optimizer's tensor."""
    if part is None:
        return False
    storage = local(part).untyped_storage()
    return storage.data_ptr() <= local(value).data_ptr() < storage.data_ptr() + storage.nbytes()


def gather_uneven(own: torch.Tensor | None, dtype: torch.dtype, ranks: dist.ProcessGroup) -> list[torch.Tensor]:
    """Gather tensors with any shapes from the ranks that have one, in rank order. Collective."""
    encoded = TorchGroup(ranks).all_gather(b"-" if own is None else ",".join(map(str, own.shape)).encode())
    shapes = [None if text == b"-" else torch.Size(int(n) for n in text.decode().split(",") if n) for text in encoded]
    device = get_group_device(ranks, torch.device("cpu") if own is None else own.device)
    padded = torch.zeros(max(shape.numel() for shape in shapes if shape is not None), dtype=dtype, device=device)
    if own is not None:
        padded[: own.numel()] = own.detach().reshape(-1)
    rows = [torch.empty_like(padded) for _ in shapes]
    dist.all_gather([row.view(torch.uint8) for row in rows], padded.view(torch.uint8), group=ranks)
    return [row[: shape.numel()].view(shape) for row, shape in zip(rows, shapes, strict=True) if shape is not None]
