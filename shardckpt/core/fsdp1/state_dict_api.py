"""The wrapper's state dict methods, which `shardckpt.state` implements."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardckpt.core.api import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from shardckpt.core.config import OptimStateKeyType
from shardckpt.core.errors import SettingsDifferError, StateError, StateProviderMissing

# Provides state dicts; imported late, because it is in a higher layer.
STATE_DICT_API = "shardckpt.state.interop.fsdp_api"


# Registers wrappers with torch's own functions for state dicts.
TORCH_DCP_API = "shardckpt.state.interop.torch_dcp_api"


def register_with_torch_dcp() -> None:
    """Make `torch.distributed.checkpoint` accept the wrapper's state dicts."""
    if _has_module(TORCH_DCP_API):
        import_module(TORCH_DCP_API).register_with_torch_dcp()


def _has_module(module: str) -> bool:
    return find_spec(module.rpartition(".")[0]) is not None and find_spec(module) is not None


def _call_state_dict_api(name: str, *args: Any, **kwargs: Any) -> Any:
    """Call a function from the state dict module, or raise StateProviderMissing."""
    if not _has_module(STATE_DICT_API):
        raise StateProviderMissing(
            f"{name} needs {STATE_DICT_API}, which this version does not have yet",
            fix="Train with this version; save with a later one.",
        )
    return getattr(import_module(STATE_DICT_API), name)(*args, **kwargs)


class StateStatics(nn.Module):
    """The wrapper's state dict methods."""

    def __init__(self) -> None:
        super().__init__()
        self._state_dict_settings = StateDictSettings(
            StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig()
        )
        self.register_load_state_dict_pre_hook(_before_load)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(_after_load)  # type: ignore[no-untyped-call]

    @property
    def state_dict_settings(self) -> StateDictSettings:
        """Kind and options for this instance's state dicts."""
        return self._state_dict_settings

    @property
    def _state_dict_type(self) -> StateDictType:
        return self._state_dict_settings.state_dict_type

    @property
    def _state_dict_config(self) -> StateDictConfig:
        return self._state_dict_settings.state_dict_config

    @property
    def _optim_state_dict_config(self) -> OptimStateDictConfig:
        return self._state_dict_settings.optim_state_dict_config

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the kind of state dict that `state_dict_type` selected."""
        return _call_state_dict_api("module_state_dict", self, *args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load the kind of state dict that `state_dict_type` selected."""
        try:
            return super().load_state_dict(*args, **kwargs)
        except BaseException:
            _call_state_dict_api("abandon_load", self)
            raise

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings | None:
        """Return the settings of a module's instances; None if it has no instances.

        Raises:
            SettingsDifferError: The instances have different settings.
        """
        settings = [instance._state_dict_settings for instance in _instances(module)]
        if any(instance != settings[0] for instance in settings):
            raise SettingsDifferError("All FSDP modules must have the same state dict settings", found=settings)
        return settings[0] if settings else None

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings | None:
        """Set the state dict kind for a module's instances.

        Args:
            module: An instance, or a module that contains instances.
            state_dict_type: Full, local or sharded.
            state_dict_config: Settings for the model; None for the type's defaults.
            optim_state_dict_config: Settings for the optimizer; None for the type's defaults.

        Returns:
            The previous settings.

        Raises:
            StateError: A configuration belongs to another state dict type.
            SettingsDifferError: The instances had different settings.
        """
        warnings.warn(
            "FSDP.state_dict_type() and FSDP.set_state_dict_type() are being deprecated: state dicts take their kind "
            "as an argument",
            FutureWarning,
            stacklevel=2,
        )
        settings = _settings(state_dict_type, state_dict_config, optim_state_dict_config)
        before = StateStatics.get_state_dict_type(module)
        for instance in _instances(module):
            instance._set_settings(settings)
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
        """Set the state dict kind inside the context; restore the old one on exit.

        For the arguments see `set_state_dict_type`.
        """
        before = StateStatics.set_state_dict_type(module, state_dict_type, state_dict_config, optim_state_dict_config)
        try:
            yield
        finally:
            for instance in _instances(module):
                if before is not None:
                    instance._set_settings(before)

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_input: Any = None,
        rank0_only: bool = True,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """Return the full optimizer state. Collective."""
        return _call_state_dict_api("full_optim_state_dict", model, optim, optim_input, rank0_only, group)  # type: ignore[no-any-return]

    @staticmethod
    def sharded_optim_state_dict(
        model: nn.Module, optim: torch.optim.Optimizer, group: dist.ProcessGroup | None = None
    ) -> dict[str, Any]:
        """Return this rank's shard of the optimizer state. Collective."""
        return _call_state_dict_api("sharded_optim_state_dict", model, optim, group)  # type: ignore[no-any-return]

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any],
        model: nn.Module,
        optim_input: Any = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """Return this rank's shard of a full optimizer state."""
        return _call_state_dict_api("shard_full_optim_state_dict", full_optim_state_dict, model, optim_input, optim)  # type: ignore[no-any-return]

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: dict[str, Any], model: nn.Module, optim: torch.optim.Optimizer
    ) -> dict[str, Any]:
        """Return a sharded optimizer state as flat parameters' state."""
        return _call_state_dict_api("flatten_sharded_optim_state_dict", sharded_optim_state_dict, model, optim)  # type: ignore[no-any-return]

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any] | None,
        model: nn.Module,
        optim_input: Any = None,
        optim: torch.optim.Optimizer | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """Return this rank's shard of rank 0's optimizer state. Collective."""
        return _call_state_dict_api(  # type: ignore[no-any-return]
            "scatter_full_optim_state_dict", full_optim_state_dict, model, optim_input, optim, group
        )

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: dict[str, Any],
        optim_state_key_type: OptimStateKeyType,
        model: nn.Module,
        optim_input: Any = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """Return an optimizer state whose keys are parameter names or parameter ids."""
        return _call_state_dict_api(  # type: ignore[no-any-return]
            "rekey_optim_state_dict", optim_state_dict, optim_state_key_type, model, optim_input, optim
        )

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """Return the kind of optimizer state that `state_dict_type` selected. Collective."""
        return _call_state_dict_api("optim_state_dict", model, optim, optim_state_dict, group)  # type: ignore[no-any-return]

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any] | None,
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """Return the state that `optim.load_state_dict` accepts on this rank. Collective."""
        return _call_state_dict_api(  # type: ignore[no-any-return]
            "optim_state_dict_to_load", model, optim, optim_state_dict, is_named_optimizer, load_directly, group
        )


def _instances(module: nn.Module) -> list[StateStatics]:
    return [submodule for submodule in module.modules() if isinstance(submodule, StateStatics)]


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


def _before_load(module: StateStatics, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    _call_state_dict_api("before_load", module, state_dict, prefix)


def _after_load(module: StateStatics, incompatible_keys: Any) -> None:
    _call_state_dict_api("after_load", module, incompatible_keys)
