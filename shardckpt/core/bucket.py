"""One homogeneous set of parameters (dtype, trainable, group): its shard, its full buffer, its gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from shardckpt.core.comm import Pending, ShardGroup
from shardckpt.core.device import Resizable
from shardckpt.core.traverse import Managed, Name
from shardckpt.layout import ALIGNMENT, FlatLayout, ParamSpec


@dataclass(frozen=True)
class Reduced:
    """What a reduction gives a rank.

    Attributes:
        gradient: The mean over ranks of this rank's shard of the gradient, padding included.
        used: For each parameter, whether any rank had a gradient for it.
    """

    gradient: torch.Tensor
    used: tuple[bool, ...]


@dataclass(frozen=True)
class _Reduction:
    out: torch.Tensor
    source: torch.Tensor
    all_used: bool
    pending: Pending


def memory_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the dimensions of a dense tensor from the slowest to the fastest; empty where that is row-major order."""
    if tensor.is_contiguous():
        return ()
    steps = tensor.stride()
    order = tuple(sorted(range(tensor.dim()), key=lambda d: (-steps[d], d)))
    return order if tensor.permute(order).is_contiguous() else ()


class Bucket:
    """Parameters of one dtype that are gathered, freed and reduced together.

    The full parameters are leaves over one resizable buffer; they are made once and live as long as the bucket, so that
    what autograd saved of them is valid again once the buffer is filled again.

    Args:
        members: The parameters, all of one dtype, with their full values.
        group: The ranks that share them.
        name: What messages call the bucket.
        aligned: Whether each parameter begins at a multiple of 16 bytes.
        keeps_full: Whether every rank keeps everything: the full buffer is the shard.
    """

    def __init__(
        self, members: Sequence[Managed], group: ShardGroup, name: Name, *, aligned: bool, keeps_full: bool
    ) -> None:
        first = members[0].parameter
        self.name = name
        self.members = tuple(members)
        self.group = group
        self.keeps_full = keeps_full
        self.trainable = first.requires_grad
        specs = tuple(_spec(member) for member in members)
        self.layout = FlatLayout(specs, group.size, max(1, ALIGNMENT // first.dtype.itemsize) if aligned else 1)
        self._buffer = Resizable(self.layout.chunk * group.size, first.dtype, first.device)
        trains = [member.parameter.requires_grad for member in members]
        self.leaves = tuple(nn.Parameter(self._view(i), requires_grad=on) for i, on in enumerate(trains))
        self._gathering: Pending | None = None
        self._filled = True
        self._reduction: _Reduction | None = None
        self._fill([member.parameter.detach() for member in members])
        self.shard = self._own_part()
        if not keeps_full:
            self.free()

    @property
    def rank(self) -> int:
        """This rank's place among those that share the bucket."""
        return self.group.rank

    @property
    def dtype(self) -> torch.dtype:
        """Type of the shard and of the full parameters."""
        return self.shard.dtype

    @property
    def filled(self) -> bool:
        """Tell whether the full parameters can be read."""
        return self._filled

    @property
    def holds_full(self) -> bool:
        """Tell whether the full buffer has its storage, filled or about to be."""
        return self._buffer.alive

    @property
    def address(self) -> int:
        """Where the full buffer lies; 0 while it has no storage."""
        return self._buffer.tensor.untyped_storage().data_ptr() if self._buffer.alive else 0

    @property
    def requires_grad(self) -> bool:
        """Tell whether any full parameter takes part in gradients."""
        return any(leaf.requires_grad for leaf in self.leaves)

    def _view(self, index: int) -> torch.Tensor:
        spec, at = self.layout.specs[index], self.layout.offsets[index]
        view = self._buffer.tensor.data[at : at + spec.numel].view(spec.memory_shape)
        if spec.order:
            view = view.permute([spec.order.index(d) for d in range(len(spec.order))])
        return view

    def _fill(self, values: Sequence[torch.Tensor]) -> None:
        self._buffer.tensor.zero_()
        for leaf, value in zip(self.leaves, values, strict=True):
            leaf.data.copy_(value)

    def _own_part(self) -> torch.Tensor:
        whole = self._buffer.tensor
        if self.keeps_full:
            return whole
        start = self.rank * self.layout.chunk
        return whole[start : start + self.layout.chunk].clone()

    @cached_property
    def runs(self) -> dict[int, slice]:
        """Where this rank's part of each parameter lies in the shard; parameters without a part are left out."""
        return {run.index: slice(run.offset, run.offset + run.numel) for run in self.layout.runs(self.rank)}

    def replace_shard(self, shard: torch.Tensor) -> None:
        """Take another tensor of the same length as the shard, on its device and of its dtype.

        Args:
            shard: The new one; it is aliased, not copied, unless nothing is sharded.
        """
        if self.keeps_full and shard.dtype == self.dtype and shard.device == self.shard.device:
            self.shard.data.copy_(shard)
            return
        if shard.dtype != self.dtype or shard.device != self.shard.device:
            self.free()
            self._move(shard)
        self.shard = self._buffer.tensor if self.keeps_full else shard

    def _move(self, like: torch.Tensor) -> None:
        self._buffer = Resizable(self.layout.chunk * self.group.size, like.dtype, like.device)
        if self.keeps_full:
            self._buffer.tensor.copy_(like)
        for index, leaf in enumerate(self.leaves):
            leaf.data = self._view(index)
        if not self.keeps_full:
            self._buffer.free()

    # ------------------------------------------------------------------------------------------------ parameters

    def begin_gather(self) -> bool:
        """Start to fill the full buffer. Collective.

        Returns:
            Whether there was something to start.
        """
        if self._filled or self._gathering is not None:
            return False
        self._buffer.allocate()
        self._gathering = self.group.all_gather(self._buffer.tensor, self.shard.detach(), f"gather {self.name}")
        return True

    def finish_gather(self) -> None:
        """Return when the full parameters can be read."""
        if self._gathering is not None:
            pending, self._gathering = self._gathering, None
            pending.wait()
            self._filled = True

    def free(self) -> None:
        """Give up the full parameters, unless they are the shard."""
        self.finish_gather()
        if not self.keeps_full:
            self._buffer.free()
            self._filled = False

    def write_back(self) -> None:
        """Take this rank's part of the full parameters, changed by a user, as its shard."""
        if not self.keeps_full:
            self.shard.data.copy_(self._own_part())

    # ------------------------------------------------------------------------------------------------- gradients

    def begin_reduce(self, dtype: torch.dtype | None = None) -> None:
        """Start to average the leaves' gradients and take them from the leaves. Collective.

        The size depends on the layout and the number of ranks alone: parameters without a gradient count as zeros, and
        a flag for each, behind every rank's chunk, tells who had one.

        Args:
            dtype: Type to reduce in; the parameters' where None.
        """
        chunk, count, size = self.layout.chunk, len(self.leaves), self.group.size
        row = chunk + count
        source = torch.zeros(size * row, dtype=dtype or self.dtype, device=self.shard.device)
        flags = torch.tensor([float(leaf.grad is not None) for leaf in self.leaves])
        source.view(size, row)[:, chunk:] = flags.to(source.dtype).to(source.device)
        self._copy_gradients(source, row)
        out = torch.empty(row, dtype=source.dtype, device=source.device) if size > 1 else source
        all_used = all(leaf.grad is not None for leaf in self.leaves)
        self.drop_gradients()
        if size > 1:
            pending = self.group.reduce_scatter(out, source, f"reduce {self.name}")
        else:
            pending = self.group.all_reduce(out, f"reduce {self.name}")
        self._reduction = _Reduction(out, source, all_used, pending)

    def _copy_gradients(self, source: torch.Tensor, row: int) -> None:
        for rank in range(self.group.size):
            for run in self.layout.runs(rank):
                grad = self.leaves[run.index].grad
                if grad is None:
                    continue
                at = rank * row + run.offset
                order = self.layout.specs[run.index].order
                flat = (grad.permute(order) if order else grad).reshape(-1)
                source[at : at + run.numel].copy_(flat[run.start : run.stop])

    def finish_reduce(self) -> Reduced | None:
        """Return the averaged gradient of this rank's shard; None when no reduction is under way."""
        reduction, self._reduction = self._reduction, None
        if reduction is None:
            return None
        reduction.pending.wait()
        if self.group.size > 1:
            self.group.all_reduce(reduction.out, f"reduce {self.name} over replicas").wait()
        chunk = self.layout.chunk
        used = [True] * len(self.leaves) if reduction.all_used else (reduction.out[chunk:] > 0).tolist()
        gradient = reduction.out[:chunk]
        if self.group.world > 1:
            gradient.div_(self.group.world)
        return Reduced(gradient.to(self.dtype), tuple(used))

    def drop_gradients(self) -> None:
        """Forget the leaves' gradients."""
        for leaf in self.leaves:
            leaf.grad = None

    def abandon(self) -> None:
        """After a failure: wait for what is under way, forget gradients, free the full parameters."""
        try:
            if self._reduction is not None:
                self._reduction.pending.wait()
            self.finish_gather()
        finally:
            self._reduction = self._gathering = None
            self.drop_gradients()
            self.free()


def _spec(member: Managed) -> ParamSpec:
    parameter = member.parameter
    return ParamSpec(
        member.fqn,
        tuple(parameter.shape),
        str(parameter.dtype).removeprefix("torch."),
        memory_order(parameter),
        tuple(place.fqn for place in member.places[1:]),
    )
