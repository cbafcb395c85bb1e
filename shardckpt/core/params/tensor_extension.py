"""Parameters with all-gather extensions: subclasses with `fsdp_pre_all_gather` and `fsdp_post_all_gather`.

Such a parameter is sharded like any other and keeps its subclass. Before an all-gather its local tensor returns the
tensors to gather, of any dtype; after it, the gathered tensors become the parameter that the module computes with.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from shardckpt.boxes import chunk_range
from shardckpt.core.comm.collectives import Pending
from shardckpt.core.comm.streams import ResizableStorage, use_gather_stream, wait_for_gathers
from shardckpt.core.modules.profiler_ranges import profile_range
from shardckpt.core.params.buffer_layout import Packing
from shardckpt.core.params.mesh_placement import MeshPlacement
from shardckpt.core.params.param_bucket import Bucket, ShardSpec
from shardckpt.core.policies import MixedPrecisionPolicy
from shardckpt.errors import ShardckptError

_PRE, _POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"


class ExtensionError(ShardckptError, AssertionError):
    """A tensor subclass whose all-gather extensions cannot be used."""


def is_extended(local: torch.Tensor) -> bool:
    """Return True if a tensor has all-gather extensions.

    Args:
        local: The tensor to shard.

    Raises:
        ExtensionError: It has one half of the pair, or one that takes other arguments.
    """
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
    """Return True if a tensor can be gathered only by extensions, which may be set later.

    Args:
        local: The tensor to shard.
    """
    return is_extended(local) or is_traceable_wrapper_subclass(local)


def is_possibly_extended(local: torch.Tensor) -> bool:
    """Return True if `is_extended` needs a call: a plain tensor without attributes cannot be extended.

    Args:
        local: The local tensor of a sharded parameter.
    """
    return type(local) is not torch.Tensor or bool(local.__dict__)


def move_functions(before: torch.Tensor, after: torch.Tensor) -> None:
    """Bind functions that a user put on one tensor to another one that takes its place; only bound methods can be.

    Args:
        before: The tensor that has them.
        after: The other one.
    """
    for name in (_PRE, _POST):
        function = before.__dict__.get(name)
        if isinstance(function, MethodType) and function.__self__ is before:
            setattr(after, name, MethodType(function.__func__, after))


class _Outputs:
    """What was gathered, and what was made of it: storages that are freed and filled again together."""

    def __init__(self, buffers: Sequence[ResizableStorage]) -> None:
        self.gathered = tuple(buffers)
        self.buffers = list(buffers)

    def add(self, tensors: Sequence[torch.Tensor]) -> None:
        """Free these too, unless they are views of what is known."""
        for tensor in tensors:
            known = {each.tensor.untyped_storage().data_ptr() for each in self.buffers}
            if tensor.untyped_storage().data_ptr() not in known:
                self.buffers.append(ResizableStorage.from_tensor(tensor))

    def allocate(self) -> None:
        """Give all of them memory."""
        for each in self.buffers:
            each.allocate()

    def free(self) -> None:
        """Take their memory."""
        for each in self.buffers:
            each.free()


class ExtensionBucket(Bucket):
    """One parameter that is gathered by its all-gather extensions.

    Its full form exists from the first gather on; until then something without memory stands for it.
    """

    _outputs: _Outputs | None = None
    _shown: nn.Parameter | None = None
    _is_watched = False
    _inputs: tuple[torch.Tensor, ...] = ()
    _metadata: Any = None
    _local: torch.Tensor | None = None

    def set_extended_tensor(self, local: torch.Tensor) -> None:
        """Gather by the functions of a tensor around this rank's shard: its class's, or its own.

        Args:
            local: The tensor.
        """
        self._local = local

    @property
    def _extended_tensor(self) -> Any:
        local = self.local_shards[0] if self._local is None else self._local
        if not is_extended(local):
            raise ExtensionError(
                f"the local tensor of a parameter has no {_PRE} and {_POST}, by which it was to be gathered",
                where=f"{self.name}, {self.members[0].fqn}",
                found=type(local).__name__,
                fix="Put them on the new local tensor after whatever replaced it: to, to_empty, load_state_dict with "
                "assign, a copy of the model.",
            )
        return local

    def _build_packing(self, values: Sequence[torch.Tensor], spec: ShardSpec) -> Packing:
        if [place.dim for place in spec.placements] != [0]:
            raise ExtensionError(
                "a tensor subclass with all-gather extensions can be sharded along dimension 0 only",
                where=self.members[0].fqn,
                found=spec.placements[0].dim,
            )
        return super()._build_packing(values, spec)

    def _allocate_shard(self, like: torch.Tensor, numel: int) -> torch.Tensor:
        return like.new_zeros(numel)

    @property
    def aliased(self) -> bool:
        """The full parameter is something else than the shard, always."""
        return False

    @property
    def is_full_precision(self) -> bool:
        """There is one full form of the parameter."""
        return True

    @property
    def unsharded_params(self) -> tuple[nn.Parameter, ...]:
        """The full parameter; readable while the bucket is unsharded."""
        return (self._shown,) if self._shown is not None else self._full.params

    @property
    def unsharded_tensors(self) -> list[torch.Tensor]:
        """The full parameter."""
        return [leaf.detach() for leaf in self.unsharded_params]

    @property
    def has_unsharded_storage(self) -> bool:
        """Return True if there is memory for the full parameter."""
        return self._pending_all_gather is not None or self.is_unsharded

    @property
    def address(self) -> int:
        """Address of the all-gather output; 0 while it is freed."""
        outputs = self._outputs
        return (
            outputs.gathered[0].tensor.untyped_storage().data_ptr() if outputs is not None and self.is_unsharded else 0
        )

    @property
    def gradients(self) -> list[torch.Tensor | None]:
        """The leaf's gradient as a plain tensor."""
        return [None if leaf.grad is None else self._placement.gradient(leaf.grad) for leaf in self.unsharded_params]

    @property
    def requires_grad(self) -> bool:
        """Return True if the full parameter requires gradients."""
        return self.unsharded_params[0].requires_grad

    def drop_gradients(self) -> None:
        """Forget the leaf's gradient."""
        self.unsharded_params[0].grad = None

    def set_requires_grad(self, index: int, on: bool) -> None:
        """Set whether the full parameter requires gradients."""
        super().set_requires_grad(index, on)
        if self._shown is not None and self._shown.requires_grad != on:
            self._shown.requires_grad_(on)
            self._watch_shown()

    def _watch_shown(self) -> None:
        """Watch the full parameter, once, from when it first requires gradients."""
        if self._shown is not None and self._shown.requires_grad and not self._is_watched:
            self._is_watched = True
            self.watch.watch(self._shown)

    @property
    def _placement(self) -> MeshPlacement:
        placement = self._placements[0]
        assert isinstance(placement, MeshPlacement), "fully_shard places parameters"
        return placement

    def start_all_gather(self, *, full_precision: bool = False) -> bool:
        """Start the all-gather of what `fsdp_pre_all_gather` returns. Collective."""
        del full_precision
        if self.is_unsharded or self._pending_all_gather is not None:
            return False
        with profile_range("all_gather", self.name.text), use_gather_stream(self.compute_device):
            self._inputs, self._metadata = self._call_pre_all_gather()
            if self._outputs is None:
                made = [
                    ResizableStorage(each.numel() * self.group.size, each.dtype, each.device) for each in self._inputs
                ]
                self._outputs = _Outputs(made)
            self._outputs.allocate()
            pairs = zip(self._outputs.gathered, self._inputs, strict=True)
            what = f"gather {self.name}"
            own = self._comms.all_gather
            works = [self.group.all_gather(out.tensor, each.reshape(-1), what, own) for out, each in pairs]
            self._pending_all_gather = _All(works, what)
        return True

    def _call_pre_all_gather(self) -> tuple[tuple[torch.Tensor, ...], Any]:
        """Return the tensors to gather, padded to the most rows of a rank, and metadata."""
        part = self._extended_tensor
        before = getattr(part, _PRE)
        if len(inspect.signature(before).parameters) == 1:
            inputs, metadata = before(self._placement.ring)
        else:
            known = self._precision
            policy = MixedPrecisionPolicy(known.param_dtype, known.reduce_dtype, known.output_dtype, known.cast_inputs)
            shape = torch.Size(self.layout.specs[0].shape)
            module = self.members[0].places[0].module
            inputs, metadata = before(self._placement.ring, shape, _steps(shape), module, policy)
        rows = self._rows
        return tuple(_padded(each.to(self.compute_device), part.shape, rows) for each in inputs), metadata

    @property
    def _rows(self) -> int:
        """Rows that every rank sends: those of the first."""
        shape = self.layout.specs[0].shape
        return chunk_range(shape[0], self.group.size, 0)[1]

    def wait_all_gather(self, *, keep_partial_shard: bool = False) -> None:
        """Wait for the all-gather and make the full parameter by `fsdp_post_all_gather`."""
        del keep_partial_shard
        if self._pending_all_gather is None:
            return
        pending, self._pending_all_gather = self._pending_all_gather, None
        pending.wait()
        wait_for_gathers(self.compute_device)
        assert self._outputs is not None, "a gather has been begun"
        pairs = zip(self._outputs.gathered, self._inputs, strict=True)
        gathered = tuple(out.tensor.view(-1, *each.shape[1:]) for out, each in pairs)
        behind = getattr(self._extended_tensor, _POST)
        with profile_range("all_gather_copy_out", self.name.text), torch.no_grad():
            if self._shown is None:
                made, inner = behind(gathered, self._metadata, self.compute_dtype)
                self._outputs.add(inner)
                self._shown = self._leaf(made)
                self._is_watched = False
                self._watch_shown()
            else:
                # by way of `data`, which does not count as a change of what autograd has saved
                behind(gathered, self._metadata, self.compute_dtype, out=self._shown.data)
        self._inputs, self._metadata = (), None
        self.is_unsharded = True

    def _leaf(self, made: torch.Tensor) -> nn.Parameter:
        stood = self._full.params[0]
        shape = self.layout.specs[0].shape
        full = torch.as_strided(made, shape, _steps(shape), storage_offset=0)
        leaf = nn.Parameter(self._placement.full(full), requires_grad=stood.requires_grad)
        # a user's attributes, not what a subclass keeps its content in
        leaf.__dict__.update({name: value for name, value in stood.__dict__.items() if name not in leaf.__dict__})
        return leaf

    def reshard(self, *, keep_partial_shard: bool = False) -> None:
        """Free the full parameter."""
        del keep_partial_shard
        self.wait_all_gather()
        if self._outputs is not None:
            self._outputs.free()
        self.is_unsharded = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Bucket:
        """Return a bucket of the copied parameter, which has not been gathered yet."""
        self.reshard()
        aside = self._outputs, self._shown, self._local
        self._outputs, self._shown, self._local = None, None, None
        try:
            return super().__deepcopy__(memo)
        finally:
            self._outputs, self._shown, self._local = aside


class _All(Pending):
    """Several collectives."""

    def __init__(self, parts: Sequence[Pending], what: str) -> None:
        super().__init__(None, what)
        self._parts = tuple(parts)

    def wait(self) -> None:
        """Return when all results can be read."""
        for each in self._parts:
            each.wait()


def _padded(tensor: torch.Tensor, part: torch.Size, rows: int) -> torch.Tensor:
    """Pad a tensor that has as many rows as `part` with rows of zeros; return others as they are."""
    if tensor.shape[:1] != part[:1] or tensor.shape[0] == rows:
        return tensor.contiguous()
    padded = tensor.new_zeros(rows, *tensor.shape[1:])
    padded[: tensor.shape[0]].copy_(tensor)
    return padded


def _steps(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a row-major tensor."""
    return torch.empty(shape, device="meta").stride()
