"""Parameters with the extensions `fsdp_pre_all_gather` and `fsdp_post_all_gather`.

Such a parameter is sharded like any other and keeps its subclass. Before an all-gather its local tensor returns the
tensors to gather, with any dtype. After it, the gathered tensors become the parameter that the module computes with.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Iterator, Sequence
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from shardckpt.boxes import chunk_range
from shardckpt.core.comm.streams import ResizableStorage
from shardckpt.core.config import Precision
from shardckpt.core.errors import ExtensionError
from shardckpt.core.modules.fqn_and_params import ParamInfo
from shardckpt.core.modules.pytree import tensors
from shardckpt.core.params.buffer_layout import DimPacking, Packing, StoredShard
from shardckpt.core.params.mesh_placement import MeshPlacement
from shardckpt.core.params.param_bucket import Bucket, ShardSpec
from shardckpt.core.params.unsharded_params import ParamPlacement, UnshardedParams
from shardckpt.core.policies import MixedPrecisionPolicy
from shardckpt.devices import record_stream

_PRE, _POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"
_DIVIDE = "Use a number of ranks that divides its rows and blocks, or give it to ignored_params."


def is_extended(local: torch.Tensor) -> bool:
    """Return True if a tensor has all-gather extensions; raise ExtensionError if they are incomplete."""
    has = [hasattr(local, name) for name in (_PRE, _POST)]
    if not any(has):
        return False
    if not all(has):
        raise ExtensionError(
            f"Both {_PRE} and {_POST} should be defined if using all-gather extensions",
            found=type(local).__name__,
        )
    if len(inspect.signature(getattr(local, _PRE)).parameters) not in (1, 5):
        raise ExtensionError(
            f"Invalid {_PRE}: {inspect.signature(getattr(local, _PRE))}",
            where=type(local).__name__,
            expected="(self, mesh, outer_size, outer_stride, module, mp_policy)",
        )
    return True


def needs_extension(local: torch.Tensor) -> bool:
    """Return True if a tensor can be gathered only by extensions, maybe set later."""
    return is_extended(local) or is_traceable_wrapper_subclass(local)


def is_possibly_extended(local: torch.Tensor) -> bool:
    """Return False for a plain tensor without attributes, which has no extensions."""
    return type(local) is not torch.Tensor or bool(local.__dict__)


def move_functions(before: torch.Tensor, after: torch.Tensor) -> None:
    """Bind methods that a user set on a tensor to its replacement."""
    for name in (_PRE, _POST):
        function = before.__dict__.get(name)
        # Functions that are not bound methods cannot be moved.
        if isinstance(function, MethodType) and function.__self__ is before:
            setattr(after, name, MethodType(function.__func__, after))


class _Outputs:
    """Storages for gathered tensors and results, which are freed together."""

    def __init__(self, buffers: Sequence[ResizableStorage]) -> None:
        self.gathered = tuple(buffers)
        self.buffers = list(buffers)

    def add(self, tensors: Sequence[torch.Tensor]) -> None:
        """Add the tensors' storages, except views into known storages."""
        for tensor in tensors:
            known = {buffer.tensor.untyped_storage().data_ptr() for buffer in self.buffers}
            if tensor.untyped_storage().data_ptr() not in known:
                self.buffers.append(ResizableStorage.from_tensor(tensor))

    def allocate(self) -> None:
        """Allocate all storages."""
        for buffer in self.buffers:
            buffer.allocate()

    def free(self, *, keep_memory: bool) -> None:
        """Free all storages."""
        for buffer in self.buffers:
            buffer.free(keep_memory=keep_memory)


class _ExtensionPacking(DimPacking):
    """Layout of one parameter with a tensor subclass, using the operations that torch's FSDP needs."""

    def split_shard(self, shard: torch.Tensor, rank: int) -> list[torch.Tensor]:
        """Return this rank's parameter rows, as a view."""
        size = self.layout.box(0, rank).size
        if type(shard) is torch.Tensor or shard.numel() != math.prod(size):
            return super().split_shard(shard, rank)
        return [shard.as_strided(size, _row_major_strides(size), shard.storage_offset())]

    def write_shard(self, values: Sequence[torch.Tensor], rank: int, out: torch.Tensor) -> None:
        """Write a rank's rows to `out`, whose padding stays."""
        (part,), (value,) = self.split_shard(out, rank), self.shard_values(values, rank)
        if value is not None:
            part.copy_(value)

    def shard_values(self, values: Sequence[torch.Tensor | None], rank: int) -> list[torch.Tensor | None]:
        """Return a rank's rows of the full value, as a view if possible; None if missing."""
        (value,) = values
        if value is None or type(value) is torch.Tensor:
            return super().shard_values(values, rank)
        chunks, size = value.chunk(self.layout.world), self.layout.box(0, rank).size
        if rank >= len(chunks):  # this rank has no rows
            return super().shard_values(values, rank)
        if chunks[rank].shape != size:
            raise ExtensionError(
                f"a {type(value).__name__} cannot be divided by rows among {self.layout.world} ranks",
                where=self.layout.specs[0].name,
                found=tuple(chunks[rank].shape),
                expected=size,
                fix=_DIVIDE,
            )
        return [chunks[rank]]


class ExtensionBucket(Bucket):
    """Bucket with one parameter that its all-gather extensions gather."""

    unsharded: ExtendedParams

    def __init__(self, members: Sequence[ParamInfo], *settings: Any) -> None:
        try:
            super().__init__(members, *settings)
        except (AssertionError, NotImplementedError) as error:
            if isinstance(error, ExtensionError):
                raise
            raise ExtensionError(
                f"a tensor subclass lacks an operation that sharding needs: {error}",
                where=members[0].fqn,
                found=type(members[0].parameter.data).__name__,
                fix=_DIVIDE,
            ) from error

    def set_extended_tensor(self, local: torch.Tensor) -> None:
        """Set the tensor around this rank's shard whose extensions gather."""
        self.unsharded.set_extended_tensor(local)

    def _build_packing(self, values: Sequence[torch.Tensor], spec: ShardSpec, precision: Precision) -> Packing:
        del precision
        if [place.dim for place in spec.placements] != [0]:
            raise ExtensionError(
                "a tensor subclass with all-gather extensions can be sharded along dimension 0 only",
                where=self.members[0].fqn,
                found=spec.placements[0].dim,
            )
        member = self.members[0]
        aliases = tuple(place.fqn for place in member.places[1:])
        return _ExtensionPacking([member.fqn], values, [aliases], self.group.size, dims=[0])

    def _allocate_shard(self, like: torch.Tensor, numel: int) -> torch.Tensor:
        rows = numel // max(1, math.prod(like.shape[1:]))  # some subclasses are not made flat
        return like.new_zeros((rows, *like.shape[1:])).view(-1)

    def _build_unsharded(self, device: torch.device, spec: ShardSpec) -> UnshardedParams:
        return ExtendedParams(self.stored, self.members[0], spec.placements[0], device)


class ExtendedParams(UnshardedParams):
    """One parameter's full form, with all-gather extensions."""

    # The full form exists after the first all-gather; before that, a tensor without memory replaces it.

    needs_message = True  # a parameter may send several tensors

    def __init__(
        self,
        stored: StoredShard,
        member: ParamInfo,
        placement: ParamPlacement,
        device: torch.device,
    ) -> None:
        assert isinstance(placement, MeshPlacement), "fully_shard places parameters"
        self._member = member
        self._placement = placement
        self._forget()
        super().__init__(
            stored,
            placements=(placement,),
            device=device,
            trains=[member.parameter.requires_grad],
        )

    def _forget(self) -> None:
        """Reset to the state before the first all-gather."""
        self._outputs: _Outputs | None = None
        self._shown: nn.Parameter | None = None
        self._is_watched = False
        self._row_shapes: tuple[torch.Size, ...] = ()  # of the gathered tensors, without the first dimension
        self._metadata: Any = None
        self._local: torch.Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> UnshardedParams:
        """Return the copied parameter's full form, which has not been gathered yet."""
        copied = super().__deepcopy__(memo)
        assert isinstance(copied, ExtendedParams), "a copy is of the same class"
        copied._member, copied._placement = copy.deepcopy((self._member, self._placement), memo)
        copied._forget()
        return copied

    def set_extended_tensor(self, local: torch.Tensor) -> None:
        """Set the tensor around this rank's shard whose extensions gather."""
        self._local = local

    @property
    def _extended_tensor(self) -> Any:
        local = self._local
        if local is None:
            local = self._stored.packing.split_shard(self._stored.data.data, self._stored.group.rank)[0]
        if not is_extended(local):
            raise ExtensionError(
                f"a parameter's local tensor has no {_PRE} and {_POST} to gather it",
                where=f"{self._stored.name}, {self._member.fqn}",
                found=type(local).__name__,
                fix="Set them on the new local tensor after the call that replaced it: to, to_empty, load_state_dict "
                "with assign, or a model copy.",
            )
        return local

    @property
    def message_key(self) -> object:
        """Buckets with equal keys can be gathered by one message."""
        return self._stored.group, self.custom_all_gather, self.device

    @property
    def is_full_precision(self) -> bool:
        """Return True: the parameter has only one full form."""
        return True

    @property
    def params(self) -> tuple[nn.Parameter, ...]:
        """The only full parameter; readable while the bucket is unsharded."""
        return (self._shown,) if self._shown is not None else self._leaves.params

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The only full parameter."""
        return [leaf.detach() for leaf in self.params]

    @property
    def gradients(self) -> list[torch.Tensor | None]:
        """The leaf's gradient as a plain tensor."""
        return [None if leaf.grad is None else self._placement.gradient(leaf.grad) for leaf in self.params]

    @property
    def requires_grad(self) -> bool:
        """Return True if the full parameter requires gradients."""
        return self.params[0].requires_grad

    def drop_gradients(self) -> None:
        """Forget the leaf's gradient."""
        self.params[0].grad = None

    def set_requires_grad(self, index: int, on: bool) -> None:
        """Set whether the full parameter requires gradients."""
        super().set_requires_grad(index, on)
        if self._shown is not None and self._shown.requires_grad != on:
            self._shown.requires_grad_(on)
            self._watch_shown()

    def _watch_shown(self) -> None:
        """Watch the full parameter once it requires gradients."""
        if self._shown is not None and self._shown.requires_grad and not self._is_watched:
            self._is_watched = True
            self.watch.watch(self._shown)

    def _collect_inputs(self, *, full_precision: bool) -> list[tuple[torch.Tensor, torch.dtype]]:
        """Return the tensors from `fsdp_pre_all_gather`, and their dtypes."""
        del full_precision
        inputs, self._metadata = self._call_pre_all_gather()
        self._row_shapes = tuple(part.shape[1:] for part in inputs)
        return [(part, part.dtype) for part in inputs]

    def _call_pre_all_gather(self) -> tuple[tuple[torch.Tensor, ...], Any]:
        """Return the tensors to gather, padded to equal rows on all ranks, and metadata."""
        part = self._extended_tensor
        before = getattr(part, _PRE)
        if len(inspect.signature(before).parameters) == 1:
            inputs, metadata = before(self._placement.ring)
        else:
            known = self._stored.precision
            policy = MixedPrecisionPolicy(known.param_dtype, known.reduce_dtype, known.output_dtype, known.cast_inputs)
            shape = torch.Size(self._stored.packing.layout.specs[0].shape)
            module = self._member.places[0].module
            inputs, metadata = before(self._placement.ring, shape, _row_major_strides(shape), module, policy)
        rows = self._row_count
        return tuple(_pad_rows(tensor.to(self.device), part.shape, rows) for tensor in inputs), metadata

    @property
    def _row_count(self) -> int:
        """Number of rows that every rank sends, which is rank 0's."""
        shape = self._stored.packing.layout.specs[0].shape
        return chunk_range(shape[0], self._stored.group.size, 0)[1]

    def _copy_out(self, rows: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Copy gathered rows, and call `fsdp_post_all_gather` for the full parameter."""
        if self._message is None or not self._message.copy_out():
            torch._foreach_copy_(self._allocate_outputs(), list(rows))
        assert self._outputs is not None
        pairs = zip(self._outputs.gathered, self._row_shapes, strict=True)
        gathered = tuple(out.tensor.view(-1, *shape) for out, shape in pairs)
        post_all_gather = getattr(self._extended_tensor, _POST)
        with torch.no_grad():
            if self._shown is None:
                value, inner = post_all_gather(gathered, self._metadata, self._stored.dtypes.compute)
                self._outputs.add(inner)
                self._shown = self._leaf(value)
                self._is_watched = False
                self._watch_shown()
            else:
                post_all_gather(gathered, self._metadata, self._stored.dtypes.compute, out=self._shown.data)
        for tensor in _plain_tensors(self._metadata):
            record_stream(tensor)  # its memory belongs to the all-gather stream
        self._metadata = None
        return self._outputs.gathered[0].tensor

    def _allocate_outputs(self) -> list[torch.Tensor]:
        """Allocate what gathered rows are copied to, and return its parts."""
        if self._outputs is None:
            self._outputs = _Outputs([ResizableStorage(part.numel(), part.dtype, part.device) for part in self._rows])
        self._outputs.allocate()
        # Through `data`, as a copy counts as a change to tensors that autograd saved.
        pairs = zip(self._outputs.gathered, self._rows, strict=True)
        return [out.tensor.data.view(part.shape) for out, part in pairs]

    def _leaf(self, value: torch.Tensor) -> nn.Parameter:
        previous = self._leaves.params[0]
        shape = self._stored.packing.layout.specs[0].shape
        full = torch.as_strided(value, shape, _row_major_strides(shape), storage_offset=0)
        leaf = nn.Parameter(self._placement.full(full), requires_grad=previous.requires_grad)
        # Keep a user's attributes, without a subclass's inner tensors.
        leaf.__dict__.update(
            {name: attribute for name, attribute in previous.__dict__.items() if name not in leaf.__dict__}
        )
        return leaf

    def reshard(self, *, keep_partial_shard: bool = False) -> None:
        """Free the full parameter."""
        try:
            super().reshard(keep_partial_shard=keep_partial_shard)
        finally:
            self._metadata = None
            if self._outputs is not None:
                self._outputs.free(keep_memory=self.keeps_storage)


def _pad_rows(tensor: torch.Tensor, part: torch.Size, rows: int) -> torch.Tensor:
    """Pad a tensor with as many rows as `part` by zeros; return others unchanged."""
    if tensor.shape[:1] != part[:1] or tensor.shape[0] == rows:
        return tensor.contiguous()
    padded = tensor.new_zeros(rows, *tensor.shape[1:])
    padded[: tensor.shape[0]].copy_(tensor)
    return padded


def _plain_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the plain tensors in a value, also the inner tensors of subclasses."""
    for tensor in tensors(value):
        if is_traceable_wrapper_subclass(tensor):
            names, _ = tensor.__tensor_flatten__()
            yield from _plain_tensors([getattr(tensor, name) for name in names])
        else:
            yield tensor


def _row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return a row-major tensor's strides."""
    return torch.empty(shape, device="meta").stride()
