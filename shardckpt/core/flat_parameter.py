"""How a flat parameter is told from others: `isinstance(parameter, FlatParameter)`, as with torch's."""

from __future__ import annotations

from typing import Any

from torch import nn

_ParameterMeta: Any = type(nn.Parameter)  # which has no public name


class _MarkedMeta(_ParameterMeta):  # type: ignore[misc]
    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, nn.Parameter) and getattr(instance, "_is_flat_param", False) is True


class FlatParameter(nn.Parameter, metaclass=_MarkedMeta):
    """The 1-D parameter that a sharded bucket is registered as; never made by users.

    It is an ordinary `torch.nn.Parameter` with a mark: a subclass would cost a detour in every operation on it.
    """


def mark(parameter: nn.Parameter) -> nn.Parameter:
    """Return the parameter as one that is an instance of `FlatParameter`."""
    parameter._is_flat_param = True  # type: ignore[attr-defined]
    return parameter
