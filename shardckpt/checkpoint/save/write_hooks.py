"""Hooks of torch's writers: optimizer steps and `load_state_dict` wait for copies that `async_save` has deferred."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from shardckpt.devices import has_deferred_waits, wait_for_deferred_copies
from shardckpt.torch_features import disable_compiler

_step_hook: RemovableHandle | None = None
_load_hooks: list[RemovableHandle] = []  # of modules, until no writer has to wait


def install_write_hooks(modules: Iterable[nn.Module]) -> None:
    """Make optimizer steps, and loads of modules, wait for deferred copies."""
    global _step_hook  # noqa: PLW0603
    if _step_hook is None:
        _step_hook = register_optimizer_step_pre_hook(disable_compiler(_before_step, recursive=True))
    _remove_load_hooks()  # copies of the save before have ended
    for module in {each for root in modules for each in root.modules()}:
        _load_hooks.append(module.register_load_state_dict_pre_hook(_before_load))  # type: ignore[no-untyped-call]


def _before_step(*_: Any) -> None:
    wait_for_deferred_copies()
    if _load_hooks and not has_deferred_waits():
        _remove_load_hooks()


def _before_load(*_: Any) -> None:
    wait_for_deferred_copies()  # the hook stays: torch iterates over the module's hooks


def _remove_load_hooks() -> None:
    for hook in _load_hooks:
        hook.remove()
    _load_hooks.clear()
