"""Errors of the engine's front ends, derived from the builtins that torch raises."""

from __future__ import annotations

import torch

from shardckpt.errors import NoMemoryError, ShardckptError


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
