"""Further weights of a model in one checkpoint: averages over steps, under a name of their own."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from shardckpt.errors import UsageError
from shardckpt.state.local.ema_shards import map_ema_shards
from shardckpt.state.local.local_shards import LocalModel, TensorShards

EXTRAS = ("n_averaged",)
"""Names beside a variant's weights, if an average was saved."""


class Variant:
    """Marks further weights of a model: `save({"model": model, "ema": Variant(ema, of=model)}, path)`.

    They are saved as they are sharded, under the names that the model's parameters have, and named as their key in the
    state: `shardckpt consolidate --weights ema` writes them in the place of the model's own.

    Args:
        weights: `torch.optim.swa_utils.AveragedModel` or another module with the same parameters; or a dict of tensors
            by the names of `of.named_parameters()`: DTensors, or of the shape that the parameter has on this rank.
        of: The model.

    Raises:
        UsageError: The arguments mean nothing.

    Example:
        >>> ema = {name: p.detach().clone() for name, p in model.named_parameters()}  # doctest: +SKIP
        >>> shardckpt.save({"model": model, "ema": shardckpt.Variant(ema, of=model)}, "run/step-100")  # doctest: +SKIP
    """

    def __init__(self, weights: nn.Module | MutableMapping[str, torch.Tensor], of: nn.Module) -> None:
        if not isinstance(of, nn.Module):
            raise UsageError("a variant is of a model", found=type(of).__name__, expected="of=model")
        if not isinstance(weights, nn.Module) and not (
            isinstance(weights, Mapping) and all(isinstance(tensor, torch.Tensor) for tensor in weights.values())
        ):
            shown = type(weights).__name__
            raise UsageError("a variant's weights are none", found=shown, expected="a module, or a dict of tensors")
        self.weights = weights
        self.of = of

    @property
    def module(self) -> nn.Module | None:
        """The module whose names are the model's; None for a dict."""
        if isinstance(self.weights, AveragedModel):
            return self.weights.module
        return self.weights if isinstance(self.weights, nn.Module) else None

    @property
    def extras(self) -> dict[str, Any]:
        """What is kept beside the weights: how often an average was updated."""
        return {"n_averaged": self.weights.n_averaged} if isinstance(self.weights, AveragedModel) else {}

    def arrays(self, model: LocalModel) -> dict[str, TensorShards]:
        """Return this rank's part of a dict of tensors.

        Args:
            model: This rank's part of the model.

        Raises:
            UnsupportedError: A tensor that does not fit its parameter.
        """
        assert isinstance(self.weights, Mapping), "a module's names are its own"
        return map_ema_shards(self.of, model, self.weights)
