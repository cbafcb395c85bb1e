"""Digest a restored state when it is first used."""

from __future__ import annotations

from collections.abc import Callable

import torch

from shardckpt.witness.records.step_records import StateDigests
from shardckpt.witness.state_digests import StateOnRank
from shardckpt.witness.trained_objects import TrainedObjects


class FirstUse:
    """A restored state's digests when its optimizer takes the first step."""

    # At that time parameters are as in the forward pass, and settings as in the step.

    def __init__(self, objects: TrainedObjects, digest: Callable[[], StateOnRank]) -> None:
        self._digest = digest
        self._has_looked = False
        self._digests: StateDigests | None = None
        self._fault: Exception | None = None
        self._hooks = [
            optim.register_step_pre_hook(self._look) for optim in map(_unwrap, objects.optimizers) if optim is not None
        ]

    def _look(self, *_args: object) -> None:
        if self._has_looked or torch.compiler.is_compiling():  # a compiled step cannot digest
            return
        self._has_looked = True
        try:
            self._digests = self._digest().digests
        except Exception as error:  # noqa: BLE001  (sent to every rank with the step)
            self._fault = error

    def end(self) -> StateDigests | None:
        """Stop waiting for the step; return its digests, or raise the error."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._fault is not None:
            raise self._fault
        return self._digests


def _unwrap(optim: torch.optim.Optimizer) -> torch.optim.Optimizer | None:
    """Return the optimizer that has hooks, which wrappers such as accelerate's may lack; None without one."""
    inner = optim if hasattr(optim, "_optimizer_step_pre_hooks") else getattr(optim, "optimizer", None)
    return inner if hasattr(inner, "_optimizer_step_pre_hooks") else None
