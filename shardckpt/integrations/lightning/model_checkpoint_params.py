"""Arguments for Lightning's `ModelCheckpoint` that the callback takes."""

from __future__ import annotations

from datetime import timedelta
from typing import Literal, TypedDict

__all__ = ["ModelCheckpointParams"]


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
