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
from shardckpt.core.modules.compile_guard import hidden, hide
from shardckpt.core.modules.fqn_and_params import Name, ParamInfo
from shardckpt.core.modules.pytree import mapped, tensors
from shardckpt.core.params.param_bucket import Bucket
from shardckpt.core.params.tensor_extension import ExtensionError
from shardckpt.core.registration.base import ParamRegistration
from shardckpt.core.runtime import mixed_precision
from shardckpt.core.runtime.mixed_precision import Buffers
from shardckpt.errors import ShardckptError

_NOW = 0
"""The lap of what is computed again in backward: it is done with when that is."""


class Phase(Enum):
    """Where a unit stands in an iteration."""

    IDLE = auto()
    FORWARD = auto()
    BACKWARD = auto()


class ForwardCall:
    """One forward of a unit whose outputs require gradients.

    Args:
        unit: The unit.
        below: How many calls had ended when it began: later ones that end before it are nested in it.
        threaded: Whether a node in front of its inputs tells when everything behind them has its gradients.
        lap: Which of the computations it belongs to that a user began: a backward goes back through those it reaches.
    """

    def __init__(self, unit: FSDPUnit, below: int, threaded: bool = False, lap: int = 0) -> None:
        self.unit = unit
        self.below = below
        self.threaded = threaded
        self.lap = lap


class RootSchedule(Protocol):
    """The root as its units see it: it knows the order of all of them."""

    @property
    def lap(self) -> int:
        """The number of the computation that a user began last."""

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

    def filled(self, bucket: Bucket, unit: FSDPUnit) -> None:
        """A bucket's buffer has an address now."""

    def freed(self, address: int) -> None:
        """The buffer at this address is gone."""

    def find(self, tensor: torch.Tensor) -> FSDPUnit | None:
        """Return the unit in whose full buffer a tensor lies."""

    def recover(self) -> None:
        """After a backward that raised, nothing of which tells the engine: be as before it."""

    def is_root(self, unit: FSDPUnit) -> bool:
        """Tell whether the unit is the outermost one."""

    def on_post_forward(self, unit: FSDPUnit) -> None:
        """Record that a unit has computed."""

    def reduces(self, unit: FSDPUnit) -> None:
        """The unit's gradients are about to be reduced."""

    def admit(self, unit: FSDPUnit) -> None:
        """Return when the unit may be gathered: not while too many freed ones are still computed with."""

    def released(self, unit: FSDPUnit) -> None:
        """The unit's full parameters are gone, as soon as what is queued has been computed."""


class TransformError(ShardckptError, NotImplementedError):
    """A functional transform that differentiates around a unit."""


class DoubleBackwardError(ShardckptError, NotImplementedError):
    """Gradients of gradients through parameters that are freed."""


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
        hide()
        self._name = name
        self.modules = tuple(modules)
        self.registrations = tuple(registrations)
        self.config = config
        self.buffers = buffers if buffers is not None else Buffers(())
        self.sync_gradients = True
        self._all_reduce = True
        self._next: dict[Phase, tuple[FSDPUnit, ...]] = {}
        self._ran = 0
        self.phase = Phase.IDLE
        self._iteration: RootSchedule | None = None
        self._calls: set[ForwardCall] = set()
        self._running: list[ForwardCall] = []
        self._owed: set[int] = set()  # laps whose gradients have not been reduced
        self._took_part = False
        self._addresses: list[int] = []
        self._full_shown = False
        self._has_unsynced_grads = False
        self._lending = False
        self._saves = True  # what autograd keeps of the parameters comes by our hooks
        self._watch_gradients()
        self._exactly = False  # the last forward computed in the stored types

    def __deepcopy__(self, memo: dict[int, Any]) -> FSDPUnit:
        """Return a unit of the copied modules, sharded, at rest and below no root."""
        if self.attached:
            self.free()
        made = memo[id(self)] = FSDPUnit(copy.deepcopy(self._name, memo), (), (), self.config)
        for each in self.registrations:
            each.copy_parameters(memo)
        made.registrations = copy.deepcopy(self.registrations, memo)
        made._watch_gradients()
        made.modules = copy.deepcopy(self.modules, memo)
        made.buffers = copy.deepcopy(self.buffers, memo)
        made.sync_gradients, made._all_reduce = self.sync_gradients, self._all_reduce
        made._next = copy.deepcopy(self._next, memo)
        return made

    def _watch_gradients(self) -> None:
        """Learn of gradients, and of needs of parameters in backward, that no call of the unit tells of."""
        for each in self.registrations:
            each.bucket.watch.tell(self.gradient_arrived)
            each.set_backward_unshard(self.fill_for_backward)

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
    def filled(self) -> bool:
        """Tell whether all full parameters can be read."""
        return all(each.bucket.filled for each in self._active)

    @property
    def trainable(self) -> bool:
        """Tell whether some parameter takes part in gradients."""
        return any(each.bucket.requires_grad for each in self.registrations)

    @property
    def owes_reduction(self) -> bool:
        """Tell whether a forward was recorded whose gradients have not been reduced."""
        return bool(self._owed)

    def owes(self, laps: Set[int]) -> bool:
        """Tell whether that is so of some laps, or of the backward that runs."""
        return not self._owed.isdisjoint({_NOW, *laps})

    @property
    def takes_part(self) -> bool:
        """Tell whether the backward that runs has reached the unit, and has not reduced its gradients since."""
        return _NOW in self._owed

    @property
    def owed_laps(self) -> Set[int]:
        """Return the laps whose gradients have not been reduced."""
        return self._owed - {_NOW}

    def attach(self, iteration: RootSchedule | None, name: str = "") -> None:
        """Let the unit belong to a root, where it has a name; or to none."""
        self._iteration = iteration
        if name:
            self._name.become(name)
        if iteration is not None and self._addresses:  # gathered by hand, before there was this root
            for bucket in self.buckets:
                iteration.filled(bucket, self)

    def synchronise(self, on: bool) -> None:
        """Say whether the next backward reduces gradients, or holds them back."""
        self.sync_gradients = on

    def all_reduces(self, on: bool) -> None:
        """Say whether reductions go on over replicas, or wait with what this rank has of the sum."""
        self._all_reduce = on

    def configure(self, **changes: Any) -> None:
        """Change settings.

        Args:
            changes: Fields of `UnitConfig` with their new values.
        """
        self.config = replace(self.config, **changes)

    def prefetches(
        self, *, forward: Sequence[FSDPUnit] | None = None, backward: Sequence[FSDPUnit] | None = None
    ) -> None:
        """Say which units are gathered while this one computes, instead of those that the order suggests.

        Args:
            forward: In forward; unchanged where None.
            backward: In backward; unchanged where None.
        """
        for phase, units in ((Phase.FORWARD, forward), (Phase.BACKWARD, backward)):
            if units is not None:
                self._next[phase] = tuple(units)

    def told_next(self, phase: Phase) -> tuple[FSDPUnit, ...] | None:
        """Return the units to gather while this one computes; None where nobody named any."""
        return self._next.get(phase) or None

    @property
    def attached(self) -> bool:
        """Tell whether the unit belongs to a root."""
        return self._iteration is not None

    @property
    def _root(self) -> RootSchedule:
        assert self._iteration is not None, "a unit computes only below a root"
        return self._iteration

    # ---------------------------------------------------------------------------------------- full parameters

    def prefetch(self, *, exact: bool | None = None) -> bool:
        """Start to gather what is not there. Collective.

        Args:
            exact: In the stored types, whatever the type to compute in; where None, as the unit computes.

        Returns:
            Whether something was started.
        """
        self.bind_extensions()
        if all(each.bucket.holds_full for each in self._active):
            return False
        self._root.admit(self)
        if exact is None:
            exact = self._exactly if self._owed else self._computes_exactly
        started = False
        for each in self._active:
            if not each.bucket.filled:
                each.pull_user_changes()
                started |= each.bucket.begin_gather(exact=exact)
        return started

    def fill(self) -> None:
        """Gather what is not there, and let the modules have it. Collective."""
        self._fill(exact=False)

    def fill_exact(self) -> None:
        """Gather in the stored types, whatever the type to compute in; `free` undoes it. Collective."""
        if not all(each.bucket.exact for each in self._active):
            self.free()
        self._fill(exact=True)

    def _fill(self, *, exact: bool) -> None:
        if self.filled and self._full_shown:
            return
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            torch.clear_autocast_cache()  # it keys on the leaf, whose content changes
        self.prefetch(exact=exact)
        for each in self._active:
            if not each.bucket.filled:
                each.bucket.finish_gather(keeps_slice=self._keeps_slice)
                self._root.filled(each.bucket, self)
                self._addresses.append(each.bucket.address)
            if each.bucket.aliased:
                each.pull_user_changes()
            each.register_unsharded()
        self._full_shown = True

    @property
    def _keeps_slice(self) -> bool:
        return self.config.keeps_slice > 0 and self.phase is Phase.FORWARD and torch.is_grad_enabled()

    @property
    def _active(self) -> tuple[ParamRegistration, ...]:
        """The buckets to compute with: none while somebody else shows them."""
        return () if self._lending else self.registrations

    @property
    def lent(self) -> bool:
        """Tell whether somebody else shows the buckets' full parameters at the moment."""
        return self._lending

    @contextmanager
    def lending(self) -> Iterator[tuple[ParamRegistration, ...]]:
        """Hand the buckets out, sharded; inside, the unit computes as a module that has none of them would."""
        self.recover()
        if self.attached:
            self.free()
        self.pull_user_changes()
        self._lending = True
        try:
            yield self.registrations
        finally:
            self._lending = False

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
        if self._owed or any(each.bucket.holds_gradients for each in late):
            raise ExtensionError(
                "all-gather extensions were put on local tensors while gradients are still to come",
                where=self.name,
                found=[member.fqn for each in late for member in each.bucket.members],
                fix="Put them there before the first forward, or after a backward that reduces gradients.",
            )
        self.registrations = tuple(made for each in self.registrations for made in each.bind_extensions())
        self._watch_gradients()

    def recover(self) -> None:
        """After a backward that raised: be as before it."""
        if self.attached:
            self._root.recover()

    def write_back(self) -> None:
        """Take this rank's part of the full parameters, changed by a user, as its shard."""
        for each in self._active:
            each.bucket.write_back()

    def free(self, *, keeps_slice: bool = False) -> None:
        """Give up the full parameters; nothing when they are gone.

        Args:
            keeps_slice: But keep this rank's slice of them.
        """
        if self._full_shown or any(each.bucket.holds_full for each in self._active):
            self._hide(keeps_slice=keeps_slice)
            if self.attached:
                self._root.released(self)
        elif not keeps_slice:
            for each in self._active:
                each.bucket.free()

    def _hide(self, *, keeps_slice: bool = False) -> None:
        if self.attached:
            for address in self._addresses:
                self._root.freed(address)
        self._addresses.clear()
        for each in self._active:
            each.register_sharded()
            each.bucket.free(keeps_slice=keeps_slice)
        self._full_shown = False

    # ---------------------------------------------------------------------------------------------- forward

    @hidden
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
            self._exactly = self._computes_exactly
        self._cast_buffers()
        args, kwargs = self._prepared((args, kwargs))
        found = [t for t in tensors((args, kwargs)) if t.requires_grad] if torch.is_grad_enabled() else []
        call = ForwardCall(
            self, 0 if again else self._root.count_finished_calls(), bool(found), _NOW if again else self._root.lap
        )
        self._running.append(call)
        if not again:
            self.phase = Phase.FORWARD
            self._saves = not torch.is_grad_enabled()
        if any(each.bucket.holds_full and each.bucket.differs(exact=self._exactly) for each in self._active):
            self.free()  # kept by a forward in the other mode, or gathered ahead for one
        self._fill(exact=self._exactly)
        if not again:
            self._root.on_pre_forward(self)
        if torch.is_grad_enabled():
            self._owed.add(call.lap)
        if not found or not self._active:
            return args, kwargs
        through = iter(autograd_hooks.thread(found, lambda: self.post_backward_hook(call)))
        return mapped((args, kwargs), lambda t: next(through) if t.requires_grad else t)  # type: ignore[no-any-return]

    @property
    def _computes_exactly(self) -> bool:
        return mixed_precision.full_in_eval() and not self.module.training

    def _cast_buffers(self) -> None:
        dtype = self.config.precision.buffer_dtype
        if dtype is None:
            return
        if self._computes_exactly:
            self.buffers.restore()
        else:
            self.buffers.cast(dtype)

    def _prepared(self, given: Any) -> Any:
        """Return the arguments where the unit computes, and in the type it computes in."""
        config = self.config.precision
        if self._root.is_root(self) and self._active:
            given = mixed_precision.moved(given, self._active[0].bucket.compute_device)
        wanted = config.cast_inputs or (config.cast_root_inputs and self._root.is_root(self))
        if not wanted or config.param_dtype is None or self._computes_exactly or self._lending:
            return given
        return mixed_precision.cast(given, config.param_dtype)

    @hidden
    def post_forward(self, output: Any) -> Any:
        """Reshard, and register pre-backward hooks on the outputs.

        Args:
            output: The module's result.

        Returns:
            The result to hand on.
        """
        call = self._running.pop()
        again = autograd_hooks.in_backward()
        if self.config.precision.output_dtype is not None:
            output = mixed_precision.cast(output, self.config.precision.output_dtype)
        found = [t for t in tensors(output) if t.requires_grad] if torch.is_grad_enabled() else []
        for tensor in found:
            tensor.register_hook(lambda _: self.pre_backward_hook(call))  # type: ignore[no-untyped-call]
        if found and not again and self._active:
            self._calls.add(call)
            self._root.record_post_forward(call)
        self._ran += not again
        if again or self._running or self._ran < len(self.modules):
            return output
        self._ran = 0
        self.phase = Phase.IDLE
        self._root.on_post_forward(self)
        self._leave_forward()
        return output

    def end_root_forward(self) -> None:
        """End the root's forward: wait no longer for modules of the unit that did not run."""
        if self._ran and not self._running:
            self._ran = 0
            self.phase = Phase.IDLE
            self._leave_forward()

    def _leave_forward(self) -> None:
        """Free, or let the modules have what is kept between forward and backward."""
        config = self.config
        frees = config.frees_after_forward and not (config.keeps_as_root and self._root.is_root(self))
        recorded = torch.is_grad_enabled()
        if frees or not (recorded or config.keeps_without_grad):
            self.free(keeps_slice=recorded and config.keeps_slice > 0)
            return
        for each in self._active:
            each.register_post_forward()
        self._full_shown = False

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Around the module's forward: what is saved in it for backward can be filled again.

        A checkpoint made by the module's own hooks lies inside this in forward, and around it when it computes again,
        where it has to see what it saw.
        """
        if autograd_hooks.in_backward() and not self._saves:
            yield
            return
        with autograd_hooks.saving(self._root.find):
            yield

    def saved(self) -> None:
        """A full parameter was saved for backward, and will be filled again."""
        self._saves = True

    @hidden
    def forward_failed(self) -> None:
        """The module's forward raised; in a recomputation that is how checkpointing stops early."""
        if self._running:
            self._running.pop()
        self._ran = 0
        if not autograd_hooks.in_backward() and not self._running:
            self.phase = Phase.IDLE
            self.free()

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
            self.fill_for_backward()
            return
        self._take_part()
        self._root.prefetch_backward_pre(self)

    def _take_part(self) -> None:
        self.phase = Phase.BACKWARD
        self._took_part = True
        self._owed.add(_NOW)

    def gradient_arrived(self) -> None:
        """Note that a full parameter has a gradient, perhaps of a tensor that no result of a call leads to."""
        if self.attached:
            self._root.ensure_backward_started()
            self._owed.add(_NOW)

    def fill_for_backward(self) -> None:
        """Gather for gradients, unless the parameters are there."""
        root = self._root
        root.ensure_backward_started()
        if self.phase is Phase.BACKWARD and self.filled and self._full_shown:
            return
        self._take_part()
        self._fill(exact=self._exactly)
        root.prefetch_backward_pre(self)

    def stale(self) -> str:
        """Say that a parameter was changed between forward and backward."""
        return (
            f"one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"a parameter of unit {self.name} was changed between its forward and its backward"
        )

    def run_skipped_post_backward(self, call: ForwardCall) -> None:
        """Join the collectives of a call that gradients of this rank do not reach. Collective."""
        self.pre_backward()
        if call in self._calls:
            self.post_backward_hook(call)

    def post_backward_hook(self, call: ForwardCall) -> None:
        """Finish a call: its gradients are complete; the unit's last call reduces. Collective."""
        self._root.ensure_backward_started()
        self._root.on_post_backward(call)
        self._calls.discard(call)
        if self._calls:
            return
        self.post_backward()

    def post_backward(self, laps: Set[int] | None = None) -> None:
        """Reshard, and reduce gradients unless gradient sync is off. Collective.

        Args:
            laps: Those that are done with; all where None.
        """
        self._owed -= self._owed if laps is None else {_NOW, *laps}
        self._renew_watches()
        self._took_part = True
        self._has_unsynced_grads |= not self.sync_gradients
        if not self._keeps_after_backward(held=not self.sync_gradients):
            self.free()
        self.phase = Phase.IDLE
        self._root.prefetch_backward_post(self)
        if self.sync_gradients:
            self._begin_reduce()

    def _renew_watches(self) -> None:
        for bucket in self.buckets:
            bucket.watch.renew()

    def _keeps_after_backward(self, *, held: bool) -> bool:
        config = self.config
        return not config.frees_after_backward or (held and config.keeps_while_held and not config.frees_after_forward)

    def _begin_reduce(self) -> None:
        began = False
        if any(each.bucket.requires_grad for each in self._active):
            self._root.reduces(self)
        for each in self._active:
            if each.bucket.requires_grad:
                self.finish_reduction()
                each.bucket.begin_reduce(
                    factor=self.config.divide_factor,
                    split=self.config.force_sum,
                    all_reduce=self._all_reduce,
                    exact=self._exactly,
                )
                began = True
        if began:
            self._root.on_reduction_start(self)

    @property
    def reduced(self) -> bool:
        """Tell whether `finish_reduction` would return at once."""
        return all(each.bucket.reduced for each in self.registrations)

    def finish_reduction(self) -> None:
        """Hand the averaged gradients over once they are there."""
        for each in self._active:
            reduced = each.bucket.finish_reduce()
            if reduced is not None:
                everything = replace(reduced, used=(True,) * len(reduced.used))
                each.add_gradient(everything if self.config.zeros_for_unused else reduced)

    def prepare_gradients_for_backward(self) -> None:
        """Take unsynced gradients back from parameters before a backward adds to them."""
        for each in self._active:
            each.restore_unsharded_grads()

    def finalize_backward(self) -> None:
        """End a backward: forget its calls, reshard, show unsynced gradients."""
        self._calls.clear()
        self._renew_watches()
        took_part, self._took_part = self._took_part, False
        if self._owed and not took_part:
            return  # its own backward is still to come
        held, self._has_unsynced_grads = self._has_unsynced_grads, False
        keeps = self._keeps_after_backward(held=held)
        if not keeps:
            self.free()
        for each in self._active:
            if held:
                each.stash_unsharded_grads()
            if keeps:
                each.register_post_forward()
        self._full_shown = False
        self.phase = Phase.IDLE

    def reset_after_error(self) -> None:
        """After a failure: be as before the iteration, without its gradients."""
        self._calls.clear()
        self._running.clear()
        self._ran = 0
        self._owed.clear()
        self._renew_watches()
        self._has_unsynced_grads = self._took_part = False
        try:
            for each in self._active:
                each.reset_after_error()
        finally:
            self._hide()
            self.phase = Phase.IDLE


class UnshardHandle:
    """What an asynchronous `unshard` returns.

    Args:
        fill: Waits for the parameters and registers them.
    """

    def __init__(self, fill: Callable[[], None]) -> None:
        self._fill: Callable[[], None] | None = fill

    def wait(self) -> None:
        """Return when the full parameters are there and registered; nothing when that was waited for before."""
        fill, self._fill = self._fill, None
        if fill is not None:
            fill()
