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
    """A `torch.amp.GradScaler` whose ranks agree on whether a gradient overflowed; each sees a shard alone.

    Gradients may be plain or DTensors, of half precision too, on an accelerator or offloaded to the CPU. A rank that
    owns no gradient takes part as well.

    Args:
        device: Type of device that computes; scaling is off where it is "cuda" and there is none.
        init_scale: The first scale.
        backoff_factor: What the scale is multiplied with after an overflow.
        growth_factor: And after `growth_interval` steps in a row without one.
        growth_interval: Number of those steps.
        enabled: Otherwise everything passes through unchanged.
        process_group: The ranks that agree, all where None.
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
            The same with scaled tensors.

        Raises:
            ArgumentTypeError: It does not contain a tensor.
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
        """Unscale this rank's gradients; return for each device if any rank had an overflow. Collective.

        What torch's class calls both to unscale and, for optimizers that unscale themselves, to look only.
        """
        flags = {found_inf.device: found_inf}
        for (device, _), grads in _gradients(optimizer).items():
            flag = flags.setdefault(device, found_inf.to(device))
            torch._amp_foreach_non_finite_check_and_unscale_(grads, flag, inv_scale.to(device))
        total = torch.stack([flag.to(found_inf.device) for flag in flags.values()]).sum(0)
        met = total.to(self._device) if total.device.type == "cpu" else total  # where the group finds its tensors
        dist.all_reduce(met, group=self.process_group)
        return {device: flag.copy_(met) for device, flag in flags.items()}


@torch.no_grad()
def _gradients(optimizer: torch.optim.Optimizer) -> dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]:
    """Return what this rank holds of an optimizer's gradients, to be changed in place, by device and dtype."""
    found: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            grad = parameter.grad
            if grad is None:
                continue
            if grad.is_sparse:
                if grad.dtype is torch.float16:  # duplicates may overflow when they are added up
                    grad = parameter.grad = grad.coalesce()
                grad = grad._values()
            elif isinstance(grad, DTensor):
                grad = grad.to_local()
            found.setdefault((grad.device, grad.dtype), []).append(grad.detach())
    return found
