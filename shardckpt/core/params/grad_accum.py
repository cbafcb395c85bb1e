"""Gradients of exposed parameters, whose dtype or shape may differ from theirs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardckpt.torch_features import assign_gradient_of_another_type


class EngineHook:
    """Base class for the engine's own hooks on exposed parameters: called for autograd's gradients only."""


def add_gradient_to(parameter: nn.Parameter, grad: torch.Tensor) -> None:
    """Set or accumulate a gradient with any dtype, and call its hooks."""
    if parameter.grad is None:
        assign_gradient(parameter, grad)
    else:
        _add(parameter.grad, grad)
    for hook in get_gradient_hooks(parameter):
        if not isinstance(hook, EngineHook):
            hook(parameter)
    for optimizer in getattr(parameter, "_in_backward_optimizers", ()):  # from `_apply_optimizer_in_backward`
        optimizer.step()
        parameter.grad = None


def has_gradient_hooks(parameter: nn.Parameter) -> bool:
    """Return True if `add_gradient_to` calls hooks, which may run collectives."""
    is_users = any(not isinstance(hook, EngineHook) for hook in get_gradient_hooks(parameter))
    return is_users or bool(getattr(parameter, "_in_backward_optimizers", ()))


def get_gradient_hooks(parameter: nn.Parameter) -> tuple[Callable[[nn.Parameter], None], ...]:
    """Return the hooks that run after a parameter's gradient was accumulated."""
    return tuple((getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values())


def is_read_at_once(parameter: nn.Parameter) -> bool:
    """Return True if `add_gradient_to` reads the gradient, or calls hooks that may."""
    return parameter.grad is not None or has_gradient_hooks(parameter)


def _add(held: torch.Tensor, grad: torch.Tensor) -> None:
    """Add in place; add the local tensors if DTensors have equal placements."""
    if isinstance(held, DTensor) and isinstance(grad, DTensor) and _is_placed_like(held, grad):
        # torch does the same, since it takes far less time.
        with torch.no_grad():
            held.to_local().add_(grad.to_local())
    else:
        held.add_(grad)


def _is_placed_like(one: DTensor, other: DTensor) -> bool:
    meshes = one.device_mesh == other.device_mesh
    return meshes and one.placements == other.placements and one.shape == other.shape


def restore_gradient(parameter: nn.Parameter, grad: torch.Tensor) -> None:
    """Set a gradient whose shape differs from the parameter's current shape."""
    data = parameter.data
    parameter.data = grad
    assign_gradient(parameter, grad)
    parameter.data = data


def assign_gradient(parameter: nn.Parameter, grad: torch.Tensor | None) -> None:
    """Set a gradient with any dtype."""
    if grad is not None and grad.dtype != parameter.dtype:
        assign_gradient_of_another_type(parameter, grad)
    else:
        parameter.grad = grad


def copy_gradient(parameter: nn.Parameter, grad: torch.Tensor | None) -> None:
    """Copy values into the existing gradient tensor, or set a new one."""
    if grad is not None and parameter.grad is not None:
        parameter.grad.copy_(grad)
    else:
        assign_gradient(parameter, grad)
