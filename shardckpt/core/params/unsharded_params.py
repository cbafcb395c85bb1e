"""A bucket's full parameters, which are gathered for computation and then freed."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Protocol

import torch
from torch import nn

from shardckpt.core.comm.collectives import AllGatherOp, Pending, ShardGroup, allocate
from shardckpt.core.comm.streams import ResizableStorage, get_device_streams
from shardckpt.core.modules.autograd_hooks import GradientWatch, profile_range
from shardckpt.core.modules.optimizer_steps import StepWatch
from shardckpt.core.params.buffer_layout import FlatPacking, Packing, StoredShard
from shardckpt.devices import Event, get_current_stream, record_stream
from shardckpt.layout import ALIGNMENT


class ParamPlacement(Protocol):
    """One parameter's placement on a mesh; buckets contain plain local tensors."""

    @property
    def dim(self) -> int | None:
        """Sharded dimension; None if every rank has the full parameter."""

    def local(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the tensor to shard: the parameter, or this rank's TP shard."""

    def sharded(self, local: torch.Tensor, *, keeps_storage: bool = False) -> torch.Tensor:
        """Return a DTensor around this rank's shard; its local tensor may keep the storage that the shard is in."""

    def full(self, local: torch.Tensor) -> torch.Tensor:
        """Return the parameter to compute with, around the full local tensor."""

    def gradient(self, grad: torch.Tensor) -> torch.Tensor:
        """Return the plain gradient for the full local tensor."""


class BucketPhase(Enum):
    """The form in which a bucket's parameters are."""

    SHARDED = auto()  # this rank's shard is registered
    GATHERING = auto()  # and an all-gather is pending
    UNSHARDED = auto()  # full parameters are registered, for a computation
    KEPT = auto()  # full parameters stay until the next one


# Triples of phase before, function and phase after. A bucket that aliases its shard has full parameters in all phases.
BUCKET_TRANSITIONS: frozenset[tuple[BucketPhase, str, BucketPhase]] = frozenset(
    {
        (BucketPhase.SHARDED, "start_all_gathers", BucketPhase.GATHERING),
        (BucketPhase.SHARDED, "wait_all_gather", BucketPhase.UNSHARDED),  # if it aliases its shard
        (BucketPhase.GATHERING, "wait_all_gather", BucketPhase.UNSHARDED),
        (BucketPhase.UNSHARDED, "wait_all_gather", BucketPhase.UNSHARDED),
        (BucketPhase.KEPT, "wait_all_gather", BucketPhase.UNSHARDED),
        (BucketPhase.UNSHARDED, "keep", BucketPhase.KEPT),
        (BucketPhase.KEPT, "keep", BucketPhase.KEPT),
        *((phase, "reshard", BucketPhase.SHARDED) for phase in BucketPhase),
    }
)


@dataclass(frozen=True)
class KeptVersions:
    """Versions of parameters as of the end of a computation, to detect a user's changes to kept ones."""

    full: tuple[tuple[torch.Tensor, int, int], ...]  # with data pointers
    shards: tuple[tuple[torch.Tensor, int], ...]
    # A rank may have no elements of a shard: then it sees optimizer steps, not updates.
    steps: StepWatch | None

    @property
    def is_outdated(self) -> bool:
        """Return True if shards may have been updated since; every rank sees a torch optimizer's step."""
        if self.steps is not None and self.steps.has_stepped:
            return True
        return any(param._version != version for param, version in self.shards)

    @property
    def has_new_versions(self) -> bool:
        """Return True if full parameters were changed in place."""
        return any(param._version != version for param, version, _ in self.full)

    @property
    def is_modified(self) -> bool:
        """Return True if full parameters were changed in place, or got other data."""
        return self.has_new_versions or any(param.data_ptr() != memory for param, _, memory in self.full)


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


class BucketLeaves:
    """A bucket's full parameters as autograd's leaves, with gradients."""

    # They have the compute dtype, or the stored dtype for a forward in full precision.

    def __init__(
        self,
        stored: StoredShard,
        *,
        placements: Sequence[ParamPlacement],
        device: torch.device,
        trains: Sequence[bool],
        post_forward_group: ShardGroup | None = None,
    ) -> None:
        self._stored = stored
        self._placements = tuple(placements)
        self.post_forward_group = post_forward_group
        self.watch = GradientWatch()  # for the leaves' first gradient
        self._build(device, trains)

    def _build(self, device: torch.device, trains: Sequence[bool]) -> None:
        """Create the full parameters, without values unless they alias the shard."""
        data, dtypes = self._stored.data, self._stored.dtypes
        self.device, self.streams = device, get_device_streams(device)
        self.is_aliased = self._stored.keeps_full and dtypes.compute == dtypes.stored and data.device == device
        self.phase = BucketPhase.SHARDED
        if self.is_aliased:
            buffer = ResizableStorage.from_tensor(data)
            self._leaves = _Leaves(self._stored.packing, self._placements, buffer, trains, self.watch)
        else:
            self._leaves = self._build_freed(dtypes.compute, trains)
        self._stored_dtype_leaves: _Leaves | None = None  # kept, as autograd may have saved them
        self._current = self._leaves

    def _build_freed(self, dtype: torch.dtype, trains: Sequence[bool]) -> _Leaves:
        buffer = ResizableStorage(self._stored.packing.all_gather_numel, dtype, self.device)
        leaves = _Leaves(self._stored.packing, self._placements, buffer, trains, self.watch)
        leaves.buffer.free()
        return leaves

    def rebuild(self, device: torch.device) -> None:
        """Create the resharded full parameters again, for a shard with another dtype or device."""
        self._build(device, self.trains)

    @property
    def is_unsharded(self) -> bool:
        """Return True if the full parameters can be read."""
        return self.is_aliased or self.phase in (BucketPhase.UNSHARDED, BucketPhase.KEPT)

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

    def _use_stored_dtype(self) -> None:
        """Use leaves with the stored dtype until the next reshard."""
        trains = self.trains
        self._stored_dtype_leaves = self._stored_dtype_leaves or self._build_freed(self._stored.dtypes.stored, trains)
        self._current = self._stored_dtype_leaves
        for index, on in enumerate(trains):
            self._current.set_requires_grad(index, on)

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


class UnshardedParams(BucketLeaves):
    """A bucket's full parameters, which an all-gather fills (torch: FSDP2's `unsharded_param`)."""

    # A reshard with `keeps_storage` keeps the full parameters' memory, so that their addresses stay.

    needs_message = False  # the bucket always sends copies of its tensors

    keeps_storage = False
    custom_all_gather: AllGatherOp | None = None

    def _build(self, device: torch.device, trains: Sequence[bool]) -> None:
        super()._build(device, trains)
        # Gathered tensors to copy from, each with a row per rank; empty if ranks send straight to the full buffer.
        self._rows: tuple[torch.Tensor, ...] = ()
        self._message: _Message | None = None  # that has the rows, if other buckets share it
        self.kept: KeptVersions | None = None  # in phase KEPT, unless the parameters alias the shard
        self._partial_shard: torch.Tensor | None = None
        self._partial_shard_event: Event | None = None  # after the shard's copy
        self._pending = Pending(None, "")
        self._gather_event: Event | None = None  # after the all-gather
        self.set_all_gather(self.custom_all_gather)

    def __deepcopy__(self, memo: dict[int, Any]) -> UnshardedParams:
        """Return a copied bucket's full parameters, sharded and without gradients."""
        self.reshard()
        copied = memo[id(self)] = copy.copy(self)
        copied._stored = copy.deepcopy(self._stored, memo)
        copied._placements = copy.deepcopy(self._placements, memo)
        copied.watch = GradientWatch()
        copied.rebuild(self.device)
        copied._leaves.swap_params([memo.get(id(leaf)) for leaf in self._leaves.params])
        memo.update(zip(map(id, self._leaves.params), copied._leaves.params, strict=True))
        return copied

    def set_all_gather(self, custom: AllGatherOp | None) -> None:
        """Set a user's all-gather; None for torch's."""
        self.custom_all_gather = custom
        packing = self._stored.packing
        # False if there is nothing to send: then the all-gather is a copy on the current stream.
        self._uses_gather_stream = not (
            self._stored.group.size == 1 and custom is None and self._stored.data.device == self.device
        )
        # The all-gather's output is the full buffer.
        self._fills_buffer = packing.is_direct and (isinstance(packing, FlatPacking) or not self._uses_gather_stream)
        # Computation reads memory that belongs to the all-gather stream.
        self.has_gathered_memory = self._fills_buffer and not self.is_aliased and self._uses_gather_stream

    @property
    def message_key(self) -> object:
        """Buckets with equal keys can be gathered by one message."""
        if self._fills_buffer or self._partial_shard is not None:
            return id(self)
        return self._stored.group, self.custom_all_gather, self.device

    def start_all_gather(self, *, full_precision: bool = False) -> None:
        """Start the all-gather for the full parameters, unless they alias the shard. Collective."""
        if not self.is_aliased:
            start_all_gathers([self], full_precision=full_precision)

    def _start_one(self, *, full_precision: bool) -> None:
        """Start an all-gather that reads the shard itself, if it has the right dtype and device."""
        if self._partial_shard is not None:
            self._make_gather_wait()
        if full_precision and not self.is_full_precision:
            self._use_stored_dtype()
        streams, group, buffer = self.streams, self._stored.group, self._current.buffer
        shard, dtype, what = self._stored.data.detach(), buffer.tensor.dtype, f"gather {self._stored.name.text}"
        context: AbstractContextManager[object] = nullcontext()
        if streams.is_async:
            context = streams.use_gather_stream() if self._uses_gather_stream else streams.use_current_stream()
        with profile_range("all_gather", self._stored.name.text), context:
            if self._fills_buffer:
                buffer.allocate()
                incoming = buffer.tensor
            else:
                numel = self._stored.packing.all_gather_numel
                incoming = allocate(self.custom_all_gather, numel, dtype, self.device)
                self._rows = (incoming.view(group.size, -1),)
            if self._partial_shard is not None and self.post_forward_group is not None:
                self._pending = self.post_forward_group.all_gather(incoming, self._partial_shard, what)
            else:
                if shard.dtype != dtype or shard.device != incoming.device:
                    chunk = shard.numel()  # cast into the output: an all-gather may read its input there
                    shard = incoming[group.rank * chunk : (group.rank + 1) * chunk].copy_(shard, non_blocking=True)
                self._pending = group.all_gather(incoming, shard, what, self.custom_all_gather)
            if streams.is_async:
                self._gather_event = streams.record_event()
        self.phase = BucketPhase.GATHERING

    @staticmethod
    def _start_several(several: Sequence[UnshardedParams], *, full_precision: bool) -> None:
        """Start an all-gather of several tensors of any dtypes, which every rank copies into one message."""
        first = several[0]
        streams, group, custom = first.streams, first._stored.group, first.custom_all_gather
        context = streams.use_gather_stream() if first._uses_gather_stream else streams.use_current_stream()
        with profile_range("all_gather", first._stored.name.text), context:
            inputs = [params._collect_inputs(full_precision=full_precision) for params in several]
            message = _Message(several, [part for parts in inputs for part in parts], group.size)
            rows = message.allocate(custom, first.device)
            message.copy_in(rows[group.rank])
            pending = group.all_gather(rows.view(-1), rows[group.rank], f"gather {first._stored.name}", custom)
            event = streams.record_event()
        parts_of_rows = iter(message.split())
        for params, parts in zip(several, inputs, strict=True):
            params._rows = tuple(next(parts_of_rows) for _ in parts)
            params._message, params._pending, params._gather_event = message, pending, event
            params.phase = BucketPhase.GATHERING

    def _collect_inputs(self, *, full_precision: bool) -> list[tuple[torch.Tensor, torch.dtype]]:
        """Return the tensors to send, and their dtypes in the message."""
        if full_precision and not self.is_full_precision:
            self._use_stored_dtype()
        return [(self._stored.data.detach(), self._current.buffer.tensor.dtype)]

    def _make_gather_wait(self) -> None:
        """Make an all-gather wait for the copy of the kept shard."""
        self.streams.make_gathers_wait(self._partial_shard_event)

    def wait_all_gather(self, *, keep_partial_shard: bool = False) -> int:
        """Wait until the full parameters can be read; return their address, or 0 if nothing was pending."""
        if self.phase is not BucketPhase.GATHERING:
            self.phase, self.kept = BucketPhase.UNSHARDED, None
            return 0
        self._pending.wait()
        if self._gather_event is not None:  # not for all-gathers that were started later
            get_current_stream(self.device).wait_event(self._gather_event)
        if keep_partial_shard:
            self._keep_partial_shard()
        full = self._current.buffer.tensor
        if self._rows:
            with profile_range("all_gather_copy_out", self._stored.name.text):
                full = self._copy_out(self._rows)
            self._drop_rows()
        elif self.has_gathered_memory:
            record_stream(full)
        self.phase = BucketPhase.UNSHARDED
        return full.untyped_storage().data_ptr()

    def _copy_out(self, rows: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Copy gathered rows to the full parameters, and return their memory."""
        if self._message is None or not self._message.copy_out():
            self._current.buffer.allocate()
            self._stored.packing.unpack(rows[0], self._current.buffer.tensor)
        return self._current.buffer.tensor

    def _allocate_outputs(self) -> list[torch.Tensor] | None:
        """Allocate what gathered rows are copied to, and return its parts; None if they are not contiguous."""
        self._current.buffer.allocate()
        return self._stored.packing.list_rows(self._current.buffer.tensor)

    def _drop_rows(self) -> None:
        """Free gathered rows once queued copies have read them: their memory belongs to the all-gather stream."""
        rows, self._rows, self._message = self._rows, (), None
        self.streams.hold_gather_output(rows[0])

    def _keep_partial_shard(self) -> None:
        """Keep this rank's shard over `post_forward_group`, in the compute dtype."""
        group = self.post_forward_group
        if group is not None and self._partial_shard is None and self._current is self._leaves and self._rows:
            count = self._rows[0].shape[0] // group.size  # ranks in a slice
            rows = self._rows[0][group.rank * count : (group.rank + 1) * count]
            self._partial_shard = rows.clone(memory_format=torch.contiguous_format).view(-1)
            self._partial_shard_event = self.streams.record_event()

    def keep(
        self, full: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], *, watches_steps: bool = False
    ) -> None:
        """Keep the full parameters, and record the versions of what users can change until the next computation."""
        self.phase = BucketPhase.KEPT
        if self.is_aliased:  # a user may change the shard at any time
            return
        versions, versions_of_shards = [], []
        for param in full:
            versions.append((param, param._version, param.data_ptr()))
        for param in shards:
            for each in (param, getattr(param, "_local_tensor", None)):  # DTensor operations count only here
                if each is not None and not each.is_inference():
                    versions_of_shards.append((each, each._version))
        steps = StepWatch(shards) if watches_steps else None
        self.kept = KeptVersions(tuple(versions), tuple(versions_of_shards), steps)

    def reshard(self, *, keep_partial_shard: bool = False) -> None:
        """Free the full parameters, unless they alias the shard or are kept; allocates no memory."""
        try:
            if self.phase is BucketPhase.GATHERING:
                self._drop_all_gather()
        finally:
            self.phase, self.kept = BucketPhase.SHARDED, None
            if not keep_partial_shard:
                self._partial_shard = None
            if self._rows:
                self._drop_rows()
            if not self.is_aliased:
                self._current.buffer.free(keep_memory=self.keeps_storage)
                self._leaves.buffer.free(keep_memory=self.keeps_storage)
                self._current = self._leaves

    def _drop_all_gather(self) -> None:
        """Wait for an all-gather that nobody waited for: whoever is next may write the shard that it reads."""
        self._pending.wait()
        if self._gather_event is not None:
            get_current_stream(self.device).wait_event(self._gather_event)

    def discard(self) -> None:
        """Drop full parameters, gradients and a pending all-gather after an error."""
        self.drop_gradients()
        self.reshard()


class _Message:
    """One all-gather's tensors of several buckets, which every rank copies into its row."""

    def __init__(
        self, buckets: Sequence[UnshardedParams], parts: Sequence[tuple[torch.Tensor, torch.dtype]], size: int
    ) -> None:
        dtypes = {dtype for _, dtype in parts}
        self._buckets = tuple(buckets)
        self._parts = parts
        self._size = size
        self._dtype = dtypes.pop() if len(dtypes) == 1 else torch.uint8  # one dtype needs no bytes
        self._places: list[slice] = []  # in a row, in elements of the message's dtype
        self._gaps: list[int] = []  # after each place
        end = 0
        for tensor, dtype in parts:
            length = tensor.numel() * dtype.itemsize // self._dtype.itemsize
            gap = -length % max(1, ALIGNMENT // self._dtype.itemsize)
            self._places.append(slice(end, end + length))
            self._gaps.append(gap)
            end += length + gap
        self._numel = end
        self._is_copied = False

    def allocate(self, custom: AllGatherOp | None, device: torch.device) -> torch.Tensor:
        """Return memory with one row per rank."""
        self._rows = allocate(custom, self._size * self._numel, self._dtype, device).view(self._size, -1)
        return self._rows

    def copy_in(self, row: torch.Tensor) -> None:
        """Copy this rank's tensors to its row, and cast them."""
        copies: dict[tuple[torch.dtype, torch.dtype], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for (tensor, dtype), place in zip(self._parts, self._places, strict=True):
            places, tensors = copies.setdefault((tensor.dtype, dtype), ([], []))
            places.append(row[place].view(dtype))
            tensors.append(tensor.reshape(-1))
        for places, tensors in copies.values():
            torch._foreach_copy_(places, tensors, non_blocking=True)

    def split(self) -> list[torch.Tensor]:
        """Return each tensor's rows."""
        pairs = zip(self._parts, self._places, strict=True)
        return [self._rows[:, place].view(dtype) for (_, dtype), place in pairs]

    def copy_out(self) -> bool:
        """Copy the rows to all buckets' full parameters by one operation, once; return False if that is impossible."""
        # A device copies them by one kernel only if it gets complete rows: a bucket's rows are not contiguous.
        if self._is_copied or any(params._message is not self for params in self._buckets):
            return self._is_copied
        outputs: list[torch.Tensor] = []
        for params in self._buckets:
            parts = params._allocate_outputs()
            if parts is None:
                return False
            outputs += parts
        outputs = self._fill_gaps(part.view(self._dtype) for part in outputs)
        torch.split_with_sizes_copy(self._rows, [part.shape[1] for part in outputs], dim=1, out=outputs)
        self._is_copied = True
        return True

    def _fill_gaps(self, outputs: Iterator[torch.Tensor]) -> list[torch.Tensor]:
        """Return outputs for complete rows: with memory for the padding after each tensor."""
        found, at = [], 0
        for place, gap in zip(self._places, self._gaps, strict=True):
            while at < place.stop:
                found.append(next(outputs))
                at += found[-1].shape[1]
            if gap:
                found.append(self._rows.new_empty(self._size, gap))
                at += gap
        return found


def start_all_gathers(buckets: Sequence[UnshardedParams], *, full_precision: bool = False) -> None:
    """Start the all-gathers for sharded buckets, by one message if possible. Collective."""
    messages: dict[object, list[UnshardedParams]] = {}
    for params in buckets:
        messages.setdefault(params.message_key if len(buckets) > 1 else None, []).append(params)
    for several in messages.values():
        try:
            if len(several) > 1 or several[0].needs_message:
                UnshardedParams._start_several(several, full_precision=full_precision)
            else:
                several[0]._start_one(full_precision=full_precision)
        except BaseException:  # out of memory: a buffer without values must not stay
            for params in several:
                params.reshard(keep_partial_shard=True)
            raise
