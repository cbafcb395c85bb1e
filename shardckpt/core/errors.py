"""Errors of the engine's front ends; each is also the builtin that torch raises there."""

from __future__ import annotations

import torch

from shardckpt.errors import NoMemoryError, ShardckptError


class ArgumentError(ShardckptError, ValueError):
    """An argument of the constructor, or two that do not go together."""


class ArgumentTypeError(ShardckptError, TypeError, ValueError):
    """An argument of another type than its own."""


class StateError(ShardckptError, RuntimeError):
    """A call at a time, or on a module, where it cannot be."""


class SettingsDifferError(ShardckptError, AssertionError):
    """Instances in one tree have different settings where they have to agree."""


class DeviceMemoryError(NoMemoryError, torch.OutOfMemoryError):
    """This rank has too little memory for a collective."""


class BusyError(ShardckptError, ValueError, AssertionError):
    """A call in the middle of something that it does not go together with: a forward, a backward, another context."""
