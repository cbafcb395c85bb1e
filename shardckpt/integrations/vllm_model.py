"""A vLLM worker's model: it loads the changes of a stream, and computes logits only from weights of one version."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.model_executor.model_loader.checkpoint_weight_patch import (
    CheckpointWeightPatch,
    load_checkpoint_weight_patches,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from shardckpt.errors import MismatchError, UnsupportedError

if TYPE_CHECKING:
    from shardckpt.stream.receive.subscriber import Staged
    from shardckpt.stream.receive.targets import TensorChange

__all__ = ["ServedModel", "keeps_checkpoint_layout"]

_UNQUANTIZED = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
_LOGITS = ("compute_logits", "compute_logits_local")  # the steps between hidden states and tokens


class ServedModel:
    """Target of `Staged.commit` in one worker.

    Args:
        model: The worker's model.
        model_config: vLLM's config of it.

    Attributes:
        in_place: Whether to write changed elements into the parameters. Otherwise each update loads all weights again
            as at the start.
    """

    def __init__(self, model: nn.Module, model_config: Any) -> None:
        self.in_place = False
        self._model: Any = model
        self._model_config = model_config
        self._staged: Staged | None = None  # what `apply` loads
        self._hook: Any = None

    def prepare(self, staged: Staged) -> None:
        """Refuse a version that vLLM cannot write in place, before anything is written."""
        self._staged = staged
        for change in staged.iter_changes() if self.in_place else ():
            if change.indices is None:
                continue
            if not change.values.is_floating_point():
                reason = f"vLLM writes parts of floating-point tensors alone, and this one is {change.dtype}"
            elif change.values.isnan().any():
                reason = "vLLM cannot write a part of a tensor with NaN, which marks elements without a change"
            else:
                continue
            raise UnsupportedError(
                f"{change.name} cannot be updated: {reason}", fix="Open the stream with `load` reload."
            )

    @torch.no_grad()
    def apply(self, changes: Iterable[TensorChange]) -> None:
        """Load the prepared version. From here on the model computes no logits, until `open`."""
        staged, self._staged = self._staged, None
        assert staged is not None, "it is prepared"
        self.close()
        if staged.is_held:
            return
        loaded = self._write(changes) if self.in_place else self._reload(staged)
        if staged.is_full or not self.in_place:
            self._require_all(loaded)

    def close(self) -> None:
        """Let the model compute no logits: a step of the server fails, and it stops."""
        if not any(hasattr(self._model, name) for name in _LOGITS):  # a pooling model
            self._hook = self._hook or self._model.register_forward_pre_hook(_refuse)
        for name in _LOGITS:
            if hasattr(self._model, name):
                setattr(self._model, name, _refuse)

    def open(self) -> None:
        """Let the model compute logits."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        for name in _LOGITS:
            if name in vars(self._model):
                delattr(self._model, name)

    def _write(self, changes: Iterable[TensorChange]) -> set[str] | None:
        """Write changes into the parameters. Returns the names of those that were given entirely."""
        patches: list[CheckpointWeightPatch] = []
        device = next(self._model.parameters()).device

        def entire() -> Iterator[tuple[str, torch.Tensor]]:
            for change in changes:
                if change.indices is None:
                    yield change.name, change.values.view(change.shape)
                    continue
                values, indices = change.values.to(device), change.indices.to(device)
                shape, dtype = tuple(change.shape), change.values.dtype
                patches.append(CheckpointWeightPatch(change.name, shape, dtype, values, indices))

        loaded = self._load(entire())
        load_checkpoint_weight_patches(self._model, patches, validate_unique_indices=False)  # the stream has checked
        return loaded

    def _reload(self, staged: Staged) -> set[str] | None:
        """Load all weights as at the start. Returns the parameters' names."""
        initialize_layerwise_reload(self._model)
        try:
            return self._load((each.name, each.values.view(each.shape)) for each in staged.iter_weights())
        finally:  # else layers that have loaded a part take the next load for the rest of it
            finalize_layerwise_reload(self._model, self._model_config)

    def _load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> set[str] | None:
        loaded: set[str] | None = self._model.load_weights(weights)
        return loaded

    def _require_all(self, loaded: set[str] | None) -> None:
        if loaded is None or self._model_config.quantization is not None:
            return  # vLLM does not say, or has parameters that no checkpoint has
        names = {name.replace(".base_layer.", ".") for name, _ in self._model.named_parameters()}
        missing = sorted(names - loaded)
        if missing:
            raise MismatchError(f"the stream lacks weights of the model: {', '.join(missing)}")


def keeps_checkpoint_layout(model: nn.Module, model_config: Any) -> bool:
    """Return whether the model computes with its parameters as loaded: no packed weights, no copies, no transforms."""
    if model_config.quantization is not None or model_config.use_mla or hasattr(model, "process_weights_after_loading"):
        return False
    return all(_is_plain(module) for module in model.modules())


def _is_plain(module: nn.Module) -> bool:
    method = getattr(module, "quant_method", None)
    if hasattr(module, "cpu_linear") or not (method is None or type(method) in _UNQUANTIZED):
        return False
    loaders = [getattr(tensor, "weight_loader", default_weight_loader) for tensor in module.parameters(recurse=False)]
    plain = (LinearBase, VocabParallelEmbedding)
    return all(
        loader is default_weight_loader or isinstance(getattr(loader, "__self__", None), plain) for loader in loaders
    )


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError(
        "the model has the weights of no version, because an update failed half way. "
        "Load a version before the server resumes, or start the server again."
    )
