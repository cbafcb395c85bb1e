"""The small interface that state dicts are called through; who provides it is found at the first state call."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from shardckpt.errors import ShardckptError

PROVIDER = "shardckpt.state.provider"
"""The module that provides state dicts: this arrow of the house is bound late."""


class StateProviderMissing(ShardckptError, NotImplementedError):  # noqa: N818  (a name that users catch)
    """A state dict was asked for, and the part of the package that makes them is not there."""


INTRODUCER = "shardckpt.state.torch_functions"
"""The module that lets torch's own functions for state dicts know of wrappers."""


def announce() -> None:
    """Let those who may be asked for the state dict of a wrapper know that there are some."""
    if _is_there(INTRODUCER):
        import_module(INTRODUCER).introduce()


def _is_there(module: str) -> bool:
    return find_spec(module.rpartition(".")[0]) is not None and find_spec(module) is not None


def call(name: str, *args: Any, **kwargs: Any) -> Any:
    """Call a function of the provider.

    Args:
        name: The provider's function.
        args: Passed on.
        kwargs: Passed on.

    Raises:
        StateProviderMissing: There is no provider in this installation.
    """
    if not _is_there(PROVIDER):
        raise StateProviderMissing(
            f"{name} needs {PROVIDER}, which this version does not have yet",
            fix="Train with this version; save with a later one.",
        )
    return getattr(import_module(PROVIDER), name)(*args, **kwargs)
