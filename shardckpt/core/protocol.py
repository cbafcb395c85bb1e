"""The small interface that state dicts are called through; who provides it is found at the first state call."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from shardckpt.errors import ShardckptError

PROVIDER = "shardckpt.state.provider"
"""The module that provides state dicts: the one arrow of the house that is bound late."""


class StateProviderMissing(ShardckptError, NotImplementedError):  # noqa: N818  (a name that users catch)
    """A state dict was asked for, and the part of the package that makes them is not there."""


def call(name: str, *args: Any, **kwargs: Any) -> Any:
    """Call a function of the provider.

    Args:
        name: The provider's function.
        args: Passed on.
        kwargs: Passed on.

    Raises:
        StateProviderMissing: There is no provider in this installation.
    """
    if find_spec(PROVIDER.rpartition(".")[0]) is None or find_spec(PROVIDER) is None:
        raise StateProviderMissing(
            f"{name} needs {PROVIDER}, which this version does not have yet",
            fix="Train with this version; save with a later one.",
        )
    return getattr(import_module(PROVIDER), name)(*args, **kwargs)
