"""Replace classes and functions in `torch.distributed.fsdp` with the engine's, for frameworks."""

from __future__ import annotations

from contextlib import ExitStack
from importlib import import_module
from typing import Any

_MODULES = {
    "torch.distributed.fsdp": "shardckpt.core",
    "torch.distributed.fsdp.api": "shardckpt.core.api",
    "torch.distributed.fsdp.fully_sharded_data_parallel": "shardckpt.core.fully_sharded_data_parallel",
    "torch.distributed.fsdp.wrap": "shardckpt.core.wrap",
    "torch.distributed.fsdp.sharded_grad_scaler": "shardckpt.core.sharded_grad_scaler",
    # Where torch had `fully_shard` up to 2.5; Lightning uses it.
    "torch.distributed._composable.fsdp": "shardckpt.core",
}


def replace_torch_fsdp() -> ExitStack:
    """Make `torch.distributed.fsdp` provide `shardckpt.core`'s classes and functions, in this process.

    For frameworks that import them when they shard a model, such as Accelerate and Lightning. Call it before the
    framework and its settings for FSDP are imported or made: names that were imported earlier stay torch's.
    Models that are sharded already keep their classes.

    Returns:
        A context manager: its end, or `close()`, gives torch its names again. It need not be kept.

    Examples:
        >>> shardckpt.core.replace_torch_fsdp()  # doctest: +SKIP
        >>> accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    """
    import_module("torch.distributed.checkpoint.state_dict")  # it keeps torch's wrapper, in addition to ours
    stack = ExitStack()
    for target, source in _MODULES.items():
        _replace_names(import_module(target), import_module(source), stack)
    return stack


def _replace_names(target: Any, source: Any, stack: ExitStack) -> None:
    """Replace the names that both modules have; the end of the stack restores them."""
    for name in dir(source):  # a package's names may not be loaded yet
        if name.startswith("_") or not hasattr(target, name):
            continue
        ours = getattr(source, name)
        if getattr(ours, "__module__", "").startswith("shardckpt.core"):
            stack.callback(setattr, target, name, getattr(target, name))
            setattr(target, name, ours)
