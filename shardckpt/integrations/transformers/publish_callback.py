"""Publish a Trainer's weights to a stream while it trains."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection, Mapping
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from shardckpt import Anchors, Publisher
from shardckpt.errors import UsageError
from shardckpt.events import OnEvent

__all__ = ["PublishCallback"]


class PublishCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """Publish a `transformers.Trainer`'s weights to a stream: each rank its shards, without gathering them.

    The version's number is the step. A training that resumes continues the stream: see `Publisher.resume`. Steps that
    were published before and are trained again are new versions.

    Args:
        url: Folder or URL of the stream, which all ranks reach.
        every: Steps between versions.
        dtype: As for `Publisher`.
        key_map: As for `Publisher`.
        anchors: As for `Publisher`.
        keep: As for `Publisher`.
        on_event: As for `Publisher`.

    Raises:
        UsageError: An argument has an unknown value.

    Examples:
        >>> callback = PublishCallback("s3://bucket/stream", every=10)
        >>> trainer = Trainer(model, args, callbacks=[callback])  # doctest: +SKIP
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        every: int = 1,
        *,
        dtype: str | None = "bfloat16",
        key_map: Mapping[str, str] | None = None,
        anchors: Anchors = Anchors(),  # noqa: B008  (frozen)
        keep: Callable[[], Collection[int]] | None = None,
        on_event: OnEvent | None = None,
    ) -> None:
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise UsageError("`every` must be a number of steps", found=repr(every))
        self._every = every
        self._make = functools.partial(
            Publisher, url, dtype=dtype, key_map=key_map, anchors=anchors, keep=keep, on_event=on_event
        )
        self._make()  # an unknown value is refused now
        self._publisher: Publisher | None = None  # while it trains

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_publisher": None}

    def on_train_begin(
        self, _args: TrainingArguments, _state: TrainerState, _control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        """Find the version that has the model's weights. Collective."""
        publisher = self._make()
        publisher.resume(model)
        self._publisher = publisher

    def on_step_end(
        self, _args: TrainingArguments, state: TrainerState, _control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        """Publish a version in the background if one is due. Collective."""
        if self._publisher is not None and state.global_step % self._every == 0:
            self._publisher.publish(state.global_step, model)

    def on_train_end(self, *_args: Any, **_: Any) -> None:
        """Wait for the last version, and raise its error if it failed."""
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            publisher.close()
