"""Lightning's strategies that can save steps."""

from __future__ import annotations

from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    SingleDeviceXLAStrategy,
    Strategy,
    XLAStrategy,
)

from shardckpt.errors import UnsupportedError

__all__ = ["require_supported_strategy"]

_STRATEGIES = (SingleDeviceStrategy, DDPStrategy, FSDPStrategy, ModelParallelStrategy)
_OTHER_SUBCLASSES = (DeepSpeedStrategy, XLAStrategy, SingleDeviceXLAStrategy)


def require_supported_strategy(strategy: Strategy) -> None:
    """Raise UnsupportedError unless a step can have the strategy's models and optimizers."""
    if not isinstance(strategy, _STRATEGIES) or isinstance(strategy, _OTHER_SUBCLASSES):
        raise UnsupportedError(
            "ShardckptModelCheckpoint does not support this strategy",
            found=type(strategy).__name__,
            expected=", ".join(each.__name__ for each in _STRATEGIES),
            fix="Use ModelCheckpoint: shardckpt reads the checkpoints of DeepSpeed and many others.",
        )
