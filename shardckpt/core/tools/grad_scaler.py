"""Loss scaling for sharded models: all ranks step, or all skip."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.amp import GradScaler
from torch.distributed.tensor import DTensor

from shardckpt.core.errors import ArgumentTypeError
from shardckpt.core.modules.pytree import mapped, tensors


class ShardedGradScaler(GradScaler):
    """A `torch.amp.GradScaler` for sharded gradients: ranks agree on overflows.

    Gradients may be plain tensors or DTensors, also in half precision, on an accelerator or offloaded to the CPU. A
    rank without gradients participates too.

    Args:
        device: Device type for computation; scaling is disabled for "cuda" if CUDA is not available.
        init_scale: Initial scale.
        backoff_factor: Multiplies the scale after an overflow.
        growth_factor: Multiplies the scale after `growth_interval` consecutive steps without an overflow.
        growth_interval: Number of these steps.
        enabled: Whether to scale; if not, values are returned unchanged.
        process_group: Ranks that agree on overflows; None for all ranks.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: dist.ProcessGroup | None = dist.group.WORLD,
    ) -> None:
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self.process_group = process_group

    def scale(self, outputs: Any) -> Any:
        """Multiply tensors by the scale; each keeps its dtype.

        Args:
            outputs: A tensor, or tensors in tuples, lists, dicts, dataclasses or an iterator.

        Returns:
            The same structure with scaled tensors.

        Raises:
            ArgumentTypeError: `outputs` is not empty and does not contain a tensor.
        """
        if not self.is_enabled():
            return outputs
        if isinstance(outputs, Iterator):
            return map(self.scale, outputs)
        if next(tensors(outputs), None) is None and outputs not in ([], (), {}):
            raise ArgumentTypeError(
                "outputs must be a Tensor or an iterable of Tensors", where="scale", found=type(outputs).__name__
            )
        return mapped(outputs, self._scaled)

    def _scaled(self, output: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = super().scale(output)
        return scaled.to(output.dtype)

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool = True,  # noqa: ARG002  (the signature of torch's scaler; this one accepts fp16)
    ) -> dict[torch.device, torch.Tensor]:
        """Unscale this rank's gradients and return one overflow flag per device. Collective."""
        # The flags are nonzero if any rank had an overflow. torch's class also calls this with a scale of 1 to find
        # overflows only, for optimizers that unscale gradients themselves.
        flags = {found_inf.device: found_inf}
        for (device, _), grads in _gradients(optimizer).items():
            flag = flags.setdefault(device, found_inf.to(device))
            torch._amp_foreach_non_finite_check_and_unscale_(grads, flag, inv_scale.to(device))
        total = torch.stack([flag.to(found_inf.device) for flag in flags.values()]).sum(0)
        met = total.to(self._device) if total.device.type == "cpu" else total  # the group backend's device
        dist.all_reduce(met, group=self.process_group)
        return {device: flag.copy_(met) for device, flag in flags.items()}


@torch.no_grad()
def _gradients(optimizer: torch.optim.Optimizer) -> dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]:
    """Return this rank's shards of an optimizer's gradients by device and dtype."""
    # The tensors alias the gradients; changes are made in place.
    gradients: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            grad = parameter.grad
            if grad is None:
                continue
            if grad.is_sparse:
                if grad.dtype is torch.float16:  # duplicate indices may overflow in the sum
                    grad = parameter.grad = grad.coalesce()
                grad = grad._values()
            elif isinstance(grad, DTensor):
                grad = grad.to_local()
            gradients.setdefault((grad.device, grad.dtype), []).append(grad.detach())
    return gradients
