"""The flat-parameter face of the engine: `FullyShardedDataParallel`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardckpt.core import precision, protocol
from shardckpt.core.bucket import Bucket
from shardckpt.core.comm import ShardGroup
from shardckpt.core.config import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
    UnitConfig,
)
from shardckpt.core.context import Context
from shardckpt.core.exposure import Exposure, FlatExposure, OriginalExposure
from shardckpt.core.traverse import (
    WRAPPED,
    Identity,
    Managed,
    Name,
    clean,
    identity,
    is_incompatible,
    managed_parameters,
    parameters_below,
    ties_below,
    walk,
)
from shardckpt.core.unit import Phase, Unit
from shardckpt.core.wrap import Policy, WrapError, auto_wrap
from shardckpt.errors import ShardckptError

FLAT_PARAM = "_flat_param"


class ArgumentError(ShardckptError, ValueError):
    """An argument of the constructor, or two that do not go together."""


class ArgumentTypeError(ShardckptError, TypeError, ValueError):
    """An argument of another type than its own."""


class StateError(ShardckptError, RuntimeError):
    """A call at a time, or on a module, where it cannot be."""


class SettingsDifferError(ShardckptError, AssertionError):
    """Instances in one tree were told different things where they have to agree."""


_ProcessGroup = dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup] | None


class FullyShardedDataParallel(nn.Module):
    """Shards a module's parameters across ranks; they are whole only while the module computes.

    Arguments, defaults and members are those of `torch.distributed.fsdp.FullyShardedDataParallel`.

    Args:
        module: The module to wrap.
        process_group: Ranks that share parameters; for hybrid strategies a pair, those and the replicas.
        sharding_strategy: What is sharded; FULL_SHARD where None.
        cpu_offload: Whether shards live on the CPU.
        auto_wrap_policy: Which submodules become units of their own.
        backward_prefetch: When the next unit is gathered in backward; None for not ahead of time.
        mixed_precision: Dtypes of computation and reduction.
        ignored_modules: Modules whose parameters are left alone.
        param_init_fn: How to initialise modules on the meta device.
        device_id: Where to compute; the module is moved there.
        sync_module_states: Let all ranks begin with the parameters and buffers of rank 0.
        forward_prefetch: Gather the next unit while this one computes forward.
        limit_all_gathers: Hold back gathers that computation is far behind of.
        use_orig_params: Keep the module's own parameters registered, instead of one flat one.
        ignored_states: Parameters, or modules, that are left alone.
        device_mesh: The ranks as a mesh, instead of `process_group`.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: _ProcessGroup = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Policy | None = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        super().__init__()
        if process_group is not None and device_mesh is not None:
            raise ArgumentError("Cannot pass both process_group and device_mesh at the same time")
        precision.check(mixed_precision, cpu_offload)
        if param_init_fn is not None or any(p.is_meta for p in module.parameters()):
            raise precision.NotYetError("parameters on the meta device are not there yet", fix="Initialise them first.")
        _warn_of_containers(module)
        ignored = _Ignored.of(module, ignored_modules, ignored_states)
        self.sharding_strategy = sharding_strategy or ShardingStrategy.FULL_SHARD
        self.mixed_precision = mixed_precision or MixedPrecision()
        self.cpu_offload = cpu_offload or CPUOffload()
        self.backward_prefetch = backward_prefetch
        self.forward_prefetch = forward_prefetch
        self.limit_all_gathers = limit_all_gathers
        self._use_orig_params = use_orig_params
        self._ignored_params = ignored.parameters
        self._group = _groups(self.sharding_strategy, process_group, device_mesh, auto_wrap_policy)
        self._device_mesh = device_mesh
        self.process_group = self._group.shard or self._group.replicate
        self.rank, self.world_size = self._group.rank, self._group.size
        _move(module, device_id, ignored.parameters)
        if sync_module_states:
            _broadcast(module, self._group, ignored.parameters)
        reopened = self._reopen_ties(module)
        with ties_below(module):
            for each in reopened:
                each._remake()
            if auto_wrap_policy is not None:
                settings = {
                    "process_group": (self._group.shard, self._group.replicate)
                    if self.sharding_strategy.is_hybrid
                    else process_group,
                    "device_mesh": None if self.sharding_strategy.is_hybrid else device_mesh,
                    "sharding_strategy": sharding_strategy,
                    "cpu_offload": cpu_offload,
                    "backward_prefetch": backward_prefetch,
                    "mixed_precision": mixed_precision,
                    "device_id": device_id,
                    "forward_prefetch": forward_prefetch,
                    "limit_all_gathers": limit_all_gathers,
                    "use_orig_params": use_orig_params,
                    "ignored_states": ignored.parameters,
                }
                auto_wrap(
                    module,
                    auto_wrap_policy,
                    type(self),
                    settings,
                    ignored.modules,
                    ignored.parameters,
                    self._refuse_mixed,
                )
            managed = self._managed(module)
        self._unit = self._make_unit(module, managed)
        self._context: Context | None = None
        self._state_dict_settings = StateDictSettings(
            StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig()
        )
        self._fsdp_wrapped_module = module
        self.register_load_state_dict_pre_hook(_refuse_load)  # type: ignore[no-untyped-call]

    # ----------------------------------------------------------------------------------------- construction

    def _managed(self, module: nn.Module) -> list[Managed]:
        nested = [each for each in module.modules() if isinstance(each, FullyShardedDataParallel)]
        exempt = set(self._ignored_params)
        for each in nested:
            exempt |= {p for exposure in each._unit.exposures for p in exposure.parameters} | each._ignored_params
        return managed_parameters(module, exempt)

    @staticmethod
    def _reopen_ties(module: nn.Module) -> list[FullyShardedDataParallel]:
        """Undo the sharding of nested units that hold a parameter which others below `module` use too. Collective.

        Returns:
            Those units, inner ones first; each has to be made again.
        """
        nested = [each for each in module.modules() if isinstance(each, FullyShardedDataParallel)]
        users: dict[Identity, set[tuple[int, str]]] = {}
        for each in nested:
            for member in each._unit.members:
                users.setdefault(member.identity, set()).update((id(p.module), p.attribute) for p in member.places)
        for _, inner in walk(module, is_incompatible):
            for name, parameter in inner._parameters.items():
                if parameter is not None and identity(parameter) in users:
                    users[identity(parameter)].add((id(inner), name))
        tied = _split(nested, users)
        reopened = [each for each in reversed(nested) if any(m.identity in tied for m in each._unit.members)]
        first: dict[Identity, nn.Parameter] = {}
        for each in reopened:
            members = each._unit.members
            each._unit.restore()
            for member in members:
                _unify(member, first)
        if tied:
            _unify_registered(module, first)
            warnings.warn(
                f"parameters used by {[type(each.module).__name__ for each in reopened]} are also used outside them; "
                f"the unit of {type(module).__name__} takes them over",
                stacklevel=3,
            )
        return reopened

    def _remake(self) -> None:
        module = self._fsdp_wrapped_module
        self._unit = self._make_unit(module, self._managed(module))

    def _refuse_mixed(self, module: nn.Module, name: str) -> None:
        """Refuse, or warn of, a unit that a policy makes of frozen and trainable parameters."""
        sides: dict[bool, list[str]] = {True: [], False: []}
        for each in self._managed(module):
            sides[each.parameter.requires_grad].append(f"{name}.{each.fqn}" if name else each.fqn)
        if not (sides[True] and sides[False]):
            return
        what = f"{name} has both parameters with requires_grad=True and False"
        if not self._use_orig_params:
            raise WrapError(
                f"{what}. We do not support wrapping such modules with use_orig_params=False",
                found=f"trainable {sides[True]}, frozen {sides[False]}",
                fix="Use use_orig_params=True, or wrap the frozen ones apart.",
            )
        warnings.warn(f"{what}; trainable {sides[True]}, frozen {sides[False]}", stacklevel=2)

    def _make_unit(self, module: nn.Module, managed: list[Managed]) -> Unit:
        strategy = self.sharding_strategy
        config = UnitConfig(
            frees_after_forward=strategy.frees_after_forward,
            keeps_full=strategy is ShardingStrategy.NO_SHARD,
            original_params=self._use_orig_params,
            backward_prefetch=self.backward_prefetch,
            forward_prefetch=self.forward_prefetch,
            limit_gathers=self.limit_all_gathers,
        )
        name = Name(type(module).__name__)
        sets: dict[tuple[torch.dtype, bool], list[Managed]] = {}
        for each in managed:
            sets.setdefault((each.parameter.dtype, each.parameter.requires_grad), []).append(each)
        exposures = [self._expose(module, name, members, i) for i, members in enumerate(sets.values())]
        return Unit(name, module, exposures, config)

    def _expose(self, module: nn.Module, name: Name, members: list[Managed], index: int) -> Exposure:
        keeps = self.sharding_strategy is ShardingStrategy.NO_SHARD
        bucket = Bucket(members, self._group, name, aligned=self._use_orig_params, keeps_full=keeps)
        if self._use_orig_params:
            return OriginalExposure(bucket, name)
        return FlatExposure(bucket, name, module, f"{FLAT_PARAM}_{index}" if index else FLAT_PARAM)

    # ---------------------------------------------------------------------------------------------- running

    def _ensure_root(self) -> Context:
        """Make this instance the root, unless it has one."""
        if self._context is None:
            named = [(n, m) for n, m in self.named_modules() if isinstance(m, FullyShardedDataParallel)]
            roots = [clean(name) for name, each in named if each._context is not None]
            if roots:
                raise StateError(
                    "a unit below this one ran before it and took itself for the root",
                    where=roots[0],
                    fix="Run the outermost FullyShardedDataParallel first.",
                )
            _agree(named)
            units = [(clean(name) or type(self.module).__name__, each._unit) for name, each in named]
            context = Context(self._unit, units)
            for _, each in named:
                each._join(context)
        assert self._context is not None
        return self._context

    def _join(self, context: Context) -> None:
        self._context = context

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module with its parameters gathered."""
        context, unit = self._ensure_root(), self._unit
        is_root = context.root is unit
        if is_root:
            context.forward_starts()
        try:
            args, kwargs = unit.before_forward(args, kwargs)
            with unit.computing():
                output = self._fsdp_wrapped_module(*args, **kwargs)
            return unit.after_forward(output)
        except BaseException:
            unit.forward_failed()
            if is_root:
                context.forward_failed()
            raise

    @contextmanager
    def no_sync(self) -> Generator[None, None, None]:
        """Inside, gradients are held back unsharded instead of being reduced.

        Raises:
            StateError: This instance is not the root, or computes at the moment.
        """
        context = self._ensure_root()
        if context.root is not self._unit:
            raise StateError(
                "`no_sync()` on inner FSDP instances is not supported. Please call `no_sync()` on root FSDP module",
                where=self._unit.name,
            )
        before = [unit.sync_gradients for unit in context.units]
        for unit in context.units:
            unit.synchronise(False)
        try:
            yield
        finally:
            for unit, on in zip(context.units, before, strict=True):
                unit.synchronise(on)

    # --------------------------------------------------------------------------------------------- the module

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield names and parameters as `torch.nn.Module` does, after a failed backward those of before it."""
        if self._context is not None:
            self._context.recover()
        yield from super().named_parameters(prefix, recurse, remove_duplicate)

    @property
    def module(self) -> nn.Module:
        """The wrapped module, looked for through a checkpointing wrapper."""
        inner = self._fsdp_wrapped_module
        found = inner._modules.get("_checkpoint_wrapped_module")
        return found if found is not None else inner

    @property
    def _has_params(self) -> bool:
        return bool(self._unit.exposures)

    @property
    def _flat_param(self) -> nn.Parameter | None:
        found = self._unit.exposures[0] if self._unit.exposures else None
        return found.flat if isinstance(found, FlatExposure) else None

    @property
    def compute_device(self) -> torch.device:
        """Where the module computes."""
        return next((bucket.shard.device for bucket in self._unit.buckets), torch.device("cpu"))

    def __getattr__(self, name: str) -> Any:
        """Ask the wrapped module for what the wrapper does not have."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == WRAPPED:
                raise
            return getattr(super().__getattr__(WRAPPED), name)

    def __getitem__(self, key: Any) -> Any:
        """Ask the wrapped module."""
        return self._fsdp_wrapped_module[key]  # type: ignore[index]

    def check_is_root(self) -> bool:
        """Tell whether this is the outermost instance; the tree is fixed by the question."""
        return self._ensure_root().root is self._unit

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """Return the instances in a module.

        Args:
            module: Where to look.
            root_only: Leave out those that know a root above them.
        """
        found = [each for each in module.modules() if isinstance(each, FullyShardedDataParallel)]
        return [each for each in found if each.check_is_root()] if root_only else found

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> FullyShardedDataParallel:
        self._unit.free()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for exposure in self._unit.exposures:
            exposure.adopt()
            exposure.show_sharded()
        return self

    def apply(self, fn: Callable[[nn.Module], None]) -> FullyShardedDataParallel:
        """Apply a function to every module below, with this unit's parameters gathered; changes are kept. Collective.

        Raises:
            StateError: The unit computes at the moment.
        """
        self._assert_idle()
        fresh = self._context is None
        self._ensure_root()
        self._unit.fill()
        try:
            super().apply(fn)
            for bucket in self._unit.buckets:
                bucket.write_back()
        finally:
            self._unit.free()
            if fresh:
                self._leave_root()
        return self

    def _leave_root(self) -> None:
        for each in FullyShardedDataParallel.fsdp_modules(self):
            each._context = None
            each._unit.attach(None)

    def _assert_idle(self) -> None:
        if self._unit.phase is not Phase.IDLE:
            raise StateError("the unit computes at the moment", where=self._unit.name, found=self._unit.phase.name)

    # -------------------------------------------------------------------------------------------- state dicts

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state as the settings of `state_dict_type` say, from the provider of state dicts."""
        return protocol.call("module_state_dict", self, *args, **kwargs)

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings | None:
        """Return the settings of the instances in a module; None where there is none.

        Raises:
            SettingsDifferError: They have different ones.
        """
        found = [each._state_dict_settings for each in FullyShardedDataParallel.fsdp_modules(module)]
        if any(each != found[0] for each in found):
            raise SettingsDifferError("All FSDP modules must have the same state dict settings", found=found)
        return found[0] if found else None

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings | None:
        """Tell the instances in a module what their state dicts hold.

        Args:
            module: Where the instances are.
            state_dict_type: Full, local or sharded.
            state_dict_config: Settings for the model; the defaults of the type where None.
            optim_state_dict_config: And for the optimizer.

        Returns:
            The settings before.

        Raises:
            StateError: A configuration is of another type.
            SettingsDifferError: The instances had different settings.
        """
        warnings.warn(
            "FSDP.state_dict_type() and FSDP.set_state_dict_type() are being deprecated: state dicts take their kind "
            "as an argument",
            FutureWarning,
            stacklevel=2,
        )
        made = _settings(state_dict_type, state_dict_config, optim_state_dict_config)
        before = FullyShardedDataParallel.get_state_dict_type(module)
        for each in FullyShardedDataParallel.fsdp_modules(module):
            each._set_settings(made)
        return before

    def _set_settings(self, settings: StateDictSettings) -> None:
        self._state_dict_settings = settings

    @staticmethod
    @contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> Iterator[None]:
        """Inside, the instances have these settings, as by `set_state_dict_type`; on any exit the ones before."""
        before = FullyShardedDataParallel.set_state_dict_type(
            module, state_dict_type, state_dict_config, optim_state_dict_config
        )
        try:
            yield
        finally:
            for each in FullyShardedDataParallel.fsdp_modules(module):
                if before is not None:
                    each._set_settings(before)

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_input: Any = None,
        rank0_only: bool = True,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """Return the whole optimizer state, by the provider of state dicts."""
        return protocol.call("full_optim_state_dict", model, optim, optim_input, rank0_only, group)  # type: ignore[no-any-return]

    @staticmethod
    def sharded_optim_state_dict(
        model: nn.Module, optim: torch.optim.Optimizer, group: dist.ProcessGroup | None = None
    ) -> dict[str, Any]:
        """Return this rank's part of the optimizer state, by the provider of state dicts."""
        return protocol.call("sharded_optim_state_dict", model, optim, group)  # type: ignore[no-any-return]

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any],
        model: nn.Module,
        optim_input: Any = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """Return this rank's part of a whole optimizer state, by the provider of state dicts."""
        return protocol.call("shard_full_optim_state_dict", full_optim_state_dict, model, optim_input, optim)  # type: ignore[no-any-return]

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: dict[str, Any], model: nn.Module, optim: torch.optim.Optimizer
    ) -> dict[str, Any]:
        """Return a sharded optimizer state for flat parameters, by the provider of state dicts."""
        return protocol.call("flatten_sharded_optim_state_dict", sharded_optim_state_dict, model, optim)  # type: ignore[no-any-return]

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any] | None,
        model: nn.Module,
        optim_input: Any = None,
        optim: torch.optim.Optimizer | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """Return this rank's part of rank 0's optimizer state, by the provider of state dicts."""
        return protocol.call("scatter_full_optim_state_dict", full_optim_state_dict, model, optim_input, optim, group)  # type: ignore[no-any-return]

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: dict[str, Any],
        optim_state_key_type: OptimStateKeyType,
        model: nn.Module,
        optim_input: Any = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """Return an optimizer state with other keys, by the provider of state dicts."""
        return protocol.call(  # type: ignore[no-any-return]
            "rekey_optim_state_dict", optim_state_dict, optim_state_key_type, model, optim_input, optim
        )

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """Return the optimizer state as the settings say, by the provider of state dicts."""
        return protocol.call("optim_state_dict", model, optim, optim_state_dict, group)  # type: ignore[no-any-return]

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any],
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """Return what `optim.load_state_dict` takes, by the provider of state dicts."""
        return protocol.call(  # type: ignore[no-any-return]
            "optim_state_dict_to_load", model, optim, optim_state_dict, is_named_optimizer, load_directly, group
        )


_CONFIGS: Mapping[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}


def _settings(
    kind: StateDictType, model: StateDictConfig | None, optim: OptimStateDictConfig | None
) -> StateDictSettings:
    model_class, optim_class = _CONFIGS[kind]
    model, optim = model_class() if model is None else model, optim_class() if optim is None else optim
    for given, expected in ((model, model_class), (optim, optim_class)):
        if type(given) is not expected:
            raise StateError(
                f"Expected state_dict_config of type {expected} but got {type(given)}", expected=expected.__name__
            )
    return StateDictSettings(kind, model, optim)


def _refuse_load(*_: Any) -> None:
    protocol.call("load_module_state_dict")


def _agree(named: Iterable[tuple[str, FullyShardedDataParallel]]) -> None:
    """Refuse a tree whose units were told different things where one iteration needs one answer."""
    for setting in ("use_orig_params", "limit_all_gathers"):
        told: dict[bool, list[str]] = {}
        for name, each in named:
            value = each._use_orig_params if setting == "use_orig_params" else each.limit_all_gathers
            told.setdefault(value, []).append(clean(name) or "the root")
        if len(told) > 1:
            raise ArgumentError(
                f"Expects a homogeneous value for {setting} among all units of one tree",
                found="; ".join(f"{value} in {', '.join(names)}" for value, names in told.items()),
                fix="Give all of them the same.",
            )


def _split(nested: list[FullyShardedDataParallel], users: Mapping[Identity, set[tuple[int, str]]]) -> set[Identity]:
    """Return the parameters of which some unit has not all places."""
    found = set()
    for each in nested:
        for member in each._unit.members:
            if {(id(p.module), p.attribute) for p in member.places} != users[member.identity]:
                found.add(member.identity)
    return found


def _unify(member: Managed, first: dict[Identity, nn.Parameter]) -> None:
    """Let all places of one identity have one object again."""
    kept = first.setdefault(member.identity, member.parameter)
    for place in member.places:
        setattr(place.module, place.attribute, kept)


def _unify_registered(module: nn.Module, first: Mapping[Identity, nn.Parameter]) -> None:
    for _, each in walk(module, is_incompatible):
        for name, parameter in list(each._parameters.items()):
            if parameter is not None and identity(parameter) in first:
                setattr(each, name, first[identity(parameter)])


class _Ignored:
    """What is left alone: whole modules, and parameters."""

    def __init__(self, modules: set[nn.Module], parameters: set[nn.Parameter]) -> None:
        self.modules = modules
        self.parameters = parameters

    @classmethod
    def of(
        cls,
        root: nn.Module,
        ignored_modules: Iterable[nn.Module] | None,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None,
    ) -> _Ignored:
        if ignored_modules is not None and ignored_states is not None:
            raise ArgumentError("Cannot pass both ignored_modules and ignored_states at the same time")
        if ignored_states is not None:
            states: list[Any] = list(ignored_states)
            if states and all(isinstance(each, nn.Parameter) for each in states):
                return cls(set(), set(states))
            if not all(isinstance(each, nn.Module) for each in states):
                kinds = sorted({type(each).__name__ for each in states})
                raise ArgumentError(
                    "ignored_states expects all nn.Parameter or all nn.Module list elements", found=kinds
                )
            ignored_modules = states
        return cls._of_modules(root, ignored_modules)

    @classmethod
    def _of_modules(cls, root: nn.Module, given: Iterable[nn.Module] | None) -> _Ignored:
        try:
            modules = list(given or ())
        except TypeError as error:
            raise ArgumentTypeError(
                f"ignored_modules should be an iterable of modules but got {type(given)}"
            ) from error
        for each in modules:
            if not isinstance(each, nn.Module):
                raise ArgumentTypeError(f"ignored_modules should be an iterable of modules but got {type(each)} in it")
            if isinstance(each, FullyShardedDataParallel):
                raise ArgumentError("`ignored_modules` should not include FSDP modules")
            if each is root:
                warnings.warn(
                    "Trying to ignore the top-level module passed into the FSDP constructor itself", stacklevel=3
                )
        below = {inner for each in modules for inner in each.modules()}
        return cls(below, parameters_below(modules))


def _warn_of_containers(module: nn.Module) -> None:
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        warnings.warn(
            f"FSDP will not all-gather parameters for containers that do not implement forward: {type(module)}",
            stacklevel=3,
        )


def _groups(strategy: ShardingStrategy, given: Any, mesh: DeviceMesh | None, policy: Policy | None) -> ShardGroup:
    if strategy.is_hybrid:
        return _hybrid_groups(given, mesh, policy)
    if mesh is not None:
        if mesh.ndim != 1:
            raise ArgumentError("a mesh of one dimension is needed", found=f"{mesh.ndim} dimensions")
        given = mesh.get_group()
    group = given if given is not None else dist.group.WORLD
    if group is None:
        raise ArgumentError(
            "Default process group has not been initialized", fix="Call torch.distributed.init_process_group first."
        )
    if strategy is ShardingStrategy.NO_SHARD:
        if dist.get_world_size(group) > 1:
            warnings.warn(
                "The `NO_SHARD` sharding strategy is deprecated. If having issues, please use "
                "`DistributedDataParallel` instead",
                FutureWarning,
                stacklevel=4,
            )
        return ShardGroup(None, group)
    return ShardGroup(group)


def _hybrid_groups(given: Any, mesh: DeviceMesh | None, policy: Policy | None) -> ShardGroup:
    if mesh is not None:
        if mesh.ndim != 2:
            raise ArgumentError("hybrid strategies need a mesh of two dimensions", found=f"{mesh.ndim} dimensions")
        return ShardGroup(mesh.get_group(1), mesh.get_group(0))
    if given is None and policy is None:
        raise ArgumentError(
            "Manual wrapping with a hybrid strategy requires explicit specification of process group or device_mesh"
        )
    if given is None:
        raise precision.NotYetError(
            "groups of one node are not made yet", fix="Give a device_mesh of two dimensions, (replicate, shard)."
        )
    if not (isinstance(given, tuple) and len(given) == 2):
        raise ArgumentError("Expected process_group to be a tuple of two process groups", found=type(given).__name__)
    return ShardGroup(given[0], given[1])


def _move(module: nn.Module, device_id: int | torch.device | None, ignored: set[nn.Parameter]) -> None:
    devices = {p.device for p in module.parameters() if p not in ignored}
    if device_id is None:
        if len(devices) > 1:
            raise StateError(
                "FSDP only supports single device modules", found=f"parameters on {sorted(map(str, devices))}"
            )
        return
    target = torch.device(device_id) if not isinstance(device_id, int) else torch.device("cuda", device_id)
    elsewhere = {d for d in devices if d.type != "cpu" and d != target}
    if elsewhere:
        raise ArgumentError(
            "the parameters are on another device than `device_id`", found=sorted(map(str, elsewhere)), expected=target
        )
    if any(d != target for d in devices):
        module.to(target)


def _broadcast(module: nn.Module, group: ShardGroup, ignored: set[nn.Parameter]) -> None:
    nested = {
        p
        for each in FullyShardedDataParallel.fsdp_modules(module)
        for exposure in each._unit.exposures
        for p in exposure.parameters
    }
    for parameter in module.parameters():
        if parameter not in nested and parameter not in ignored:
            group.broadcast(parameter.detach())
    for buffer in module.buffers():
        group.broadcast(buffer.detach())
