"""Leave inference mode in functions that get or load a state."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import nn

from shardckpt.core.modules.autograd_hooks import leave_inference_mode

Call = TypeVar("Call", bound=Callable[..., Any])


def outside_inference_mode(function: Call) -> Call:
    """Make a function leave inference mode first, unless its model was made there."""
    # Tensors that are made in inference mode cannot be written after it, so an optimizer could not use such a state.
    # Views of DTensors raise there. If the model itself was made in inference mode, its parameters can be written only
    # there.

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        model: nn.Module = args[0] if args else kwargs["model"]
        if any(parameter.is_inference() for parameter in model.parameters()):
            return function(*args, **kwargs)
        with leave_inference_mode():
            return function(*args, **kwargs)

    return cast("Call", call)
