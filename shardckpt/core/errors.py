"""Errors of the engine, all public, derived from the builtins that torch raises.

ShardckptError
├── ArgumentError (ValueError)                an argument is invalid, or two contradict each other
│   └── MeshDeviceError                       the mesh of a DTensor is on another device type
├── ArgumentTypeError (TypeError, ValueError), SettingTypeError (TypeError)
├── WrapError (ValueError)                    modules cannot be wrapped in this way
├── StateError (RuntimeError)                 not possible in the current state of the module
├── BusyError (ValueError, AssertionError)    not possible during a forward, a backward or another context
├── MisuseError, SettingsDifferError, PlacementError, ExtensionError, HookError (AssertionError)
├── NotGatheredError, SummonShapeError, BackendError (RuntimeError)
├── ChangedError (RuntimeError, AssertionError)  a full parameter was changed while its old value was needed
├── UnsupportedArgumentError, PlacementMissingError, NestedContextError, TransformError, DoubleBackwardError,
│   StateProviderMissing (NotImplementedError)
└── NoMemoryError
    └── DeviceMemoryError (torch.OutOfMemoryError)
"""

from __future__ import annotations

import torch

from shardckpt.errors import NoMemoryError, ShardckptError

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "BackendError",
    "BusyError",
    "ChangedError",
    "DeviceMemoryError",
    "DoubleBackwardError",
    "ExtensionError",
    "HookError",
    "MeshDeviceError",
    "MisuseError",
    "NestedContextError",
    "NotGatheredError",
    "PlacementError",
    "PlacementMissingError",
    "SettingTypeError",
    "SettingsDifferError",
    "StateError",
    "StateProviderMissing",
    "SummonShapeError",
    "TransformError",
    "UnsupportedArgumentError",
    "WrapError",
]


class ArgumentError(ShardckptError, ValueError):
    """An argument has an invalid value, or two arguments contradict each other."""


class ArgumentTypeError(ShardckptError, TypeError, ValueError):
    """An argument has the wrong type."""


class StateError(ShardckptError, RuntimeError):
    """A call is not possible in the current state of the module."""


class SettingsDifferError(ShardckptError, AssertionError):
    """Instances below one root have different settings that must be equal."""


class DeviceMemoryError(NoMemoryError, torch.OutOfMemoryError):
    """This rank has too little memory for a collective."""


class BusyError(ShardckptError, ValueError, AssertionError):
    """A call is not possible during a forward, a backward or another context."""


class TransformError(ShardckptError, NotImplementedError):
    """A `torch.func` transform differentiates around a unit, which is not supported."""


class DoubleBackwardError(ShardckptError, NotImplementedError):
    """Gradients of gradients through resharded parameters are not supported."""


class ChangedError(ShardckptError, RuntimeError, AssertionError):
    """A full parameter was changed while its old value was still needed."""


class NotGatheredError(ShardckptError, RuntimeError):
    """A full parameter was used while its unit is sharded."""


class WrapError(ShardckptError, ValueError):
    """Modules cannot be wrapped in this way."""


class NestedContextError(ShardckptError, NotImplementedError):
    """`enable_wrap` inside `enable_wrap`."""


class StateProviderMissing(ShardckptError, NotImplementedError):  # noqa: N818  (a name that users catch)
    """The package that builds state dicts is not installed."""


class PlacementError(ShardckptError, AssertionError):
    """A parameter cannot be placed on the mesh or along the dimension."""


class PlacementMissingError(ShardckptError, NotImplementedError):
    """A combination of meshes is not supported."""


class ExtensionError(ShardckptError, AssertionError):
    """A tensor subclass's all-gather extensions cannot be used."""


class MisuseError(ShardckptError, AssertionError):
    """A call contradicts an earlier call, such as a second `fully_shard`."""


class UnsupportedArgumentError(ShardckptError, NotImplementedError):
    """A combination of arguments is not supported."""


class SettingTypeError(ShardckptError, TypeError):
    """A setting has the wrong type."""


class BackendError(ShardckptError, RuntimeError):
    """The process group's backend does not support a setting."""


class HookError(ShardckptError, AssertionError):
    """A communication hook cannot be registered for a unit, or not at this time."""


class SummonShapeError(ShardckptError, RuntimeError):
    """A full parameter was replaced by a parameter with another shape."""


class MeshDeviceError(ArgumentError):
    """The mesh of a DTensor has another device type than the mesh to shard on."""
