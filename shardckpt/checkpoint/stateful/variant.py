"""Variants of a model's weights in one checkpoint, such as averages over steps."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from shardckpt.errors import UsageError
from shardckpt.state.local.ema_shards import map_ema_shards
from shardckpt.state.local.tensor_shards import TensorShards

if TYPE_CHECKING:
    from shardckpt.state.local.local_shards import LocalModel

EXTRAS = ("n_averaged",)  # keys of an average, next to the variant's weights


class Variant:
    """Variant of a model's weights, such as an average, with its own name.

    In `save({"model": model, "ema": Variant(ema, of=model)}, path)` its name is `ema`, the key in the state. The
    weights are saved with their sharding, under the model's FQNs. `shardckpt consolidate --weights ema` writes them
    instead of the model's own weights.

    Args:
        weights: `torch.optim.swa_utils.AveragedModel` or another module with the same parameters; or a dict of tensors
            by the names of `of.named_parameters()`, which are DTensors or have the parameter's shape on this rank.
        of: Model with the parameters.

    Raises:
        UsageError: `weights` is neither a module nor a dict of tensors, or `of` is not a module.

    Examples:
        >>> ema = {name: p.detach().clone() for name, p in model.named_parameters()}  # doctest: +SKIP
        >>> shardckpt.save({"model": model, "ema": shardckpt.Variant(ema, of=model)}, "run/step-100")  # doctest: +SKIP
    """

    def __init__(self, weights: nn.Module | MutableMapping[str, torch.Tensor], of: nn.Module) -> None:
        if not isinstance(of, nn.Module):
            raise UsageError("`of` must be the variant's model", found=type(of).__name__, expected="of=model")
        if not isinstance(weights, nn.Module) and not (
            isinstance(weights, Mapping) and all(isinstance(tensor, torch.Tensor) for tensor in weights.values())
        ):
            shown = type(weights).__name__
            raise UsageError("`weights` must be a module or a dict of tensors", found=shown)
        self.weights = weights
        self.of = of

    @property
    def module(self) -> nn.Module | None:
        """Module with the same FQNs as the model; None for a dict of tensors."""
        if isinstance(self.weights, AveragedModel):
            return self.weights.module
        return self.weights if isinstance(self.weights, nn.Module) else None

    @property
    def extras(self) -> dict[str, Any]:
        """Values next to the weights: an average's number of updates."""
        return {"n_averaged": self.weights.n_averaged} if isinstance(self.weights, AveragedModel) else {}

    def arrays(self, model: LocalModel) -> dict[str, TensorShards]:
        """Return this rank's shards of a dict of tensors.

        Args:
            model: This rank's shards of the model.

        Raises:
            UnsupportedError: A tensor does not fit its parameter.
        """
        assert isinstance(self.weights, Mapping), "a module's names are its own"
        return map_ema_shards(self.of, model, self.weights)
