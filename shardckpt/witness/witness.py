"""`Witness`: options to record training steps that a resume has to reproduce."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardckpt.errors import UsageError, require_bools


@dataclass(frozen=True)
class Witness:
    """Options for `Checkpointer(..., witness=...)`: record steps after each save, compare them after a restore.

    Args:
        steps: How many steps to record after each save.
        deep: Digest parameters and optimizer slots as they are saved, after the restore, and after every `deep`-th
            step; 0 to digest none.
        on_divergence: Raise a `ResumeDivergence`, or warn.
        deterministic: Whether a step gives the same bits each time it runs; None for True on the CPU, and on devices if
            `torch.use_deterministic_algorithms` is on. For a run that is not deterministic, a loss that differs is a
            warning, within a tolerance that is learned from the runs of the same step.

    Raises:
        UsageError: An argument has an invalid value.

    Examples:
        >>> ck = shardckpt.Checkpointer("runs/a", witness=shardckpt.Witness(steps=2))  # doctest: +SKIP
    """

    steps: int = 2
    deep: int = 1
    on_divergence: Literal["raise", "warn"] = "raise"
    deterministic: bool | None = None

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("deep", 0)):
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= _MAX_STEPS:
                raise UsageError(f"`{name}` must be an integer from {least} to {_MAX_STEPS}", found=repr(value))
        if self.on_divergence not in ("raise", "warn"):
            raise UsageError("`on_divergence` must be 'raise' or 'warn'", found=repr(self.on_divergence))
        if self.deterministic is not None:
            require_bools(deterministic=self.deterministic)

    def is_deep(self, distance: int) -> bool:
        """Return True if the state after a step is digested.

        Args:
            distance: Step number minus the saved step's number.
        """
        return self.deep > 0 and distance % self.deep == 0


_MAX_STEPS = 64
