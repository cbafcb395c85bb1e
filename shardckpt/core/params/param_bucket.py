"""One homogeneous set of parameters (dtype, trainable, group, placement): shard, full parameters, gradients."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from shardckpt.core.comm.collectives import CommHook, Comms, Pending, ShardGroup
from shardckpt.core.comm.rank_checks import InitialChecksums
from shardckpt.core.comm.streams import Resizable, await_gather, gathering, gathers_await, in_use, pinned
from shardckpt.core.config import Offload, Precision
from shardckpt.core.modules.autograd_hooks import GradientWatch
from shardckpt.core.modules.fqn_and_params import Name, ParamInfo
from shardckpt.core.params.buffer_layout import DimPacking, FlatPacking, Packing
from shardckpt.core.params.gradient_reduction import Averaging, Reduced, Reducer
from shardckpt.layout import ALIGNMENT, Layout


class Placed(Protocol):
    """How one parameter lies over a mesh; a bucket sees plain local tensors only."""

    @property
    def dim(self) -> int | None:
        """The dimension that is cut; None where every rank has the whole."""

    def local(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return what is cut: the parameter, or this rank's part of one that tensor parallelism has cut already."""

    def sharded(self, local: torch.Tensor) -> torch.Tensor:
        """Return a DTensor around this rank's part."""

    def full(self, local: torch.Tensor) -> torch.Tensor:
        """Return what the module computes with, around the full local tensor."""

    def gradient(self, grad: torch.Tensor) -> torch.Tensor:
        """Return the plain gradient of the full local tensor."""


@dataclass(frozen=True)
class Cut:
    """How a bucket's parameters are laid out over ranks.

    Attributes:
        aligned: In a flat layout, whether each parameter begins at a multiple of 16 bytes of the type computed in.
        keeps_full: Every rank keeps everything.
        placed: How each parameter lies over a mesh, cut along a dimension; empty where all are plain and laid flat.
        flat: Cut them anywhere, also where `placed` tells what they are to the module.
        slices: Ranks that together keep everything between forward and backward; None where nobody does.
    """

    aligned: bool = False
    keeps_full: bool = False
    placed: tuple[Placed, ...] = ()
    flat: bool = False
    slices: dist.ProcessGroup | None = None


class _Full:
    """Full parameters of one dtype: leaves over one resizable buffer.

    They are made once, so that what autograd saved of them is valid again once the buffer is filled again.
    """

    def __init__(
        self,
        packing: Packing,
        placed: Sequence[Placed],
        buffer: Resizable,
        trains: Sequence[bool],
        watch: GradientWatch,
    ) -> None:
        self.buffer = buffer
        self.views = packing.views(buffer.tensor.data)
        shown = [p.full(v) for p, v in zip(placed, self.views, strict=True)] if placed else self.views
        self.leaves = tuple(nn.Parameter(v, requires_grad=False) for v in shown)
        self._watch = watch
        self._watched: set[int] = set()
        for index, on in enumerate(trains):
            self.train(index, on)

    def train(self, index: int, on: bool) -> None:
        """Let a leaf require gradients, and watch it from then on; or not."""
        self.leaves[index].requires_grad_(on)
        if on and index not in self._watched:
            self._watched.add(index)
            self._watch.watch(self.leaves[index])

    def swap_params(self, others: Sequence[nn.Parameter | None]) -> None:
        """Replace leaves by given objects: copies that modules hold already."""
        for other, leaf in zip(others, self.leaves, strict=True):
            if other is not None:
                torch.utils.swap_tensors(other, leaf)  # type: ignore[no-untyped-call]
        self.leaves = tuple(leaf if other is None else other for other, leaf in zip(others, self.leaves, strict=True))


def _sum(one: torch.Tensor, other: torch.Tensor | None) -> torch.Tensor:
    return one if other is None else one + other.to(one.dtype)


class Bucket:
    """Parameters of one dtype that are gathered, freed and reduced together.

    Args:
        members: The parameters, all of one dtype, with their full values.
        group: The ranks that share them.
        name: What messages call the bucket.
        cut: How they are laid out.
        precision: Dtypes to compute and to reduce in.
        offload: Where the shard lives.
    """

    def __init__(
        self,
        members: Sequence[ParamInfo],
        group: ShardGroup,
        name: Name,
        cut: Cut,
        precision: Precision,
        offload: Offload,
    ) -> None:
        self.name = name
        self.members = tuple(members)
        self.group = group
        self.keeps_full = cut.keeps_full
        self._placed = cut.placed
        self._slices = ShardGroup(cut.slices) if cut.slices is not None else None
        self._precision = precision
        self._offload = offload
        values = [each.parameter.detach() for each in members]
        if cut.placed:
            values = [place.local(value) for place, value in zip(cut.placed, values, strict=True)]
        self.trainable = members[0].parameter.requires_grad
        self.compute_device = values[0].device
        self.packing = self._packed(values, cut)
        shard = self._blank(values[0], self.packing.layout.chunk)
        self.packing.own(values, group.rank, shard)
        self.shard = pinned(shard.cpu(), offload.pin) if offload.enabled and not shard.is_meta else shard
        self.watch = GradientWatch()
        self._full = self._made([member.parameter.requires_grad for member in members])
        self._full_precision: _Full | None = None
        self._full_precision_before: _Full | None = None  # unsharded again, it is valid for what autograd saved
        self._incoming: torch.Tensor | None = None
        self._slice: torch.Tensor | None = None
        self._gathering: Pending | None = None
        self._filled = self.aliased
        self._comms = Comms()
        self._reducer = Reducer(self.packing, group, name, whole=cut.keeps_full)
        self.beginning = InitialChecksums.of([member.fqn for member in members], values, self.parts)

    def __deepcopy__(self, memo: dict[int, Any]) -> Bucket:
        """Return a bucket of the copied parameters, over the same ranks, without gradients."""
        self.free()
        made = object.__new__(type(self))
        memo[id(self)] = made
        for name, value in self.__dict__.items():
            own = name not in ("_full", "_full_precision_before", "shard", "watch")
            made.__dict__[name] = copy.deepcopy(value, memo) if own else None
        made.watch = GradientWatch()
        made.shard = self.shard.detach().clone()
        made._full = made._made([leaf.requires_grad for leaf in self._full.leaves])
        made._full.swap_params([memo.get(id(leaf)) for leaf in self._full.leaves])
        memo.update(zip(map(id, self._full.leaves), made._full.leaves, strict=True))
        return made

    def _blank(self, like: torch.Tensor, numel: int) -> torch.Tensor:
        """Return memory for the shard."""
        return torch.empty(numel, dtype=like.dtype, device=like.device)

    def _packed(self, values: Sequence[torch.Tensor], cut: Cut) -> Packing:
        names = [member.fqn for member in self.members]
        aliases = [tuple(place.fqn for place in member.places[1:]) for member in self.members]
        dims = [place.dim for place in cut.placed]
        if not dims or cut.keeps_full or cut.flat:
            itemsize = self._precision.computed(values[0].dtype).itemsize
            alignment = max(1, ALIGNMENT // itemsize) if cut.aligned else 1
            return FlatPacking(names, values, aliases, self.group.size, alignment=alignment)
        return DimPacking(names, values, aliases, self.group.size, dims=[dim or 0 for dim in dims])

    def _made(self, trains: Sequence[bool]) -> _Full:
        """Make the full parameters, without their values unless they are the shard."""
        if self.aliased:
            return _Full(self.packing, self._placed, Resizable.of(self.shard), trains, self.watch)
        return self._empty(self.compute_dtype, trains)

    def _empty(self, dtype: torch.dtype, trains: Sequence[bool]) -> _Full:
        buffer = Resizable(self.packing.whole, dtype, self.compute_device)
        made = _Full(self.packing, self._placed, buffer, trains, self.watch)
        made.buffer.free()
        return made

    # ----------------------------------------------------------------------------------------------------- facts

    @property
    def rank(self) -> int:
        """This rank's place among those that share the bucket."""
        return self.group.rank

    @property
    def layout(self) -> Layout:
        """Where each parameter lies in every rank's shard."""
        return self.packing.layout

    @property
    def placed(self) -> tuple[Placed, ...]:
        """How each parameter lies over a mesh; empty where all are plain."""
        return self._placed

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
        """Tell whether the full parameters are the shard itself, and never go."""
        return self.keeps_full and self.compute_dtype == self.dtype and self.shard.device == self.compute_device

    @property
    def leaves(self) -> tuple[nn.Parameter, ...]:
        """The full parameters; readable while the bucket is filled."""
        return (self._full_precision or self._full).leaves

    @property
    def fulls(self) -> list[torch.Tensor]:
        """The full parameters as plain tensors: of one that tensor parallelism has cut, this rank's part."""
        return (self._full_precision or self._full).views

    def wrap_unsharded(self, index: int, value: torch.Tensor) -> torch.Tensor:
        """Wrap a full value as the module's parameter: a DTensor with tensor parallelism."""
        return self._placed[index].full(value) if self._placed else value

    @property
    def filled(self) -> bool:
        """Tell whether the full parameters can be read."""
        return self._filled

    @property
    def is_full_precision(self) -> bool:
        """Tell whether the full parameters are of the stored type."""
        return self._full_precision is not None or self.compute_dtype == self.dtype

    def differs(self, *, full_precision: bool) -> bool:
        """Tell whether the full parameters are of another type than wanted: the stored one, or that to compute in."""
        return self.is_full_precision != (full_precision or self.compute_dtype == self.dtype)

    @property
    def holds_full(self) -> bool:
        """Tell whether the full buffer has its storage, filled or about to be."""
        return (self._full_precision or self._full).buffer.alive or self._incoming is not None

    @property
    def address(self) -> int:
        """Where the full buffer lies; 0 while it has no storage."""
        buffer = (self._full_precision or self._full).buffer
        return buffer.tensor.untyped_storage().data_ptr() if buffer.alive else 0

    @property
    def requires_grad(self) -> bool:
        """Tell whether any full parameter takes part in gradients."""
        return any(leaf.requires_grad for leaf in self._full.leaves)

    def train(self, index: int, on: bool) -> None:
        """Let a full parameter take part in gradients, or not.

        Args:
            index: Which of the members.
            on: Whether it does.
        """
        (self._full_precision or self._full).train(index, on)

    @property
    def parts(self) -> list[torch.Tensor]:
        """This rank's part of each parameter, as views of the shard; whole ones where nothing is sharded."""
        return self.of_shard(self.shard.data)

    def of_shard(self, shard: torch.Tensor) -> list[torch.Tensor]:
        """Return each parameter's part of something laid out as the shard is: a gradient, an optimizer state."""
        return self.packing.views(shard) if self.keeps_full else self.packing.parts(shard, self.rank)

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
        self.free()
        trains = [leaf.requires_grad for leaf in self._full.leaves]
        self.shard = pinned(shard.cpu(), self._offload.pin) if self._offload.enabled else shard
        if not self._offload.enabled:
            self.compute_device = shard.device
        self._full, self._full_precision_before = self._made(trains), None
        self._filled = self.aliased

    def select(self, kind: type[Bucket], indices: Sequence[int]) -> Bucket:
        """Return a bucket of some of the members that has no values yet, and gathers and reduces as this one.

        Args:
            kind: Class of the new bucket.
            indices: The members.
        """
        placed = tuple(self._placed[index] for index in indices)
        for index in indices:
            full, leaf = self.fulls[index], self.leaves[index]
            empty = torch.empty_strided(full.shape, full.stride(), dtype=self.dtype, device="meta")
            stand_in = nn.Parameter(placed[0].full(empty) if placed else empty, requires_grad=leaf.requires_grad)
            stand_in.__dict__.update(leaf.__dict__)
            self.members[index].replace(stand_in)
        slices = None if self._slices is None else self._slices.shard
        cut = Cut(keeps_full=self.keeps_full, placed=placed, slices=slices)
        members = [self.members[index] for index in indices]
        made = kind(members, self.group, self.name, cut, self._precision, self._offload)
        made.use(hook=self.hook, comms=self._comms, group=self._reducer.group)
        return made

    def compute_on(self, device: torch.device) -> None:
        """Compute on another device than the one the shard is on."""
        if device != self.compute_device:
            self.free()
            self.compute_device = device
            self._full, self._full_precision_before = (
                self._made([leaf.requires_grad for leaf in self._full.leaves]),
                None,
            )
            self._filled = self.aliased

    def write_back(self) -> None:
        """Take this rank's part of the full parameters, changed by a user, as its shard."""
        if not self.aliased:
            self.packing.own(self.fulls, self.rank, self.shard.data)

    # ------------------------------------------------------------------------------------------------ parameters

    def begin_gather(self, *, full_precision: bool = False) -> bool:
        """Start to fill the full buffer. Collective.

        Args:
            full_precision: In the stored type, whatever the type to compute in.

        Returns:
            Whether there was something to start.
        """
        if self._filled or self._gathering is not None:
            return False
        if full_precision and not self.is_full_precision:
            trains = [leaf.requires_grad for leaf in self._full.leaves]
            self._full_precision = self._full_precision_before = self._full_precision_before or self._empty(
                self.dtype, trains
            )
            for index, on in enumerate(trains):
                self._full_precision.train(index, on)
        with gathering(self.compute_device):
            self._gathering = self._gather((self._full_precision or self._full).buffer)
        return True

    def _gather(self, buffer: Resizable) -> Pending:
        what, dtype = f"gather {self.name}", buffer.tensor.dtype
        if self.packing.direct:
            buffer.allocate()
            incoming = buffer.tensor
        else:
            incoming = self._incoming = self._allocated(dtype)
        if self._slice is not None and self._slices is not None:
            gathers_await(self.compute_device)
            return self._slices.all_gather(incoming, self._slice, what)
        own = self.shard.detach()
        if own.dtype != dtype or own.device != incoming.device:
            chunk = self.layout.chunk  # cast to where it goes: a gather may read from its own place
            own = incoming[self.rank * chunk : (self.rank + 1) * chunk].copy_(own, non_blocking=True)
        return self.group.all_gather(incoming, own, what, self._comms.all_gather)

    def _allocated(self, dtype: torch.dtype) -> torch.Tensor:
        own = self._comms.all_gather
        if own is not None:
            return own.allocate((self.packing.gathered,), dtype=dtype, device=self.compute_device)
        return torch.empty(self.packing.gathered, dtype=dtype, device=self.compute_device)

    def finish_gather(self, *, keeps_slice: bool = False) -> None:
        """Return when the full parameters can be read.

        Args:
            keeps_slice: Keep what this rank gives when they are gathered again for backward.
        """
        if self._gathering is None:
            return
        pending, self._gathering = self._gathering, None
        pending.wait()
        await_gather(self.compute_device)
        full = self._full_precision or self._full
        incoming = full.buffer.tensor if self._incoming is None else self._incoming
        if keeps_slice and self._slices is not None and self._slice is None and self._full_precision is None:
            part = incoming.numel() // self._slices.size
            self._slice = incoming[self._slices.rank * part : (self._slices.rank + 1) * part].clone()
        if self._incoming is not None:
            full.buffer.allocate()
            self.packing.unpack(self._incoming, full.buffer.tensor)
            in_use(self._incoming)
            self._incoming = None
        self._filled = True

    def free(self, *, keeps_slice: bool = False) -> None:
        """Give up the full parameters, unless they are the shard.

        Args:
            keeps_slice: Keep the slice that `finish_gather` kept.
        """
        self.finish_gather(keeps_slice=keeps_slice)
        if not keeps_slice:
            self._slice = None
        if self.aliased:
            return
        if self._full_precision is not None:
            self._full_precision.buffer.free()
            self._full_precision = None
        self._full.buffer.free()
        self._filled = False

    # ------------------------------------------------------------------------------------------------- gradients

    @property
    def gradients(self) -> list[torch.Tensor | None]:
        """The leaves' gradients as plain tensors."""
        found = [leaf.grad for leaf in self._full.leaves]
        if self._full_precision_before is not None:
            grads = [leaf.grad for leaf in self._full_precision_before.leaves]
            found = [ours if other is None else _sum(other, ours) for ours, other in zip(found, grads, strict=True)]
        if not self._placed:
            return found
        pairs = zip(self._placed, found, strict=True)
        return [None if grad is None else placed.gradient(grad) for placed, grad in pairs]

    def unsharded_gradients(self) -> list[torch.Tensor | None]:
        """Return the leaves' gradients as plain tensors, which are what the leaves have from now on."""
        found = self.gradients
        for placed, leaf, grad in zip(self._placed, self._full.leaves, found, strict=False):
            leaf.grad = None if grad is None else placed.full(grad)
        return found

    def use(self, *, hook: CommHook | None = None, comms: Comms | None = None, group: ShardGroup | None = None) -> None:
        """Gather and reduce in another way from now on.

        Args:
            hook: Averages gradients.
            comms: Collectives of a user's own.
            group: The same ranks on other channels for gradients.
        """
        self._comms = comms or self._comms
        self._reducer.use(hook=hook, comms=comms, group=group)

    @property
    def hook(self) -> CommHook | None:
        """What averages gradients in the engine's place."""
        return self._reducer.hook

    def begin_reduce(
        self, *, factor: float | None = None, split: bool = False, all_reduce: bool = True, full_precision: bool = False
    ) -> None:
        """Start to average the leaves' gradients and take them from the leaves. Collective.

        Args:
            factor: What sums are divided by; the number of ranks where None.
            split: Divide in two steps, before and after the sum.
            all_reduce: Sum over replicas as well.
            full_precision: In the stored type, whatever the type to reduce in.
        """
        dtype = self.dtype if full_precision else self._precision.reduced(self.dtype)
        gradients = self.gradients
        self.drop_gradients()
        self._reducer.begin(gradients, Averaging(dtype, self.compute_device, factor, split, all_reduce))

    @property
    def holds_gradients(self) -> bool:
        """Tell whether there are gradients that have not been handed over."""
        return self._reducer.holds_gradients or any(grad is not None for grad in self.gradients)

    @property
    def reduced(self) -> bool:
        """Tell whether `finish_reduce` would return at once."""
        return self._reducer.done

    def finish_reduce(self) -> Reduced | None:
        """Return the averaged gradient of this rank's shard; None when there is none yet."""
        reduced = self._reducer.finish()
        if reduced is None:
            return None
        return Reduced(reduced.gradient.to(dtype=self.gradient_dtype, device=self.shard.device), reduced.used)

    def stash_unsharded_grads(self) -> None:
        """Move the leaves' gradients to the reducer, which adds them to the next reduction."""
        self._reducer.hold(self.gradients, self._precision.reduced(self.dtype))
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Forget the leaves' gradients."""
        for each in (self._full, self._full_precision_before):
            for leaf in each.leaves if each is not None else ():
                leaf.grad = None

    def reset_after_error(self) -> None:
        """Wait for collectives after an error, drop gradients and free the full parameters."""
        try:
            self._reducer.reset_after_error()
            self.finish_gather()
        finally:
            self._gathering = self._incoming = None
            self.drop_gradients()
            self.free()
