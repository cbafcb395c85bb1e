"""One bucket: parameters that are gathered and reduced together (torch: FlatParamHandle, FSDPParamGroup)."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from shardckpt.core.comm.collectives import CommHook, CustomCollectives, Pending, ShardGroup
from shardckpt.core.comm.rank_checks import InitialChecksums
from shardckpt.core.comm.streams import ResizableStorage, make_gathers_wait, use_gather_stream, wait_for_gathers
from shardckpt.core.config import Offload, Precision
from shardckpt.core.modules.autograd_hooks import GradientWatch
from shardckpt.core.modules.fqn_and_params import Name, ParamInfo
from shardckpt.core.modules.profiler_ranges import profile_range
from shardckpt.core.params.buffer_layout import DimPacking, FlatPacking, Packing
from shardckpt.core.params.gradient_reduction import GradientReducer, ReducedGrad, ReduceOptions
from shardckpt.devices import pinned, record_stream
from shardckpt.layout import ALIGNMENT, Layout


class ParamPlacement(Protocol):
    """Placement of one parameter on a mesh; a bucket sees plain local tensors only."""

    @property
    def dim(self) -> int | None:
        """The sharded dimension; None if every rank has the full parameter."""

    def local(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the tensor to shard: the parameter, or this rank's TP shard of it."""

    def sharded(self, local: torch.Tensor) -> torch.Tensor:
        """Return a DTensor around this rank's part."""

    def full(self, local: torch.Tensor) -> torch.Tensor:
        """Return what the module computes with, around the full local tensor."""

    def gradient(self, grad: torch.Tensor) -> torch.Tensor:
        """Return the plain gradient of the full local tensor."""


@dataclass(frozen=True)
class ShardSpec:
    """How a bucket's parameters are sharded over ranks.

    Attributes:
        aligned: In a flat layout, whether each parameter begins at a multiple of 16 bytes of the type computed in.
        keeps_full: Every rank keeps everything.
        placements: Placement of each parameter on a mesh, sharded along a dimension; empty for plain, flat parameters.
        flat: Shard them as flat parameters, even if `placements` says how the module sees them.
        post_forward_group: Ranks to reshard to after forward (`reshard_after_forward` as a number); None for none.
    """

    aligned: bool = False
    keeps_full: bool = False
    placements: tuple[ParamPlacement, ...] = ()
    flat: bool = False
    post_forward_group: dist.ProcessGroup | None = None


class _UnshardedParams:
    """Full parameters of one dtype: leaves over one resizable buffer.

    They are made once, so that what autograd saved of them is valid again after the next unshard.
    """

    def __init__(
        self,
        packing: Packing,
        placements: Sequence[ParamPlacement],
        buffer: ResizableStorage,
        trains: Sequence[bool],
        watch: GradientWatch,
    ) -> None:
        self.buffer = buffer
        self.views = packing.views(buffer.tensor.data)
        shown = [p.full(v) for p, v in zip(placements, self.views, strict=True)] if placements else self.views
        self.params = tuple(nn.Parameter(v, requires_grad=False) for v in shown)
        self._watch = watch
        self._watched: set[int] = set()
        for index, on in enumerate(trains):
            self.set_requires_grad(index, on)

    def set_requires_grad(self, index: int, on: bool) -> None:
        """Set whether a leaf requires gradients, and watch it if so."""
        self.params[index].requires_grad_(on)
        if on and index not in self._watched:
            self._watched.add(index)
            self._watch.watch(self.params[index])

    def swap_params(self, others: Sequence[nn.Parameter | None]) -> None:
        """Replace leaves by given objects: copies that modules hold already."""
        for other, leaf in zip(others, self.params, strict=True):
            if other is not None:
                torch.utils.swap_tensors(other, leaf)  # type: ignore[no-untyped-call]
        self.params = tuple(leaf if other is None else other for other, leaf in zip(others, self.params, strict=True))


def _sum(one: torch.Tensor, other: torch.Tensor | None) -> torch.Tensor:
    return one if other is None else one + other.to(one.dtype)


class Bucket:
    """Parameters of one dtype that are gathered, freed and reduced together.

    Args:
        members: The parameters, all of one dtype, with their full values.
        group: The ranks that share them.
        name: What messages call the bucket.
        spec: How they are sharded.
        precision: Dtypes to compute and to reduce in.
        offload: Where the shard lives.
    """

    def __init__(
        self,
        members: Sequence[ParamInfo],
        group: ShardGroup,
        name: Name,
        spec: ShardSpec,
        precision: Precision,
        offload: Offload,
    ) -> None:
        self.name = name
        self.members = tuple(members)
        self.group = group
        self.keeps_full = spec.keeps_full
        self._placements = spec.placements
        self._post_forward_group = ShardGroup(spec.post_forward_group) if spec.post_forward_group is not None else None
        self._precision = precision
        self._offload = offload
        values = [each.parameter.detach() for each in members]
        if spec.placements:
            values = [place.local(value) for place, value in zip(spec.placements, values, strict=True)]
        self.trainable = members[0].parameter.requires_grad
        self.compute_device = values[0].device
        self.packing = self._build_packing(values, spec)
        shard = self._allocate_shard(values[0], self.packing.layout.chunk)
        self.packing.write_shard(values, group.rank, shard)
        self.shard = pinned(shard.cpu(), offload.pin) if offload.enabled and not shard.is_meta else shard
        self.watch = GradientWatch()
        self._full = self._build_unsharded([member.parameter.requires_grad for member in members])
        self._full_precision: _UnshardedParams | None = None
        self._full_precision_before: _UnshardedParams | None = (
            None  # unsharded again, it is valid for what autograd saved
        )
        self._gather_output: torch.Tensor | None = None
        self._partial_shard: torch.Tensor | None = None
        self._pending_all_gather: Pending | None = None
        self.is_unsharded = self.aliased
        self._comms = CustomCollectives()
        self._reducer = GradientReducer(self.packing, group, name, keeps_full=spec.keeps_full)
        self.initial_checksums = InitialChecksums.compute([member.fqn for member in members], values, self.local_shards)

    def __deepcopy__(self, memo: dict[int, Any]) -> Bucket:
        """Return a bucket of the copied parameters, over the same ranks, without gradients."""
        self.reshard()
        made = object.__new__(type(self))
        memo[id(self)] = made
        for name, value in self.__dict__.items():
            own = name not in ("_full", "_full_precision_before", "shard", "watch")
            made.__dict__[name] = copy.deepcopy(value, memo) if own else None
        made.watch = GradientWatch()
        made.shard = self.shard.detach().clone()
        made._full = made._build_unsharded([leaf.requires_grad for leaf in self._full.params])
        made._full.swap_params([memo.get(id(leaf)) for leaf in self._full.params])
        memo.update(zip(map(id, self._full.params), made._full.params, strict=True))
        return made

    def _allocate_shard(self, like: torch.Tensor, numel: int) -> torch.Tensor:
        """Allocate the shard."""
        return torch.empty(numel, dtype=like.dtype, device=like.device)

    def _build_packing(self, values: Sequence[torch.Tensor], spec: ShardSpec) -> Packing:
        names = [member.fqn for member in self.members]
        aliases = [tuple(place.fqn for place in member.places[1:]) for member in self.members]
        dims = [place.dim for place in spec.placements]
        if not dims or spec.keeps_full or spec.flat:
            itemsize = self._precision.computed(values[0].dtype).itemsize
            alignment = max(1, ALIGNMENT // itemsize) if spec.aligned else 1
            return FlatPacking(names, values, aliases, self.group.size, alignment=alignment)
        return DimPacking(names, values, aliases, self.group.size, dims=[dim or 0 for dim in dims])

    def _build_unsharded(self, trains: Sequence[bool]) -> _UnshardedParams:
        """Make the full parameters, without their values unless they are the shard."""
        if self.aliased:
            return _UnshardedParams(
                self.packing, self._placements, ResizableStorage.from_tensor(self.shard), trains, self.watch
            )
        return self._build_freed(self.compute_dtype, trains)

    def _build_freed(self, dtype: torch.dtype, trains: Sequence[bool]) -> _UnshardedParams:
        buffer = ResizableStorage(self.packing.unsharded_numel, dtype, self.compute_device)
        made = _UnshardedParams(self.packing, self._placements, buffer, trains, self.watch)
        made.buffer.free()
        return made

    # ----------------------------------------------------------------------------------------------------- facts

    @property
    def rank(self) -> int:
        """This rank's place among those that share the bucket."""
        return self.group.rank

    @property
    def layout(self) -> Layout:
        """Layout of the parameters in every rank's shard."""
        return self.packing.layout

    @property
    def placements(self) -> tuple[ParamPlacement, ...]:
        """Placement of each parameter on a mesh; empty if all are plain."""
        return self._placements

    @property
    def dtype(self) -> torch.dtype:
        """Type of the shard."""
        return self.shard.dtype

    @property
    def compute_dtype(self) -> torch.dtype:
        """Type of the full parameters."""
        return self._precision.computed(self.dtype)

    @property
    def gradient_dtype(self) -> torch.dtype:
        """Type of the gradients that an optimizer sees."""
        keeps = self._precision.keep_low_precision_grads
        return self._precision.reduced(self.dtype) if keeps else self.dtype

    @property
    def aliased(self) -> bool:
        """Return True if the full parameters are the shard itself, which is never freed."""
        return self.keeps_full and self.compute_dtype == self.dtype and self.shard.device == self.compute_device

    @property
    def unsharded_params(self) -> tuple[nn.Parameter, ...]:
        """The full parameters; readable while the bucket is unsharded."""
        return (self._full_precision or self._full).params

    @property
    def unsharded_tensors(self) -> list[torch.Tensor]:
        """The full parameters as plain tensors; with tensor parallelism this rank's TP shard."""
        return (self._full_precision or self._full).views

    def wrap_unsharded(self, index: int, value: torch.Tensor) -> torch.Tensor:
        """Wrap a full value as the module's parameter: a DTensor with tensor parallelism."""
        return self._placements[index].full(value) if self._placements else value

    @property
    def is_full_precision(self) -> bool:
        """Return True if the full parameters have the dtype of the shard."""
        return self._full_precision is not None or self.compute_dtype == self.dtype

    def has_wrong_dtype(self, *, full_precision: bool) -> bool:
        """Return True if the full parameters do not have the wanted dtype: the shard's or `compute_dtype`."""
        return self.is_full_precision != (full_precision or self.compute_dtype == self.dtype)

    @property
    def has_unsharded_storage(self) -> bool:
        """Return True if the full buffer has its storage, unsharded or with an all-gather pending."""
        return (self._full_precision or self._full).buffer.alive or self._gather_output is not None

    @property
    def address(self) -> int:
        """Address of the full buffer; 0 while it has no storage."""
        buffer = (self._full_precision or self._full).buffer
        return buffer.tensor.untyped_storage().data_ptr() if buffer.alive else 0

    @property
    def requires_grad(self) -> bool:
        """Return True if any full parameter requires gradients."""
        return any(leaf.requires_grad for leaf in self._full.params)

    def set_requires_grad(self, index: int, on: bool) -> None:
        """Set whether a full parameter requires gradients.

        Args:
            index: Which of the members.
            on: Whether it does.
        """
        (self._full_precision or self._full).set_requires_grad(index, on)

    @property
    def local_shards(self) -> list[torch.Tensor]:
        """This rank's shard of each parameter, as views; full parameters if nothing is sharded."""
        return self.split_shard(self.shard.data)

    def split_shard(self, shard: torch.Tensor) -> list[torch.Tensor]:
        """Split a tensor with the layout of the shard (a gradient, optimizer state) into views per parameter."""
        return self.packing.views(shard) if self.keeps_full else self.packing.split_shard(shard, self.rank)

    # ------------------------------------------------------------------------------------------------- the shard

    def replace_shard(self, shard: torch.Tensor) -> None:
        """Take another tensor of the same length as the shard, on its device and of its dtype.

        Args:
            shard: The new one; it is aliased, not copied, unless nothing is sharded.
        """
        if shard.dtype == self.dtype and shard.device == self.shard.device:
            if self.aliased:
                self.shard.copy_(shard)
            else:
                self.shard = shard
            return
        self.reshard()
        trains = [leaf.requires_grad for leaf in self._full.params]
        self.shard = pinned(shard.cpu(), self._offload.pin) if self._offload.enabled else shard
        if not self._offload.enabled:
            self.compute_device = shard.device
        self._full, self._full_precision_before = self._build_unsharded(trains), None
        self.is_unsharded = self.aliased

    def select(self, kind: type[Bucket], indices: Sequence[int]) -> Bucket:
        """Return a bucket of some of the members that has no values yet, and gathers and reduces as this one.

        Args:
            kind: Class of the new bucket.
            indices: The members.
        """
        placements = tuple(self._placements[index] for index in indices)
        for index in indices:
            full, leaf = self.unsharded_tensors[index], self.unsharded_params[index]
            empty = torch.empty_strided(full.shape, full.stride(), dtype=self.dtype, device="meta")
            stand_in = nn.Parameter(
                placements[0].full(empty) if placements else empty, requires_grad=leaf.requires_grad
            )
            stand_in.__dict__.update(leaf.__dict__)
            self.members[index].replace(stand_in)
        post_forward_group = None if self._post_forward_group is None else self._post_forward_group.shard
        spec = ShardSpec(keeps_full=self.keeps_full, placements=placements, post_forward_group=post_forward_group)
        members = [self.members[index] for index in indices]
        made = kind(members, self.group, self.name, spec, self._precision, self._offload)
        made.set_collectives(hook=self.hook, comms=self._comms, group=self._reducer.group)
        return made

    def set_compute_device(self, device: torch.device) -> None:
        """Set the device to compute on, if it is not the shard's."""
        if device != self.compute_device:
            self.reshard()
            self.compute_device = device
            self._full, self._full_precision_before = (
                self._build_unsharded([leaf.requires_grad for leaf in self._full.params]),
                None,
            )
            self.is_unsharded = self.aliased

    def write_back(self) -> None:
        """Take this rank's part of the full parameters, changed by a user, as its shard."""
        if not self.aliased:
            self.packing.write_shard(self.unsharded_tensors, self.rank, self.shard.data)

    # ------------------------------------------------------------------------------------------------ parameters

    def start_all_gather(self, *, full_precision: bool = False) -> bool:
        """Start the all-gather of the full parameters. Collective.

        Args:
            full_precision: In the stored type, whatever the type to compute in.

        Returns:
            Whether there was something to start.
        """
        if self.is_unsharded or self._pending_all_gather is not None:
            return False
        if full_precision and not self.is_full_precision:
            trains = [leaf.requires_grad for leaf in self._full.params]
            self._full_precision = self._full_precision_before = self._full_precision_before or self._build_freed(
                self.dtype, trains
            )
            for index, on in enumerate(trains):
                self._full_precision.set_requires_grad(index, on)
        with profile_range("all_gather", self.name.text), use_gather_stream(self.compute_device):
            self._pending_all_gather = self._launch_all_gather((self._full_precision or self._full).buffer)
        return True

    def _launch_all_gather(self, buffer: ResizableStorage) -> Pending:
        what, dtype = f"gather {self.name.text}", buffer.tensor.dtype
        if self.packing.is_direct:
            buffer.allocate()
            incoming = buffer.tensor
        else:
            incoming = self._gather_output = self._allocate_gather_output(dtype)
        if self._partial_shard is not None and self._post_forward_group is not None:
            make_gathers_wait(self.compute_device)
            return self._post_forward_group.all_gather(incoming, self._partial_shard, what)
        own = self.shard.detach()
        if own.dtype != dtype or own.device != incoming.device:
            chunk = self.layout.chunk  # cast to where it goes: a gather may read from its own place
            own = incoming[self.rank * chunk : (self.rank + 1) * chunk].copy_(own, non_blocking=True)
        return self.group.all_gather(incoming, own, what, self._comms.all_gather)

    def _allocate_gather_output(self, dtype: torch.dtype) -> torch.Tensor:
        own = self._comms.all_gather
        if own is not None:
            return own.allocate((self.packing.all_gather_numel,), dtype=dtype, device=self.compute_device)
        return torch.empty(self.packing.all_gather_numel, dtype=dtype, device=self.compute_device)

    def wait_all_gather(self, *, keep_partial_shard: bool = False) -> None:
        """Wait for the all-gather: then the full parameters can be read.

        Args:
            keep_partial_shard: Keep this rank's shard among `post_forward_group` for the unshard in backward.
        """
        if self._pending_all_gather is None:
            return
        pending, self._pending_all_gather = self._pending_all_gather, None
        pending.wait()
        wait_for_gathers(self.compute_device)
        full = self._full_precision or self._full
        incoming = full.buffer.tensor if self._gather_output is None else self._gather_output
        if (
            keep_partial_shard
            and self._post_forward_group is not None
            and self._partial_shard is None
            and self._full_precision is None
        ):
            part = incoming.numel() // self._post_forward_group.size
            self._partial_shard = incoming[
                self._post_forward_group.rank * part : (self._post_forward_group.rank + 1) * part
            ].clone()
        if self._gather_output is not None:
            with profile_range("all_gather_copy_out", self.name.text):
                full.buffer.allocate()
                self.packing.unpack(self._gather_output, full.buffer.tensor)
            record_stream(self._gather_output)
            self._gather_output = None
        self.is_unsharded = True

    def reshard(self, *, keep_partial_shard: bool = False) -> None:
        """Free the full parameters, unless they are the shard.

        Args:
            keep_partial_shard: Keep the shard that `wait_all_gather` kept.
        """
        self.wait_all_gather(keep_partial_shard=keep_partial_shard)
        if not keep_partial_shard:
            self._partial_shard = None
        if self.aliased:
            return
        if self._full_precision is not None:
            self._full_precision.buffer.free()
            self._full_precision = None
        self._full.buffer.free()
        self.is_unsharded = False

    # ------------------------------------------------------------------------------------------------- gradients

    @property
    def gradients(self) -> list[torch.Tensor | None]:
        """The leaves' gradients as plain tensors."""
        found = [leaf.grad for leaf in self._full.params]
        if self._full_precision_before is not None:
            grads = [leaf.grad for leaf in self._full_precision_before.params]
            found = [ours if other is None else _sum(other, ours) for ours, other in zip(found, grads, strict=True)]
        if not self._placements:
            return found
        pairs = zip(self._placements, found, strict=True)
        return [None if grad is None else placement.gradient(grad) for placement, grad in pairs]

    def unsharded_gradients(self) -> list[torch.Tensor | None]:
        """Return the leaves' gradients as plain tensors, which are what the leaves have from now on."""
        found = self.gradients
        for placement, leaf, grad in zip(self._placements, self._full.params, found, strict=False):
            leaf.grad = None if grad is None else placement.full(grad)
        return found

    def set_collectives(
        self, *, hook: CommHook | None = None, comms: CustomCollectives | None = None, group: ShardGroup | None = None
    ) -> None:
        """Set the collectives and hooks that gather and reduce.

        Args:
            hook: Averages gradients.
            comms: Custom collectives.
            group: The same ranks on other channels for gradients.
        """
        self._comms = comms or self._comms
        self._reducer.set_collectives(hook=hook, comms=comms, group=group)

    @property
    def hook(self) -> CommHook | None:
        """What averages gradients in the engine's place."""
        return self._reducer.hook

    def start_reduce_scatter(
        self, *, factor: float | None = None, split: bool = False, all_reduce: bool = True, full_precision: bool = False
    ) -> None:
        """Start the reduce-scatter of the leaves' gradients and drop them there. Collective.

        Args:
            factor: What sums are divided by; the number of ranks where None.
            split: Divide in two steps, before and after the sum.
            all_reduce: Sum over replicas as well.
            full_precision: In the stored type, whatever the type to reduce in.
        """
        dtype = self.dtype if full_precision else self._precision.reduced(self.dtype)
        gradients = self.gradients
        self.drop_gradients()
        self._reducer.start_reduce_scatter(
            gradients, ReduceOptions(dtype, self.compute_device, factor, split, all_reduce)
        )

    @property
    def has_unreduced_grads(self) -> bool:
        """Return True if there are gradients that are not yet reduced."""
        return self._reducer.has_unreduced_grads or any(grad is not None for grad in self.gradients)

    @property
    def is_reduce_done(self) -> bool:
        """Return True if `wait_reduce_scatter` would return at once."""
        return self._reducer.is_done

    def wait_reduce_scatter(self) -> ReducedGrad | None:
        """Wait for the reduce-scatter and return the reduced gradient of this rank's shard, if there is one."""
        reduced = self._reducer.wait_reduce_scatter()
        if reduced is None:
            return None
        return ReducedGrad(reduced.gradient.to(dtype=self.gradient_dtype, device=self.shard.device), reduced.used)

    def stash_unsharded_grads(self) -> None:
        """Move the leaves' gradients to the reducer, which adds them to the next reduction."""
        self._reducer.stash_grads(self.gradients, self._precision.reduced(self.dtype))
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Forget the leaves' gradients."""
        for each in (self._full, self._full_precision_before):
            for leaf in each.params if each is not None else ():
                leaf.grad = None

    def reset_after_error(self) -> None:
        """Wait for collectives after an error, drop gradients and free the full parameters."""
        try:
            self._reducer.reset_after_error()
            self.wait_all_gather()
        finally:
            self._pending_all_gather = self._gather_output = None
            self.drop_gradients()
            self.reshard()
