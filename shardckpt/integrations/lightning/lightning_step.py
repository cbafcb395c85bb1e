"""What steps need from Lightning: strategies, arguments of `ModelCheckpoint`, a training step that can run again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal, TypedDict

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
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
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection

from shardckpt import RNGState
from shardckpt.errors import UnsupportedError, UsageError
from shardckpt.witness.prove_resume import drill_folder, require_proven, run_drill

__all__ = [
    "LightningStep",
    "ModelCheckpointParams",
    "find_ranking",
    "require_methods",
    "require_steps_for_drill",
    "require_supported_strategy",
    "require_unnamed",
]

_STRATEGIES = (SingleDeviceStrategy, DDPStrategy, FSDPStrategy, ModelParallelStrategy)
_OTHER_SUBCLASSES = (DeepSpeedStrategy, XLAStrategy, SingleDeviceXLAStrategy)


class LightningStep:
    """A step with one batch: `training_step`, backward, clipping, optimizer step and schedules.

    Only the optimizer step's hooks are called; what `self.log` gets is dropped.
    """

    __slots__ = ("_batch", "_batch_idx", "_trainer")  # a drill does not look into its attributes

    def __init__(self, trainer: Trainer, batch: Any, batch_idx: int) -> None:
        self._trainer, self._batch, self._batch_idx = trainer, batch, batch_idx

    def build_state(self) -> dict[str, Any]:
        """Return the objects in a step: model, optimizer, schedules, scaler, generators."""
        strategy = self._trainer.strategy
        schedules = [config.scheduler for config in strategy.lr_scheduler_configs]
        scaler = getattr(strategy.precision_plugin, "scaler", None)
        state = {"model": strategy.model, "optim": strategy.optimizers[0], "schedules": schedules, "rng": RNGState()}
        return state if scaler is None else {**state, "scaler": scaler}

    def prove_resume(self, module: LightningModule, run: str) -> None:
        """Train the step from one saved state twice, and compare all bits; then restore the state. Collective."""
        require_proven(run_drill(lambda: self.run(module), self.build_state(), drill_folder(run)))

    def run(self, module: LightningModule) -> dict[str, Any]:
        """Train a step, and return its results."""
        strategy, (optimizer, *_) = self._trainer.strategy, self._trainer.strategy.optimizers
        kwargs = self._trainer.fit_loop.epoch_loop._build_kwargs(OrderedDict(), self._batch, self._batch_idx)
        found: dict[str, Any] = {"batch": self._batch}

        def compute_gradients() -> Any:
            output = strategy.training_step(*kwargs.values())
            loss = output["loss"] if isinstance(output, dict) else output
            found["loss"] = loss.detach().clone()
            optimizer.zero_grad()
            strategy.backward(loss, optimizer)
            return loss

        with self._without_logging(module):
            strategy.optimizer_step(optimizer, compute_gradients, model=module)
        optimizer.zero_grad()
        for config in strategy.lr_scheduler_configs:
            if config.interval == "step" and not config.reduce_on_plateau:
                config.scheduler.step()
        return found

    @contextmanager
    def _without_logging(self, module: LightningModule) -> Iterator[None]:
        """Keep what the module logs out of the epoch's results."""
        loop, name = self._trainer.fit_loop.epoch_loop, module._current_fx_name
        results = loop._results
        loop._results, module._current_fx_name = _ResultCollection(training=True), "training_step"
        loop._results.batch = self._batch
        try:
            yield
        finally:
            loop._results, module._current_fx_name = results, name


def require_steps_for_drill(trainer: Trainer) -> None:
    """Require that each batch is a step, which Lightning optimizes."""
    found = (
        f"accumulate_grad_batches={trainer.accumulate_grad_batches}"
        if trainer.accumulate_grad_batches > 1
        else "manual optimization"
        if not trainer.lightning_module.automatic_optimization
        else f"{len(trainer.optimizers)} optimizers"
        if len(trainer.optimizers) != 1
        else ""
    )
    if found:
        raise UsageError("a drill needs steps of one batch and one optimizer, which Lightning updates", found=found)


def require_supported_strategy(strategy: Strategy) -> None:
    """Raise UnsupportedError unless a step can have the strategy's models and optimizers."""
    if not isinstance(strategy, _STRATEGIES) or isinstance(strategy, _OTHER_SUBCLASSES):
        raise UnsupportedError(
            "ShardckptModelCheckpoint does not support this strategy",
            found=type(strategy).__name__,
            expected=", ".join(each.__name__ for each in _STRATEGIES),
            fix="Use ModelCheckpoint: shardckpt reads the checkpoints of DeepSpeed and many others.",
        )


class ModelCheckpointParams(TypedDict, total=False):
    """Keyword parameters of Lightning's `ModelCheckpoint`, which documents them, except those that name files."""

    monitor: str | None
    verbose: bool
    save_last: bool | Literal["link"] | None
    save_top_k: int
    save_on_exception: bool
    save_weights_only: bool
    mode: Literal["min", "max"]
    every_n_train_steps: int | None
    train_time_interval: timedelta | None
    every_n_epochs: int | None
    save_on_train_epoch_end: bool | None


def find_ranking(callback: ModelCheckpoint) -> dict[str, Any]:
    """Return the metric and the mode by which a callback ranks steps, as `Checkpointer` takes them; empty without."""
    # Lightning adds `epoch` and `step` to the metrics itself, and steps do not have them.
    return {} if callback.monitor in (None, "epoch", "step") else {"metric": callback.monitor, "mode": callback.mode}


def require_unnamed(arguments: Mapping[str, object]) -> None:
    """Raise UsageError if an argument would name files."""
    names = {"dirpath", "filename", "auto_insert_metric_name", "enable_version_counter"} & arguments.keys()
    if names:
        found = " and ".join(f"`{name}`" for name in sorted(names))
        raise UsageError(f"{found} cannot be chosen", expected="steps named `step-00000100`", fix="Leave it out.")


def require_methods() -> None:
    """Raise UnsupportedError if this version of Lightning lacks a method that is replaced."""
    inherited = ("_save_checkpoint", "_save_last_checkpoint", "_remove_checkpoint", "_monitor_candidates")
    missing = [name for name in (*inherited, "_find_last_checkpoints") if not hasattr(ModelCheckpoint, name)]
    if missing:
        found = f"a ModelCheckpoint without {', '.join(missing)}"
        raise UnsupportedError("this version of Lightning is not supported", found=found)
