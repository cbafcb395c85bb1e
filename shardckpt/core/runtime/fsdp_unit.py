"""An FSDP unit: the buckets of one module and their hooks in forward and backward."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum, auto
from typing import Any, Protocol

import torch
from torch import nn

from shardckpt.core.config import UnitConfig
from shardckpt.core.modules import autograd_hooks
from shardckpt.core.modules.compile_guard import apply_compiler_disable, compiler_disabled
from shardckpt.core.modules.fqn_and_params import Name, ParamInfo
from shardckpt.core.modules.pytree import mapped, tensors
from shardckpt.core.params.param_bucket import Bucket
from shardckpt.core.params.tensor_extension import ExtensionError
from shardckpt.core.registration.base import ParamRegistration
from shardckpt.core.runtime import mixed_precision
from shardckpt.core.runtime.mixed_precision import Buffers
from shardckpt.errors import ShardckptError

_THIS_BACKWARD = 0
"""Forward id of what the running backward computes again, and of gradients that it gave; it ends with it."""


class Phase(Enum):
    """Phase of an iteration that a unit is in."""

    IDLE = auto()
    FORWARD = auto()
    BACKWARD = auto()


class ForwardCall:
    """One forward of a unit whose outputs require gradients.

    Args:
        unit: The unit.
        finished_before: How many calls had finished when it began: later ones that finish before it are nested in it.
        has_post_backward_hook: Whether an input requires gradients, so that autograd calls the post-backward hook.
        forward_id: Number of the outermost forward that it belongs to; a backward covers the forwards it reaches.
    """

    def __init__(
        self, unit: FSDPUnit, finished_before: int, has_post_backward_hook: bool = False, forward_id: int = 0
    ) -> None:
        self.unit = unit
        self.finished_before = finished_before
        self.has_post_backward_hook = has_post_backward_hook
        self.forward_id = forward_id


class RootSchedule(Protocol):
    """The root as its units see it: it knows the order of all of them."""

    @property
    def forward_id(self) -> int:
        """Number of the outermost forward that began last."""

    def count_finished_calls(self) -> int:
        """Return the number of calls that finished in this forward."""

    def on_pre_forward(self, unit: FSDPUnit) -> None:
        """Record that a unit is unsharded and computes next."""

    def record_post_forward(self, call: ForwardCall) -> None:
        """Record a call whose outputs require gradients."""

    def ensure_backward_started(self) -> None:
        """Start a backward unless one runs; units call it many times."""

    def on_pre_backward(self, call: ForwardCall) -> None:
        """Prepare for the backward of a call: a gradient of its outputs has arrived."""

    def prefetch_backward_pre(self, unit: FSDPUnit) -> None:
        """Prefetch before the gradients of a unit are computed (BACKWARD_PRE)."""

    def on_post_backward(self, call: ForwardCall) -> None:
        """Finish the calls that are nested in one whose gradients are complete."""

    def prefetch_backward_post(self, unit: FSDPUnit) -> None:
        """Prefetch after the gradients of a unit are computed (BACKWARD_POST)."""

    def on_reduction_start(self, unit: FSDPUnit) -> None:
        """Record a reduction that has started."""

    def record_unsharded(self, bucket: Bucket, unit: FSDPUnit) -> None:
        """Record the address of a bucket's full buffer."""

    def forget_unsharded(self, address: int) -> None:
        """Forget an address whose full buffer is freed."""

    def find_unit(self, tensor: torch.Tensor) -> FSDPUnit | None:
        """Return the unit in whose full buffer a tensor lies."""

    def recover(self) -> None:
        """Reset after a backward that raised; autograd does not report it."""

    def is_root(self, unit: FSDPUnit) -> bool:
        """Return True if the unit is the root."""

    def on_post_forward(self, unit: FSDPUnit) -> None:
        """Record that a unit has computed."""

    def check_reduce_order(self, unit: FSDPUnit) -> None:
        """Compare, in debug mode, whose gradients ranks are about to reduce."""

    def wait_for_rate_limiter(self, unit: FSDPUnit) -> None:
        """Wait until the unit may be unsharded: resharded units that still compute hold memory."""

    def record_reshard_event(self, unit: FSDPUnit) -> None:
        """Record that the unit's memory is free once the queued computation has run."""


class TransformError(ShardckptError, NotImplementedError):
    """A functional transform that differentiates around a unit."""


class DoubleBackwardError(ShardckptError, NotImplementedError):
    """Gradients of gradients through parameters that are resharded."""


class FSDPUnit:
    """The buckets of one module: unsharded to compute, resharded after, reduced in backward.

    Args:
        name: What messages call it.
        modules: The module; several where they are gathered and freed together.
        registrations: Its buckets, as they are registered on the modules.
        config: Its settings.
        buffers: Buffers that follow the unit's precision.
    """

    def __init__(
        self,
        name: Name,
        modules: Sequence[nn.Module],
        registrations: Sequence[ParamRegistration],
        config: UnitConfig,
        buffers: Buffers | None = None,
    ) -> None:
        apply_compiler_disable()
        self._name = name
        self.modules = tuple(modules)
        self.registrations = tuple(registrations)
        self.config = config
        self.buffers = buffers if buffers is not None else Buffers(())
        self.sync_gradients = True
        self._all_reduce = True
        self._to_prefetch: dict[Phase, tuple[FSDPUnit, ...]] = {}
        self._modules_run = 0
        self.phase = Phase.IDLE
        self._root_schedule: RootSchedule | None = None
        self._recorded_calls: set[ForwardCall] = set()
        self._running_calls: list[ForwardCall] = []
        self._pending_forward_ids: set[int] = set()  # forwards whose gradients have not been reduced
        self._ran_backward = False
        self._addresses: list[int] = []
        self._has_registered_unsharded = False
        self._has_unsynced_grads = False
        self._checked_out = False
        self._saves_params = True  # whether autograd saves parameters by our hooks
        self._watch_gradients()
        self._full_precision = False  # whether the last forward computed in the stored types

    def __deepcopy__(self, memo: dict[int, Any]) -> FSDPUnit:
        """Return a unit of the copied modules, sharded, idle and without a root."""
        if self.is_attached:
            self.reshard()
        made = memo[id(self)] = FSDPUnit(copy.deepcopy(self._name, memo), (), (), self.config)
        for each in self.registrations:
            each.copy_parameters(memo)
        made.registrations = copy.deepcopy(self.registrations, memo)
        made._watch_gradients()
        made.modules = copy.deepcopy(self.modules, memo)
        made.buffers = copy.deepcopy(self.buffers, memo)
        made.sync_gradients, made._all_reduce = self.sync_gradients, self._all_reduce
        made._to_prefetch = copy.deepcopy(self._to_prefetch, memo)
        return made

    def _watch_gradients(self) -> None:
        """Call hooks for gradients and saved parameters that no call of the unit leads to."""
        for each in self.registrations:
            each.bucket.watch.set_callback(self.on_gradient)
            each.set_backward_unshard(self.unshard_for_backward)

    # ---------------------------------------------------------------------------------------------------- facts

    @property
    def name(self) -> str:
        """What messages call it: its name below the root, once that is known."""
        return self._name.text

    @property
    def module(self) -> nn.Module:
        """The module, the first where there are several."""
        return self.modules[0]

    @property
    def buckets(self) -> list[Bucket]:
        """The buckets, in their fixed order."""
        return [each.bucket for each in self.registrations]

    @property
    def members(self) -> list[ParamInfo]:
        """The parameters of all buckets."""
        return [member for each in self.registrations for member in each.bucket.members]

    def restore(self) -> None:
        """Undo the sharding; the unit is done with after that. Collective."""
        for each in self.registrations:
            each.restore()

    @property
    def is_unsharded(self) -> bool:
        """Return True if all full parameters can be read."""
        return all(each.bucket.is_unsharded for each in self._active)

    @property
    def trainable(self) -> bool:
        """Return True if some parameter requires gradients."""
        return any(each.bucket.requires_grad for each in self.registrations)

    @property
    def has_pending_grads(self) -> bool:
        """Return True if gradients of a recorded forward have not been reduced."""
        return bool(self._pending_forward_ids)

    def needs_post_backward(self, forward_ids: Set[int]) -> bool:
        """Return True if gradients of these forwards, or of the running backward, are pending."""
        return not self._pending_forward_ids.isdisjoint({_THIS_BACKWARD, *forward_ids})

    @property
    def is_in_backward(self) -> bool:
        """Return True if the running backward has reached the unit and not reduced its gradients since."""
        return _THIS_BACKWARD in self._pending_forward_ids

    @property
    def pending_forward_ids(self) -> Set[int]:
        """Return the forwards whose gradients have not been reduced."""
        return self._pending_forward_ids - {_THIS_BACKWARD}

    def attach(self, root_schedule: RootSchedule | None, name: str = "") -> None:
        """Set the root of the unit, and its name below it; None for no root."""
        self._root_schedule = root_schedule
        if name:
            self._name.become(name)
        if root_schedule is not None and self._addresses:  # unsharded by hand, before there was this root
            for bucket in self.buckets:
                root_schedule.record_unsharded(bucket, self)

    def set_requires_gradient_sync(self, on: bool) -> None:
        """Set whether the next backward reduces gradients."""
        self.sync_gradients = on

    def set_requires_all_reduce(self, on: bool) -> None:
        """Set whether a reduction includes the all-reduce over replicas."""
        self._all_reduce = on

    def configure(self, **changes: Any) -> None:
        """Change settings.

        Args:
            changes: Fields of `UnitConfig` with their new values.
        """
        self.config = replace(self.config, **changes)

    def set_units_to_prefetch(
        self, *, forward: Sequence[FSDPUnit] | None = None, backward: Sequence[FSDPUnit] | None = None
    ) -> None:
        """Set the units to prefetch while this one computes, in place of those that the order suggests.

        Args:
            forward: In forward; unchanged where None.
            backward: In backward; unchanged where None.
        """
        for phase, units in ((Phase.FORWARD, forward), (Phase.BACKWARD, backward)):
            if units is not None:
                self._to_prefetch[phase] = tuple(units)

    def get_units_to_prefetch(self, phase: Phase) -> tuple[FSDPUnit, ...] | None:
        """Return the units to prefetch while this one computes; None if none were set."""
        return self._to_prefetch.get(phase) or None

    @property
    def is_attached(self) -> bool:
        """Return True if the unit has a root."""
        return self._root_schedule is not None

    @property
    def _root(self) -> RootSchedule:
        assert self._root_schedule is not None, "a unit computes only below a root"
        return self._root_schedule

    # ---------------------------------------------------------------------------------------- full parameters

    def prefetch_unshard(self, *, full_precision: bool | None = None) -> bool:
        """Start the all-gathers of what is not unsharded yet. Collective.

        Args:
            full_precision: In the stored types, whatever the type to compute in; where None, as the unit computes.

        Returns:
            Whether something was started.
        """
        self.bind_extensions()
        if all(each.bucket.has_unsharded_storage for each in self._active):
            return False
        self._root.wait_for_rate_limiter(self)
        if full_precision is None:
            full_precision = self._full_precision if self._pending_forward_ids else self._runs_in_full_precision
        started = False
        for each in self._active:
            if not each.bucket.is_unsharded:
                each.pull_user_changes()
                started |= each.bucket.start_all_gather(full_precision=full_precision)
        return started

    def unshard(self) -> None:
        """All-gather the parameters and register them on the modules. Collective."""
        self._unshard(full_precision=False)

    def _unshard(self, *, full_precision: bool) -> None:
        if self.is_unsharded and self._has_registered_unsharded:
            return
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            torch.clear_autocast_cache()  # it keys on the leaf, whose content changes
        self.prefetch_unshard(full_precision=full_precision)
        for each in self._active:
            if not each.bucket.is_unsharded:
                each.bucket.wait_all_gather(keep_partial_shard=self._keep_partial_shard)
                self._root.record_unsharded(each.bucket, self)
                self._addresses.append(each.bucket.address)
            if each.bucket.aliased:
                each.pull_user_changes()
            each.register_unsharded()
        self._has_registered_unsharded = True

    @property
    def _keep_partial_shard(self) -> bool:
        return self.config.post_forward_ranks > 0 and self.phase is Phase.FORWARD and torch.is_grad_enabled()

    @property
    def _active(self) -> tuple[ParamRegistration, ...]:
        """The buckets to compute with: none while they are checked out."""
        return () if self._checked_out else self.registrations

    @property
    def is_checked_out(self) -> bool:
        """Return True if other code, such as `summon_full_params`, registers full parameters now."""
        return self._checked_out

    @contextmanager
    def check_out_params(self) -> Iterator[tuple[ParamRegistration, ...]]:
        """Yield the sharded buckets; inside, the unit computes as a module that has none of them."""
        self.recover()
        if self.is_attached:
            self.reshard()
        self.pull_user_changes()
        self._checked_out = True
        try:
            yield self.registrations
        finally:
            self._checked_out = False

    def pull_user_changes(self) -> None:
        """Pull a user's changes of the registered parameters: values, dtypes, all-gather extensions."""
        self.bind_extensions()
        for each in self._active:
            each.pull_user_changes()

    def bind_extensions(self) -> None:
        """Gather from now on by the all-gather extensions that a user has put on local tensors.

        Raises:
            ExtensionError: They cannot be followed, or gradients for the parameters of before are still to come.
        """
        late = [each for each in self._active if each.has_unbound_extensions]
        if not late:
            return
        if self._pending_forward_ids or any(each.bucket.has_unreduced_grads for each in late):
            raise ExtensionError(
                "all-gather extensions were put on local tensors while gradients are still to come",
                where=self.name,
                found=[member.fqn for each in late for member in each.bucket.members],
                fix="Put them there before the first forward, or after a backward that reduces gradients.",
            )
        self.registrations = tuple(made for each in self.registrations for made in each.bind_extensions())
        self._watch_gradients()

    def recover(self) -> None:
        """Reset after a backward that raised."""
        if self.is_attached:
            self._root.recover()

    def write_back(self) -> None:
        """Write this rank's part of full parameters that a user changed to its shard."""
        for each in self._active:
            each.bucket.write_back()

    def reshard(self, *, keep_partial_shard: bool = False) -> None:
        """Free the full parameters; do nothing when they are freed.

        Args:
            keep_partial_shard: But keep the larger shard for the unshard in backward.
        """
        if self._has_registered_unsharded or any(each.bucket.has_unsharded_storage for each in self._active):
            self._reshard(keep_partial_shard=keep_partial_shard)
            if self.is_attached:
                self._root.record_reshard_event(self)
        elif not keep_partial_shard:
            for each in self._active:
                each.bucket.reshard()

    def _reshard(self, *, keep_partial_shard: bool = False) -> None:
        if self.is_attached:
            for address in self._addresses:
                self._root.forget_unsharded(address)
        self._addresses.clear()
        for each in self._active:
            each.register_sharded()
            each.bucket.reshard(keep_partial_shard=keep_partial_shard)
        self._has_registered_unsharded = False

    # ---------------------------------------------------------------------------------------------- forward

    @compiler_disabled
    def pre_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Unshard, and register the post-backward hook in front of the inputs.

        Args:
            args: The module's arguments.
            kwargs: And those by name.

        Returns:
            The arguments to compute with.
        """
        if autograd_hooks.differentiating_functionally():
            raise TransformError(
                "transforms of torch.func do not go through units that gather and free parameters",
                where=self.name,
                fix="Use backward, or a copy of the module with the full parameters of summon_full_params.",
            )
        again = autograd_hooks.in_backward()
        if not again:
            self._full_precision = self._runs_in_full_precision
        self._cast_buffers()
        args, kwargs = self._prepare_inputs((args, kwargs))
        found = [t for t in tensors((args, kwargs)) if t.requires_grad] if torch.is_grad_enabled() else []
        call = ForwardCall(
            self,
            0 if again else self._root.count_finished_calls(),
            bool(found),
            _THIS_BACKWARD if again else self._root.forward_id,
        )
        self._running_calls.append(call)
        if not again:
            self.phase = Phase.FORWARD
            self._saves_params = not torch.is_grad_enabled()
        if any(
            each.bucket.has_unsharded_storage and each.bucket.differs(full_precision=self._full_precision)
            for each in self._active
        ):
            self.reshard()  # kept by a forward in the other mode, or gathered ahead for one
        self._unshard(full_precision=self._full_precision)
        if not again:
            self._root.on_pre_forward(self)
        if torch.is_grad_enabled():
            self._pending_forward_ids.add(call.forward_id)
        if not found or not self._active:
            return args, kwargs
        through = iter(autograd_hooks.register_post_backward(found, lambda: self.post_backward_hook(call)))
        return mapped((args, kwargs), lambda t: next(through) if t.requires_grad else t)  # type: ignore[no-any-return]

    @property
    def _runs_in_full_precision(self) -> bool:
        return mixed_precision.has_full_precision_eval() and not self.module.training

    def _cast_buffers(self) -> None:
        dtype = self.config.precision.buffer_dtype
        if dtype is None:
            return
        if self._runs_in_full_precision:
            self.buffers.restore()
        else:
            self.buffers.cast(dtype)

    def _prepare_inputs(self, given: Any) -> Any:
        """Return the arguments where the unit computes, and in the type it computes in."""
        config = self.config.precision
        if self._root.is_root(self) and self._active:
            given = mixed_precision.move_tensors(given, self._active[0].bucket.compute_device)
        wanted = config.cast_inputs or (config.cast_root_inputs and self._root.is_root(self))
        if not wanted or config.param_dtype is None or self._runs_in_full_precision or self._checked_out:
            return given
        return mixed_precision.cast_tensors(given, config.param_dtype)

    @compiler_disabled
    def post_forward(self, output: Any) -> Any:
        """Reshard, and register pre-backward hooks on the outputs.

        Args:
            output: The module's result.

        Returns:
            The result to hand on.
        """
        call = self._running_calls.pop()
        again = autograd_hooks.in_backward()
        if self.config.precision.output_dtype is not None:
            output = mixed_precision.cast_tensors(output, self.config.precision.output_dtype)
        found = [t for t in tensors(output) if t.requires_grad] if torch.is_grad_enabled() else []
        for tensor in found:
            tensor.register_hook(lambda _: self.pre_backward_hook(call))  # type: ignore[no-untyped-call]
        if found and not again and self._active:
            self._recorded_calls.add(call)
            self._root.record_post_forward(call)
        self._modules_run += not again
        if again or self._running_calls or self._modules_run < len(self.modules):
            return output
        self._modules_run = 0
        self.phase = Phase.IDLE
        self._root.on_post_forward(self)
        self._reshard_or_keep()
        return output

    def end_root_forward(self) -> None:
        """End the root's forward: wait no longer for modules of the unit that did not run."""
        if self._modules_run and not self._running_calls:
            self._modules_run = 0
            self.phase = Phase.IDLE
            self._reshard_or_keep()

    def _reshard_or_keep(self) -> None:
        """Reshard after forward, or register what is kept until backward."""
        config = self.config
        frees = config.frees_after_forward and not (config.keeps_as_root and self._root.is_root(self))
        recorded = torch.is_grad_enabled()
        if frees or not (recorded or config.keeps_without_grad):
            self.reshard(keep_partial_shard=recorded and config.post_forward_ranks > 0)
            return
        for each in self._active:
            each.register_post_forward()
        self._has_registered_unsharded = False

    @contextmanager
    def save_params_by_reference(self) -> Iterator[None]:
        """Let autograd save full parameters by reference inside, so that backward unshards them.

        A checkpoint made by the module's own hooks lies inside this in forward, and around it when it computes again,
        where it has to see what it saw.
        """
        if autograd_hooks.in_backward() and not self._saves_params:
            yield
            return
        with autograd_hooks.saved_tensor_hooks(self._root.find_unit):
            yield

    def record_saved_tensor(self) -> None:
        """Note that autograd saved a full parameter, which backward will unshard."""
        self._saves_params = True

    @compiler_disabled
    def forward_failed(self) -> None:
        """Reset after a forward that raised; in a recomputation that is how checkpointing stops early."""
        if self._running_calls:
            self._running_calls.pop()
        self._modules_run = 0
        if not autograd_hooks.in_backward() and not self._running_calls:
            self.phase = Phase.IDLE
            self.reshard()

    # --------------------------------------------------------------------------------------------- backward

    def pre_backward_hook(self, call: ForwardCall) -> None:
        """Prepare for the backward of a call when a gradient of its outputs arrives. Collective."""
        root = self._root
        if torch.is_grad_enabled() and not all(bucket.aliased for bucket in self.buckets):
            raise DoubleBackwardError(
                "gradients of gradients would need parameters that are gone by then",
                where=self.name,
                found="a backward with create_graph=True",
                fix="Compute this term with summon_full_params or a NO_SHARD unit, or without create_graph.",
            )
        root.ensure_backward_started()
        root.on_pre_backward(call)
        self.pre_backward()

    def pre_backward(self) -> None:
        """Unshard for backward, unless the settings of the unit say not to. Collective."""
        if self.config.gathers_in_backward:
            self.unshard_for_backward()
            return
        self._enter_backward()
        self._root.prefetch_backward_pre(self)

    def _enter_backward(self) -> None:
        self.phase = Phase.BACKWARD
        self._ran_backward = True
        self._pending_forward_ids.add(_THIS_BACKWARD)

    def on_gradient(self) -> None:
        """Note a gradient of a full parameter, perhaps by way of a tensor that is not an output."""
        if self.is_attached:
            self._root.ensure_backward_started()
            self._pending_forward_ids.add(_THIS_BACKWARD)

    def unshard_for_backward(self) -> None:
        """Unshard to compute gradients, unless the parameters are unsharded. Collective."""
        root = self._root
        root.ensure_backward_started()
        if self.phase is Phase.BACKWARD and self.is_unsharded and self._has_registered_unsharded:
            return
        self._enter_backward()
        self._unshard(full_precision=self._full_precision)
        root.prefetch_backward_pre(self)

    def modified_param_message(self) -> str:
        """Return the message that a parameter was changed between forward and backward."""
        return (
            f"one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"a parameter of unit {self.name} was changed between its forward and its backward"
        )

    def run_skipped_post_backward(self, call: ForwardCall) -> None:
        """Join the collectives of a call that gradients of this rank do not reach. Collective."""
        self.pre_backward()
        if call in self._recorded_calls:
            self.post_backward_hook(call)

    def post_backward_hook(self, call: ForwardCall) -> None:
        """Finish a call: its gradients are complete; the unit's last call reduces. Collective."""
        self._root.ensure_backward_started()
        self._root.on_post_backward(call)
        self._recorded_calls.discard(call)
        if self._recorded_calls:
            return
        self.post_backward()

    def post_backward(self, forward_ids: Set[int] | None = None) -> None:
        """Reshard, and reduce gradients unless gradient sync is off. Collective.

        Args:
            forward_ids: Forwards that are done; all where None.
        """
        self._pending_forward_ids -= (
            self._pending_forward_ids if forward_ids is None else {_THIS_BACKWARD, *forward_ids}
        )
        self._renew_watches()
        self._ran_backward = True
        self._has_unsynced_grads |= not self.sync_gradients
        if not self._keeps_after_backward(held=not self.sync_gradients):
            self.reshard()
        self.phase = Phase.IDLE
        self._root.prefetch_backward_post(self)
        if self.sync_gradients:
            self._start_reduction()

    def _renew_watches(self) -> None:
        for bucket in self.buckets:
            bucket.watch.rearm()

    def _keeps_after_backward(self, *, held: bool) -> bool:
        config = self.config
        return not config.frees_after_backward or (held and config.keeps_while_held and not config.frees_after_forward)

    def _start_reduction(self) -> None:
        began = False
        if any(each.bucket.requires_grad for each in self._active):
            self._root.check_reduce_order(self)
        for each in self._active:
            if each.bucket.requires_grad:
                self.finish_reduction()
                each.bucket.start_reduce_scatter(
                    factor=self.config.divide_factor,
                    split=self.config.force_sum,
                    all_reduce=self._all_reduce,
                    full_precision=self._full_precision,
                )
                began = True
        if began:
            self._root.on_reduction_start(self)

    @property
    def is_reduced(self) -> bool:
        """Return True if `finish_reduction` would return at once."""
        return all(each.bucket.is_reduce_done for each in self.registrations)

    def finish_reduction(self) -> None:
        """Wait for the averaged gradients, and accumulate them."""
        for each in self._active:
            reduced = each.bucket.wait_reduce_scatter()
            if reduced is not None:
                everything = replace(reduced, used=(True,) * len(reduced.used))
                each.add_gradient(everything if self.config.zeros_for_unused else reduced)

    def prepare_gradients_for_backward(self) -> None:
        """Take unsynced gradients back from parameters before a backward adds to them."""
        for each in self._active:
            each.restore_unsharded_grads()

    def finalize_backward(self) -> None:
        """End a backward: forget its calls, reshard, show unsynced gradients."""
        self._recorded_calls.clear()
        self._renew_watches()
        ran_backward, self._ran_backward = self._ran_backward, False
        if self._pending_forward_ids and not ran_backward:
            return  # its own backward is still to come
        held, self._has_unsynced_grads = self._has_unsynced_grads, False
        keeps = self._keeps_after_backward(held=held)
        if not keeps:
            self.reshard()
        for each in self._active:
            if held:
                each.stash_unsharded_grads()
            if keeps:
                each.register_post_forward()
        self._has_registered_unsharded = False
        self.phase = Phase.IDLE

    def reset_after_error(self) -> None:
        """Reset to the state before a failed iteration, without its gradients."""
        self._recorded_calls.clear()
        self._running_calls.clear()
        self._modules_run = 0
        self._pending_forward_ids.clear()
        self._renew_watches()
        self._has_unsynced_grads = self._ran_backward = False
        try:
            for each in self._active:
                each.reset_after_error()
        finally:
            self._reshard()
            self.phase = Phase.IDLE


class UnshardHandle:
    """Handle of an asynchronous `unshard`.

    Args:
        unshard: Waits for the parameters and registers them.
    """

    def __init__(self, unshard: Callable[[], None]) -> None:
        self._unshard: Callable[[], None] | None = unshard

    def wait(self) -> None:
        """Wait until the full parameters are registered; do nothing when called again."""
        unshard, self._unshard = self._unshard, None
        if unshard is not None:
            unshard()
