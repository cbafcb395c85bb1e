"""Entry point for vLLM's plugins: it registers the engine `shardckpt`, whose module is imported on first use."""

from __future__ import annotations

from contextlib import suppress

__all__ = ["register"]

_NAME = "shardckpt"
_ENGINES = (
    ("WeightTransferEngineFactory", "shardckpt.integrations.vllm", "Engine"),
    ("WeightTransferTrainerFactory", "shardckpt.integrations.vllm_trainer", "Trainer"),
)


def register() -> None:
    """Register the engine for workers and for trainers.

    vLLM calls this in each of its processes, perhaps twice. A vLLM without weight transfer engines is left as it is.
    """
    try:
        from vllm.distributed.weight_transfer import factory  # noqa: PLC0415  (it imports torch)
    except ModuleNotFoundError:
        return
    for registry, module, engine in _ENGINES:
        if hasattr(factory, registry):
            with suppress(ValueError):  # it is registered
                getattr(factory, registry).register_engine(_NAME, module, engine)
