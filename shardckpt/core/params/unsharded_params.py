"""A bucket's full parameters, which are gathered for computation and then freed."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn

from shardckpt.core.comm.collectives import AllGatherOp, Pending, ShardGroup, allocate
from shardckpt.core.comm.streams import ResizableStorage, get_device_streams
from shardckpt.core.modules.autograd_hooks import GradientWatch, profile_range
from shardckpt.core.params.buffer_layout import BucketLayout, Packing, StoredShard
from shardckpt.devices import Event, get_current_stream, record_stream


class ParamPlacement(Protocol):
    """One parameter's placement on a mesh; buckets contain plain local tensors."""

    @property
    def dim(self) -> int | None:
        """Sharded dimension; None if every rank has the full parameter."""

    def local(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the tensor to shard: the parameter, or this rank's TP shard."""

    def sharded(self, local: torch.Tensor) -> torch.Tensor:
        """Return a DTensor around this rank's shard."""

    def full(self, local: torch.Tensor) -> torch.Tensor:
        """Return the parameter to compute with, around the full local tensor."""

    def gradient(self, grad: torch.Tensor) -> torch.Tensor:
        """Return the plain gradient for the full local tensor."""


class _Leaves:
    """Full parameters with one dtype: leaves over one resizable buffer."""

    # Created once, so that tensors that autograd saved are valid again after the next unshard.

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
        """Replace leaves by given objects, which a copied model's modules already have."""
        for other, leaf in zip(others, self.params, strict=True):
            if other is not None:
                torch.utils.swap_tensors(other, leaf)  # type: ignore[no-untyped-call]
        self.params = tuple(leaf if other is None else other for other, leaf in zip(others, self.params, strict=True))


def _sum(one: torch.Tensor, other: torch.Tensor | None) -> torch.Tensor:
    return one if other is None else one + other.to(one.dtype)


class UnshardedParams:
    """A bucket's full parameters with gradients (torch: FSDP2's `unsharded_param`)."""

    # They have the compute dtype, or the stored dtype for a forward in full precision.

    def __init__(
        self,
        stored: StoredShard,
        layout: BucketLayout,
        *,
        placements: Sequence[ParamPlacement],
        device: torch.device,
        trains: Sequence[bool],
        post_forward_group: ShardGroup | None = None,
    ) -> None:
        self._stored = stored
        self._layout = layout
        self._placements = tuple(placements)
        self.post_forward_group = post_forward_group
        self.custom_all_gather: AllGatherOp | None = None  # the user's; None for torch's
        # A reshard keeps the full parameters' memory, so that their addresses stay.
        self.keeps_storage = False
        self._kept_event: Event | None = None  # after the computation with full parameters whose memory was kept
        self.watch = GradientWatch()  # for the leaves' first gradient
        self._gather_output: torch.Tensor | None = None
        self._partial_shard: torch.Tensor | None = None
        self._partial_shard_event: Event | None = None  # after the shard's copy
        self._pending: Pending | None = None
        self._gather_event: Event | None = None  # after the all-gather
        self._build(device, trains)

    def _build(self, device: torch.device, trains: Sequence[bool]) -> None:
        """Create the full parameters, without values unless they alias the shard."""
        data, dtypes = self._stored.data, self._stored.dtypes
        self.device, self.streams = device, get_device_streams(device)
        self.is_aliased = self._layout.keeps_full and dtypes.compute == dtypes.stored and data.device == device
        self.is_unsharded = self.is_aliased
        if self.is_aliased:
            buffer = ResizableStorage.from_tensor(data)
            self._leaves = _Leaves(self._layout.packing, self._placements, buffer, trains, self.watch)
        else:
            self._leaves = self._build_freed(dtypes.compute, trains)
        self._stored_dtype_leaves: _Leaves | None = None  # kept, as autograd may have saved them
        self._current = self._leaves

    def _build_freed(self, dtype: torch.dtype, trains: Sequence[bool]) -> _Leaves:
        buffer = ResizableStorage(self._layout.packing.all_gather_numel, dtype, self.device)
        leaves = _Leaves(self._layout.packing, self._placements, buffer, trains, self.watch)
        leaves.buffer.free()
        return leaves

    def rebuild(self, device: torch.device) -> None:
        """Create the resharded full parameters again, for a shard with another dtype or device."""
        self._build(device, self.trains)

    def __deepcopy__(self, memo: dict[int, Any]) -> UnshardedParams:
        """Return a copied bucket's full parameters, sharded and without gradients."""
        self.reshard()
        copied = memo[id(self)] = copy.copy(self)
        copied._stored = copy.deepcopy(self._stored, memo)
        copied._layout = copy.deepcopy(self._layout, memo)
        copied._placements = copy.deepcopy(self._placements, memo)
        copied.watch = GradientWatch()
        copied.rebuild(self.device)
        copied._leaves.swap_params([memo.get(id(leaf)) for leaf in self._leaves.params])
        memo.update(zip(map(id, self._leaves.params), copied._leaves.params, strict=True))
        return copied

    # ------------------------------------------------------------------------------------------------ parameters

    @property
    def params(self) -> tuple[nn.Parameter, ...]:
        """Full parameters; readable while they are unsharded."""
        return self._current.params

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Full parameters as plain tensors; with tensor parallelism, TP shards."""
        return self._current.views

    def has_wrong_dtype(self, *, full_precision: bool) -> bool:
        """Return True if the full parameters do not have the wanted dtype: the stored or the compute dtype."""
        same = self._stored.dtypes.compute == self._stored.dtypes.stored
        return self.is_full_precision != (full_precision or same)

    @property
    def is_full_precision(self) -> bool:
        """Return True if the full parameters have the stored dtype."""
        return self._current is not self._leaves or self._stored.dtypes.compute == self._stored.dtypes.stored

    @property
    def has_storage(self) -> bool:
        """Return True if the full buffer has storage, also during an all-gather."""
        return self._current.buffer.alive or self._gather_output is not None

    @property
    def trains(self) -> list[bool]:
        """Whether each full parameter requires gradients."""
        return [leaf.requires_grad for leaf in self._leaves.params]

    @property
    def requires_grad(self) -> bool:
        """Return True if any full parameter requires gradients."""
        return any(leaf.requires_grad for leaf in self._leaves.params)

    def set_requires_grad(self, index: int, on: bool) -> None:
        """Set whether a full parameter requires gradients."""
        self._current.set_requires_grad(index, on)

    # ------------------------------------------------------------------------------------------------ all-gather

    def start_all_gather(self, *, full_precision: bool = False) -> bool:
        """Start the all-gather for the full parameters, and return whether it was needed. Collective."""
        if self.is_unsharded or self._pending is not None:
            return False
        if full_precision and not self.is_full_precision:
            self._use_stored_dtype()
        self._make_gather_wait()
        with profile_range("all_gather", self._layout.name.text), self.streams.use_gather_stream():
            try:
                self._pending = self._launch_all_gather(self._current.buffer)
            except BaseException:  # out of memory: a buffer without values must not seem to be unsharded
                self.reshard(keep_partial_shard=True)
                raise
            self._gather_event = self.streams.record_event()
        return True

    def _use_stored_dtype(self) -> None:
        """Use leaves with the stored dtype until the next reshard."""
        trains = self.trains
        self._stored_dtype_leaves = self._stored_dtype_leaves or self._build_freed(self._stored.dtypes.stored, trains)
        self._current = self._stored_dtype_leaves
        for index, on in enumerate(trains):
            self._current.set_requires_grad(index, on)

    def _launch_all_gather(self, buffer: ResizableStorage) -> Pending:
        what, dtype = f"gather {self._layout.name.text}", buffer.tensor.dtype
        if self._layout.packing.is_direct:
            buffer.allocate()
            incoming = buffer.tensor
        else:
            numel = self._layout.packing.all_gather_numel
            incoming = self._gather_output = allocate(self.custom_all_gather, numel, dtype, self.device)
        if self._partial_shard is not None and self.post_forward_group is not None:
            return self.post_forward_group.all_gather(incoming, self._partial_shard, what)
        shard = self._stored.data.detach()
        if shard.dtype != dtype or shard.device != incoming.device:
            chunk = shard.numel()  # cast into the output: an all-gather may read its input there
            rank = self._layout.group.rank
            shard = incoming[rank * chunk : (rank + 1) * chunk].copy_(shard, non_blocking=True)
        return self._layout.group.all_gather(incoming, shard, what, self.custom_all_gather)

    def _make_gather_wait(self) -> None:
        """Make an all-gather wait for the current stream, which read kept memory or copied the kept shard."""
        if self._kept_event is not None or (self.keeps_storage and self.streams.is_capturing):
            self.streams.make_gathers_wait(self._kept_event)
            self._kept_event = None
        if self._partial_shard is not None:
            self.streams.make_gathers_wait(self._partial_shard_event)

    def wait_all_gather(self, *, keep_partial_shard: bool = False) -> int:
        """Wait until the full parameters can be read; return their address, or 0 if nothing was pending."""
        if self._pending is None:
            return 0
        pending, self._pending = self._pending, None
        pending.wait()
        buffer = self._current.buffer
        gathered = buffer.tensor if self._gather_output is None else self._gather_output
        if self._gather_event is not None:  # not for all-gathers that were started later
            get_current_stream(self.device).wait_event(self._gather_event)
            record_stream(gathered)  # its memory belongs to the all-gather stream
        if keep_partial_shard:
            self._keep_partial_shard(gathered)
        if self._gather_output is not None:
            with profile_range("all_gather_copy_out", self._layout.name.text):
                buffer.allocate()
                self._layout.packing.unpack(self._gather_output, buffer.tensor)
            self._gather_output = None
        self.is_unsharded = True
        return buffer.tensor.untyped_storage().data_ptr()

    def _keep_partial_shard(self, gathered: torch.Tensor) -> None:
        """Keep this rank's shard over `post_forward_group`, in the compute dtype."""
        group = self.post_forward_group
        if group is not None and self._partial_shard is None and self._current is self._leaves:
            numel = gathered.numel() // group.size
            self._partial_shard = gathered[group.rank * numel : (group.rank + 1) * numel].clone()
            self._partial_shard_event = self.streams.record_event()

    def reshard(self, *, keep_partial_shard: bool = False) -> None:
        """Free the full parameters, unless they alias the shard or are kept; allocates no memory."""
        pending, self._pending = self._pending, None
        try:
            if pending is not None:
                with self.streams.use_gather_stream():  # owner of the memory
                    pending.wait()
                    if self._partial_shard is not None:
                        record_stream(self._partial_shard)  # from the compute stream, which did not wait
        finally:
            if not keep_partial_shard:
                self._partial_shard = None
            self._gather_output = None
            if not self.is_aliased:
                if self.keeps_storage and self.is_unsharded:
                    self._kept_event = self.streams.record_reuse_event()
                self._current.buffer.free(keep_memory=self.keeps_storage)
                self._leaves.buffer.free(keep_memory=self.keeps_storage)
                self._current = self._leaves
                self.is_unsharded = False

    def discard(self) -> None:
        """Drop full parameters, gradients and a pending all-gather after an error."""
        self.drop_gradients()
        self.reshard()

    # ------------------------------------------------------------------------------------------------- gradients

    @property
    def gradients(self) -> list[torch.Tensor | None]:
        """The leaves' gradients as plain tensors."""
        grads = [leaf.grad for leaf in self._leaves.params]
        if self._stored_dtype_leaves is not None:
            others = [leaf.grad for leaf in self._stored_dtype_leaves.params]
            grads = [grad if other is None else _sum(other, grad) for grad, other in zip(grads, others, strict=True)]
        if not self._placements:
            return grads
        pairs = zip(self._placements, grads, strict=True)
        return [None if grad is None else placement.gradient(grad) for placement, grad in pairs]

    def unwrap_gradients(self) -> list[torch.Tensor | None]:
        """Return the leaves' gradients as plain tensors, and set these on the leaves."""
        grads = self.gradients
        for placement, leaf, grad in zip(self._placements, self._leaves.params, grads, strict=False):
            leaf.grad = None if grad is None else placement.full(grad)
        return grads

    def take_gradients(self) -> list[torch.Tensor | None]:
        """Return the leaves' gradients as plain tensors, and drop them from the leaves."""
        grads = self.gradients
        self.drop_gradients()
        return grads

    def drop_gradients(self) -> None:
        """Drop the leaves' gradients."""
        for leaf in self._leaves.params:
            leaf.grad = None
        if self._stored_dtype_leaves is not None:
            for leaf in self._stored_dtype_leaves.params:
                leaf.grad = None
