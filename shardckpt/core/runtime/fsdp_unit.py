"""FSDP unit: a module's parameters, and hooks that unshard, reshard and reduce.

`RootState` calls the hooks for all units below one root. A unit calls the root only if autograd calls the unit
directly.

| phase | hook | next phase | when |
|---|---|---|---|
| IDLE, FORWARD | pre_forward | FORWARD | a unit's module is about to compute |
| any but FORWARD | pre_forward, post_forward | the same | activation checkpointing recomputes in backward |
| PRE_BACKWARD | forward_failed | PRE_BACKWARD | such a recomputation stops early |
| FORWARD | post_forward, finalize_forward | FORWARD | the unit's other modules, or outer calls, have not finished |
| FORWARD | post_forward, finalize_forward | IDLE | all have finished, or the outermost forward ends: reshard or keep |
| IDLE | finalize_forward | IDLE | nothing is left to do |
| FORWARD | forward_failed | IDLE | an exception |
| any but FORWARD | pre_backward | PRE_BACKWARD | an output's gradient: unshard |
| any but FORWARD | post_backward | POST_BACKWARD | gradients are complete: reshard, and the root reduces |
| IDLE, POST_BACKWARD | finalize_backward | IDLE | backward ends |
| any | reset_after_error | IDLE | an exception in backward, or in the root's forward |

`TRANSITIONS` contains the table as data; a test checks it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from enum import Enum, auto
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from shardckpt.core.comm.streams import DeviceStreams, RateLimiter, get_device_streams
from shardckpt.core.config import UnitConfig
from shardckpt.core.errors import ExtensionError
from shardckpt.core.modules.autograd_hooks import (
    BufferOwners,
    apply_compiler_disable,
    leave_inference_mode,
    profile_range,
)
from shardckpt.core.modules.fqn_and_params import Name, ParamInfo
from shardckpt.core.params.gradient_reduction import (
    PendingFlags,
    ReducedGrad,
    ReductionSettings,
    has_gradient_hooks,
    is_read_at_once,
    start_reduce_scatters,
)
from shardckpt.core.params.param_bucket import Bucket
from shardckpt.core.params.unsharded_params import BucketPhase, UnshardedParams, start_all_gathers
from shardckpt.core.registration.base import ParamRegistration, check_kept, is_outdated
from shardckpt.core.runtime import mixed_precision
from shardckpt.core.runtime.backward_order import RECOMPUTED, ForwardCall
from shardckpt.core.runtime.mixed_precision import Buffers
from shardckpt.devices import Event


class Phase(Enum):
    """A unit's phase in an iteration (torch: FSDP2's `TrainingState`)."""

    IDLE = auto()
    FORWARD = auto()
    PRE_BACKWARD = auto()
    POST_BACKWARD = auto()


_BACKWARD = (Phase.PRE_BACKWARD, Phase.POST_BACKWARD)
_OUTSIDE_FORWARD = (Phase.IDLE, *_BACKWARD)
_UNSHARDED = frozenset({BucketPhase.UNSHARDED})

# Triples of phase before, hook and phase after.
TRANSITIONS: frozenset[tuple[Phase, str, Phase]] = frozenset(
    {
        (Phase.IDLE, "pre_forward", Phase.FORWARD),
        (Phase.FORWARD, "pre_forward", Phase.FORWARD),
        *((phase, "pre_forward", phase) for phase in _OUTSIDE_FORWARD),
        *((phase, "post_forward", phase) for phase in _OUTSIDE_FORWARD),
        (Phase.FORWARD, "post_forward", Phase.FORWARD),
        (Phase.FORWARD, "post_forward", Phase.IDLE),
        (Phase.FORWARD, "finalize_forward", Phase.FORWARD),
        (Phase.FORWARD, "finalize_forward", Phase.IDLE),
        (Phase.IDLE, "finalize_forward", Phase.IDLE),
        (Phase.FORWARD, "forward_failed", Phase.IDLE),
        (Phase.PRE_BACKWARD, "forward_failed", Phase.PRE_BACKWARD),
        *((phase, "pre_backward", Phase.PRE_BACKWARD) for phase in _OUTSIDE_FORWARD),
        *((phase, "post_backward", Phase.POST_BACKWARD) for phase in _OUTSIDE_FORWARD),
        (Phase.IDLE, "finalize_backward", Phase.IDLE),
        (Phase.POST_BACKWARD, "finalize_backward", Phase.IDLE),
        *((phase, "reset_after_error", Phase.IDLE) for phase in Phase),
    }
)


def run_all(functions: Iterable[Callable[[], object]]) -> None:
    """Call all functions, then raise the first exception."""
    first = None
    for function in functions:
        try:
            function()
        except BaseException as error:  # noqa: BLE001
            first = first or error
    if first is not None:
        raise first


class UnitParams:
    """A unit's registrations, which are unsharded and resharded together."""

    def __init__(self, registrations: Sequence[ParamRegistration], streams: DeviceStreams | None) -> None:
        # `active` holds the registrations to compute with: empty while they are checked out.
        self.registrations = self.active = tuple(registrations)
        self.streams = streams  # for a unit without parameters
        # Other code, such as `summon_full_params`, currently registers full parameters.
        self.is_checked_out = False

    @property
    def members(self) -> list[ParamInfo]:
        """Parameters in all buckets."""
        return [member for registration in self.registrations for member in registration.bucket.members]

    @property
    def phases(self) -> set[BucketPhase]:
        """The buckets' phases."""
        phases = set()
        for registration in self.active:
            phases.add(registration.bucket.unsharded.phase)
        return phases

    @property
    def requires_grad(self) -> bool:
        """Return True if any parameter requires gradients."""
        return any(registration.bucket.unsharded.requires_grad for registration in self.active)

    @property
    def is_async(self) -> bool:
        """Return True if computation and reductions run asynchronously to the host."""
        return any(registration.bucket.unsharded.streams.is_async for registration in self.active)

    @property
    def is_outdated(self) -> bool:
        """Return True if parameters were changed, as by a step, or replaced since full ones were kept."""
        return any(map(is_outdated, self.active))

    def register_kept(self, *, is_after_backward: bool) -> None:
        """Register parameters that stay unsharded after forward or after backward."""
        for registration in self.active:
            if registration.bucket.unsharded.phase in (BucketPhase.UNSHARDED, BucketPhase.KEPT):
                registration.register_kept(is_after_backward=is_after_backward)
            else:  # nothing computed with them
                registration.bucket.unsharded.reshard()

    @contextmanager
    def check_out(self) -> Iterator[tuple[ParamRegistration, ...]]:
        """Yield the resharded buckets; inside the context, the unit computes without them."""
        self.is_checked_out, self.active = True, ()
        try:
            yield self.registrations
        finally:
            self.is_checked_out, self.active = False, self.registrations

    def set_callbacks(self, on_gradient: Callable[[], None], unshard: Callable[[], None]) -> None:
        """Set the methods to call for a leaf's gradient and for a module's recomputation."""
        for registration in self.registrations:
            registration.bucket.unsharded.watch.set_callback(on_gradient)
            for guard in registration.guards:
                guard.set_backward_unshard(unshard)

    def rearm_watches(self) -> None:
        """Report each bucket's next gradient again."""
        for registration in self.registrations:
            registration.bucket.unsharded.watch.rearm()

    def bind_extensions(self, unit: str, *, has_pending_grads: bool) -> bool:
        """Use the all-gather extensions that a user has set on local tensors; return whether they are new."""
        late = [registration for registration in self.active if registration.has_unbound_extensions]
        if not late:
            return False
        if has_pending_grads or any(registration.bucket.reducer.has_unreduced_grads for registration in late):
            raise ExtensionError(
                "all-gather extensions cannot be set on local tensors while gradients are pending",
                where=unit,
                found=[member.fqn for registration in late for member in registration.bucket.members],
                fix="Set them before the first forward, or after a backward that reduces gradients.",
            )
        self.registrations = self.active = tuple(
            bound for registration in self.registrations for bound in registration.bind_extensions()
        )
        return True


class UnitReducer:
    """Reduces a unit's gradients."""

    def __init__(self, params: UnitParams) -> None:
        self._params = params
        self._copied_event: Event | None = None  # after the last gradient copy to the CPU
        self._partly_added: list[tuple[ParamRegistration, ReducedGrad, PendingFlags]] = []

    def start(self, config: UnitConfig, *, full_precision: bool) -> None:
        """Start the gradients' reduce-scatters, after an earlier reduction has finished. Collective."""
        self.finish(config)
        settings = ReductionSettings(
            config.gradient_divide_factor, config.force_sum_reduction, config.all_reduce, full_precision
        )
        buckets = [registration.bucket for registration in self._params.active]
        start_reduce_scatters([bucket.reducer for bucket in buckets if bucket.unsharded.requires_grad], settings)

    def release_inputs(self, *, only_scattered: bool = False) -> None:
        """Make the current stream wait until the memory of queued reductions' inputs can be used again."""
        for registration in self._params.active:
            registration.bucket.reducer.release_input(only_scattered=only_scattered)

    @property
    def is_read_at_once(self) -> bool:
        """Return True if reduced gradients are added to others, or read by hooks."""
        return any(is_read_at_once(each) for registration in self._params.active for each in registration.parameters)

    @property
    def is_done(self) -> bool:
        """Return True if `finish` neither waits nor runs collectives."""
        return all(
            registration.bucket.reducer.is_done and not any(map(has_gradient_hooks, registration.parameters))
            for registration in self._params.registrations
        )

    def finish(self, config: UnitConfig) -> None:
        """Wait for the averaged gradients and accumulate them."""
        for registration in self._params.active:
            reduced = registration.bucket.reducer.wait_reduce_scatter()
            if reduced is not None:
                self._copied_event = reduced.event or self._copied_event
                if self._copied_event is not None and any(map(is_read_at_once, registration.parameters)):
                    self._wait_for_copies()
                if config.reduce_scatter_unused_params:
                    reduced = replace(reduced, used=(True,) * len(reduced.used), flags=None)
                if reduced.flags is not None and any(map(has_gradient_hooks, registration.parameters)):
                    reduced = replace(reduced, used=reduced.flags.wait(), flags=None)  # in one order on all ranks
                registration.add_gradient(reduced)
                if reduced.flags is not None:
                    self._partly_added.append((registration, reduced, reduced.flags))

    def finish_gradients(self) -> None:
        """Wait for gradient copies to the CPU; add gradients that only other ranks had."""
        self._wait_for_copies()
        late, self._partly_added = self._partly_added, []
        for registration, reduced, flags in late:
            registration.add_late_gradient(reduced, flags.wait())

    def _wait_for_copies(self) -> None:
        event, self._copied_event = self._copied_event, None
        if event is not None:
            event.synchronize()

    def forget_gradients(self) -> None:
        """Forget gradients that only other ranks had, and wait for copies."""
        self._partly_added = []
        self._wait_for_copies()


class RootHooks(Protocol):
    """The root's interface for its units: shared state, and hooks called by autograd."""

    @property
    def limiter(self) -> RateLimiter:
        """Limits all units' all-gathers."""

    @property
    def owners(self) -> BufferOwners:
        """Finds the units that own unsharded buffers."""

    def prepare_all_gather(self, unit: FSDPUnit) -> None:
        """Prepare a unit's all-gathers."""

    def start_backward(self) -> object:
        """Start a backward unless one is running."""

    def enter_backward(self, unit: FSDPUnit, *, needs_params: bool) -> None:
        """Prepare a unit for its backward."""

    def recover(self) -> None:
        """Reset after a backward that raised; autograd does not report it."""


class FSDPUnit:
    """One or several modules whose parameters are unsharded and resharded together."""

    def __init__(
        self,
        name: Name,
        modules: Sequence[nn.Module],
        registrations: Sequence[ParamRegistration],
        config: UnitConfig,
        buffers: Buffers | None = None,
        device: torch.device | None = None,
    ) -> None:
        apply_compiler_disable()
        self._name = name
        self.modules = tuple(modules)
        self._set_params(UnitParams(registrations, get_device_streams(device) if device is not None else None))
        self.config = config
        self.buffers = buffers if buffers is not None else Buffers(())
        self.units_to_prefetch: dict[Phase, Sequence[FSDPUnit]] = {}  # keys: FORWARD, PRE_BACKWARD
        self.phase = Phase.IDLE
        self.root: RootHooks | None = None
        self._running_calls = self._modules_run = 0
        self.open_calls: set[ForwardCall[FSDPUnit]] = set()  # recorded calls whose gradients are not complete
        self.pending_forward_ids: set[int] = set()  # forwards whose gradients have not been reduced
        self._has_unsynced_grads = False
        self.full_precision = False  # the last forward with gradients used the stored dtypes
        self._inputs_event: Event | None = None  # after inputs were copied from pinned memory

    def __deepcopy__(self, memo: dict[int, Any]) -> FSDPUnit:
        """Return a unit with the copied modules, sharded, idle and without a root."""
        if self.root is not None:
            self.reshard()
        copied = memo[id(self)] = FSDPUnit(copy.deepcopy(self._name, memo), (), (), self.config)
        for registration in self.registrations:
            registration.copy_parameters(memo)
        copied._set_params(UnitParams(copy.deepcopy(self.registrations, memo), self.params.streams))
        copied.modules = copy.deepcopy(self.modules, memo)
        copied.buffers, copied.units_to_prefetch = copy.deepcopy((self.buffers, self.units_to_prefetch), memo)
        return copied

    def _set_params(self, params: UnitParams) -> None:
        self.params = params
        self.params.set_callbacks(self.on_gradient, self.unshard_for_backward)
        self.reducer = UnitReducer(self.params)
        self._addresses: list[int] = []  # the unsharded buffers' data pointers, unique while they have storage

    @property
    def name(self) -> str:
        """Name in messages: the FQN below the root, once it is known."""
        return self._name.text

    @property
    def registrations(self) -> tuple[ParamRegistration, ...]:
        """The buckets' registrations on the modules."""
        return self.params.registrations

    @property
    def buckets(self) -> list[Bucket]:
        """The unit's buckets, in their fixed order."""
        return [registration.bucket for registration in self.params.registrations]

    def profile_range(self, label: str) -> AbstractContextManager[object]:
        """Return a profiler range for this unit; an empty context without parameters."""
        return profile_range(label, self._name.text) if self.params.registrations else nullcontext()

    def attach(self, root: RootHooks | None, name: str = "") -> None:
        """Set the unit's root, and its FQN below the root; None for no root."""
        self.root = root
        if name:
            self._name.become(name)
        if root is not None:  # a user may have unsharded it before this root existed
            root.owners.by_address.update(dict.fromkeys(self._addresses, self))

    # ----------------------------------------------------------------------------------------- full parameters

    def pull_user_changes(self) -> None:
        """Copy a user's changes to registered parameters into the buckets: values, dtypes and extensions."""
        self.bind_extensions()
        for registration in self.params.active:
            registration.pull_user_changes()

    def bind_extensions(self) -> None:
        """Use the all-gather extensions that a user has set on local tensors."""
        if self.params.bind_extensions(self.name, has_pending_grads=bool(self.pending_forward_ids)):
            self.params.set_callbacks(self.on_gradient, self.unshard_for_backward)

    def prefetch_unshard(self, *, full_precision: bool | None = None) -> None:
        """Start the all-gathers, in the stored or the compute dtype. Collective."""
        assert self.root is not None, "a unit computes only below a root"
        if torch.is_inference_mode_enabled():
            with leave_inference_mode():
                self.prefetch_unshard(full_precision=full_precision)
            return
        is_changed = False
        for registration in self.params.active:
            is_changed |= registration.has_user_changes()
        if is_changed:
            self.bind_extensions()
        sharded: list[UnshardedParams] = []
        for registration in self.params.active:
            if is_changed and registration.has_user_changes():
                registration.pull_user_changes()
            unsharded = registration.bucket.unsharded
            if unsharded.phase is BucketPhase.SHARDED and not unsharded.is_aliased:
                sharded.append(unsharded)
        if not sharded:
            return
        self.root.prepare_all_gather(self)
        if self.config.limit_all_gathers and sharded[0].has_gathered_memory:
            self.root.limiter.wait()
        if full_precision is None:
            full_precision = self.full_precision if self.pending_forward_ids else self.runs_in_full_precision
        start_all_gathers(sharded, full_precision=full_precision)

    def unshard(self, *, full_precision: bool = False) -> None:
        """All-gather the parameters and register them on the modules. Collective."""
        params, is_in_forward = self.params, self.phase is Phase.FORWARD
        if params.phases <= _UNSHARDED:
            return
        if torch.is_inference_mode_enabled():
            with leave_inference_mode():
                self.unshard(full_precision=full_precision)
            return
        torch.clear_autocast_cache()  # the cache, of any device, is keyed by the leaf, whose content changes
        self.prefetch_unshard(full_precision=full_precision)
        assert self.root is not None
        keeps = self.config.post_forward_ranks > 0 and is_in_forward and torch.is_grad_enabled()
        streams = params.active[0].bucket.unsharded.streams
        if streams.is_async:
            streams.release_gather_outputs()
        for registration in params.active:
            unsharded = registration.bucket.unsharded
            if unsharded.kept is not None:
                check_kept(registration, unsharded.kept)
            address = unsharded.wait_all_gather(keep_partial_shard=keeps)
            if address:
                self._addresses.append(address)
                self.root.owners.by_address[address] = self
            registration.register_unsharded()
        if streams.is_async and not is_in_forward:  # the next unit's all-gather has not started
            streams.release_gather_outputs()

    def reshard(self, *, keep_partial_shard: bool = False, unconditionally: bool = False) -> None:
        """Free the full parameters; do nothing if they are freed."""
        root, freed = self.root, None
        if root is not None:
            for address in self._addresses:
                root.owners.by_address.pop(address, None)
        self._addresses.clear()
        for registration in self.params.active:
            unsharded = registration.bucket.unsharded
            # `unconditionally` also registers the shards of a bucket that is marked as sharded.
            if unsharded.phase is not BucketPhase.SHARDED or unconditionally:
                freed = freed or unsharded
                registration.reshard(keep_partial_shard=keep_partial_shard)
            elif not keep_partial_shard:
                unsharded.reshard()
        limits = self.config.limit_all_gathers and not unconditionally
        if root is not None and freed is not None and freed.has_gathered_memory and limits:
            root.limiter.record_free_event(freed.streams)

    # ------------------------------------------------------------------------------------------------- forward

    @property
    def runs_in_full_precision(self) -> bool:
        """Return True if the unit currently computes in the stored dtypes."""
        return not self.modules[0].training and mixed_precision.has_full_precision_eval()

    def prepare_inputs(self, inputs: Any, *, is_root: bool) -> Any:
        """Return inputs on the compute device and in the compute dtype; cast buffers."""
        precision, active = self.config.precision, self.params.active
        streams = active[0].bucket.unsharded.streams if active else self.params.streams
        if precision.buffer_dtype is not None and self.runs_in_full_precision:
            self.buffers.restore()
        elif precision.buffer_dtype is not None:
            self.buffers.cast(precision.buffer_dtype)
        if is_root and streams is not None and streams.is_async:
            with profile_range("inputs_to_device"):
                inputs, event = mixed_precision.move_tensors(inputs, streams.device)
            self._inputs_event = event or self._inputs_event
        casts = precision.cast_inputs or (precision.cast_root_inputs and is_root)
        if not casts or precision.param_dtype is None or self.params.is_checked_out or self.runs_in_full_precision:
            return inputs
        with profile_range("cast_forward_inputs"):
            return mixed_precision.cast_tensors(inputs, precision.param_dtype)

    def pre_forward(self, forward_id: int) -> None:
        """Unshard before a call computes, in the forward with `forward_id`. Collective."""
        self._running_calls += 1
        full_precision = self.full_precision
        if forward_id != RECOMPUTED:
            full_precision, self.phase = self.runs_in_full_precision, Phase.FORWARD
        for registration in self.params.active:
            unsharded = registration.bucket.unsharded
            if unsharded.phase is not BucketPhase.SHARDED and unsharded.has_wrong_dtype(full_precision=full_precision):
                self.reshard()  # gathered by or for a forward in the other precision
                break
        self.unshard(full_precision=full_precision)
        if torch.is_grad_enabled():  # otherwise an earlier forward's backward may be next
            self.full_precision = full_precision
            self.pending_forward_ids.add(forward_id)

    def post_forward(self, call: ForwardCall[FSDPUnit], *, is_root: bool, is_recorded: bool) -> None:
        """End a call, which backward may reach if it is recorded; reshard after the last one."""
        self._running_calls -= 1
        if is_recorded:
            self.open_calls.add(call)
        if call.forward_id != RECOMPUTED:
            self._modules_run += 1
            if self._modules_run >= len(self.modules):
                self.finalize_forward(is_root=is_root)

    def finalize_forward(self, *, is_root: bool = False) -> None:
        """Reshard, or keep the parameters, after a forward if no module is computing."""
        if self._inputs_event is not None:  # the user may refill pinned memory from now on
            event, self._inputs_event = self._inputs_event, None
            event.synchronize()
        if not self._modules_run or self._running_calls:
            return
        config = self.config
        self._modules_run, self.phase = 0, Phase.IDLE
        has_backward = torch.is_grad_enabled()
        frees = config.reshard_after_forward and not (config.keeps_root_unsharded and is_root)
        if frees or not (has_backward or config.keeps_unsharded_without_grad):
            self.reshard(keep_partial_shard=has_backward and config.post_forward_ranks > 0)
        else:
            self.params.register_kept(is_after_backward=False)

    def forward_failed(self, *, recomputes: bool) -> None:
        """Reset after an exception in forward."""
        # In a recomputation, activation checkpointing raises one to stop early.
        if self._running_calls:
            self._running_calls -= 1
        self._modules_run = 0
        if not recomputes and not self._running_calls:
            self.phase = Phase.IDLE
            self.reshard()

    # ------------------------------------------------------------------------------------------------ backward

    def on_gradient(self) -> None:
        """Record a full parameter's gradient, which need not come through an output."""
        if self.root is not None:
            self.root.start_backward()
            self.pending_forward_ids.add(RECOMPUTED)

    def unshard_for_backward(self) -> None:
        """Unshard for a saved parameter or for a module's recomputation. Collective."""
        assert self.root is not None, "a unit computes only below a root"
        self.root.enter_backward(self, needs_params=True)

    def pre_backward(self, *, needs_params: bool) -> bool:
        """Unshard before backward; return False if the unit was prepared. Collective."""
        if needs_params and self.phase is Phase.PRE_BACKWARD and self.params.phases <= _UNSHARDED:
            return False
        self.phase = Phase.PRE_BACKWARD
        self.pending_forward_ids.add(RECOMPUTED)
        if needs_params:
            with self.profile_range("pre_backward"):
                self.unshard(full_precision=self.full_precision)
        return True

    def post_backward(self, forward_ids: Set[int] | None, *, is_unsynced: bool) -> None:
        """Reshard after the gradients for the given forwards, or for all, are complete."""
        done = {RECOMPUTED, *forward_ids} if forward_ids is not None else set(self.pending_forward_ids)
        self.pending_forward_ids -= done
        self.params.rearm_watches()
        self.phase = Phase.POST_BACKWARD
        self._has_unsynced_grads |= is_unsynced
        if not _stays_after_backward(self.config, is_unsynced=is_unsynced):
            self.reshard()

    def finalize_backward(self) -> None:
        """End a backward: forget its calls, reshard, expose unreduced gradients."""
        self.open_calls.clear()
        self.params.rearm_watches()
        if self.pending_forward_ids and self.phase not in _BACKWARD:
            return  # this unit's backward has not started
        is_unsynced, self._has_unsynced_grads = self._has_unsynced_grads, False
        stays = _stays_after_backward(self.config, is_unsynced=is_unsynced)
        if not stays:
            self.reshard()
        if is_unsynced:
            for registration in self.params.active:
                registration.stash_unsharded_grads()
        if stays:
            self.params.register_kept(is_after_backward=True)
        self.phase = Phase.IDLE

    def reset_after_error(self) -> None:
        """Reset to the state before a failed iteration, without its gradients."""
        self.open_calls.clear()
        self.pending_forward_ids.clear()
        self.params.rearm_watches()
        self._running_calls = self._modules_run = 0
        self._has_unsynced_grads = False
        self.phase = Phase.IDLE
        resets = [registration.reset_after_error for registration in self.params.active]
        run_all([self.reducer.forget_gradients, *resets, partial(self.reshard, unconditionally=True)])


def _stays_after_backward(config: UnitConfig, *, is_unsynced: bool) -> bool:
    """Return True if full parameters stay after a backward, with or without sync."""
    return not config.reshard_after_backward or (
        is_unsynced and config.keeps_unsharded_without_sync and not config.reshard_after_forward
    )


class ShardWrites:
    """Makes all-gathers depend on an optimizer's or a user's writes to shards."""

    def __init__(self, units: Sequence[FSDPUnit]) -> None:
        self._units = units
        self._post_optim_event: Event | None = None

    def set_post_optim_event(self, event: Event | None) -> None:
        """Set the event that the next iteration's all-gathers wait for, instead of all queued work."""
        self._post_optim_event = event

    def make_gathers_wait(self, *, starts_iteration: bool = False) -> None:
        """Make all-gathers wait for queued work, and for the optimizer's event."""
        event = self._post_optim_event  # the optimizer runs on another stream; each event is used once
        if starts_iteration:
            self._post_optim_event = None
        devices: set[DeviceStreams] = set()
        for unit in self._units:
            for registration in unit.params.registrations:
                if registration.bucket.unsharded.streams.is_async:
                    devices.add(registration.bucket.unsharded.streams)
        for streams in devices:
            if event is not None:
                streams.make_gathers_wait(event)
            if event is None or not starts_iteration:
                streams.make_gathers_wait()


class UnshardHandle:
    """Handle for an asynchronous `unshard`.

    Args:
        unshard: Function that waits for the parameters and registers them.
    """

    def __init__(self, unshard: Callable[[], None]) -> None:
        self._unshard: Callable[[], None] | None = unshard

    def wait(self) -> None:
        """Wait until the full parameters are registered; a second call does nothing."""
        unshard, self._unshard = self._unshard, None
        if unshard is not None:
            unshard()
