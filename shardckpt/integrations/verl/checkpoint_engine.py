"""The class that verl finds in its registry."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from shardckpt import Anchors, Subscriber
from shardckpt.errors import PoisonedError, UsageError
from shardckpt.stream.publish.full_tensors import FullTensorPublisher

if TYPE_CHECKING:
    from shardckpt.stream.receive.subscriber import Staged
    from shardckpt.stream.receive.targets import TensorChange

__all__ = ["StreamCheckpointEngine"]


@CheckpointEngineRegistry.register("shardckpt")
class StreamCheckpointEngine(CheckpointEngine):  # type: ignore[misc]  # verl is not typed
    """Engine of an actor's rank or of a rollout's worker.

    The version's number is `global_steps`, or one more than the newest if that is not larger, such as after a restart
    from an older checkpoint. If a worker fails, no worker of its rollout counts the version as loaded.

    Args:
        bucket_size: Unused; verl passes it.
        is_master: Unused; verl passes it.
        url: Folder or URL of the stream, which actor and rollouts reach.
        dtype: As for `Publisher`.
        key_map: As for `Publisher`.
        anchors: Values of `Anchors`.
        mirror: As for `Subscriber`, a folder on each rollout's machine.
        timeout_s: Seconds that a rollout waits for a version.

    Raises:
        UsageError: `url` is missing, or an argument has an unknown value.
    """

    def __init__(
        self,
        bucket_size: int = 0,  # noqa: ARG002  (verl passes both)
        is_master: bool = False,  # noqa: ARG002
        *,
        url: str = "",
        dtype: str | None = "bfloat16",
        key_map: Mapping[str, str] | None = None,
        anchors: Mapping[str, Any] | None = None,
        mirror: str | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        if not url:
            raise UsageError("the engine needs a stream", fix="Set checkpoint_engine.engine_kwargs.shardckpt.url.")
        self._publisher = FullTensorPublisher(url, dtype, key_map, Anchors(**(anchors or {})))
        self._subscriber = Subscriber(self._publisher.url, mirror=mirror)
        self._timeout_s = timeout_s
        self._rank, self._next = 0, 0  # of this update
        self._rollout = _Rollout()
        self._unfinished: Staged | None = None  # what a rollout has begun to load

    def prepare(self) -> dict[str, Any]:
        """Return the least number that the next version can have."""
        newest = self._publisher.find_newest()
        return {"next": 0 if newest is None else newest + 1}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return the arguments of `init_process_group` for the actor's ranks and the rollout's workers."""
        number = metadata[0]["next"]  # all use the one that rank 0 has found
        actor, rollout = (
            {"rank": list(range(size)), "next_version": [number] * size}
            for size in (actor_wg_world_size, rollout_world_size)
        )
        return actor, rollout

    def init_process_group(self, rank: int, next_version: int) -> None:
        """Note this rank, and the version's least number. Ranks meet in the stream alone."""
        self._rank, self._next = rank, next_version

    def finalize(self) -> None:
        """Keep what the next update compares with."""

    async def send_weights(
        self, weights: Generator[tuple[str, torch.Tensor], None, None], global_steps: int | None = None
    ) -> dict[str, Any]:
        """Publish full tensors from rank 0; the others gather them with it.

        Args:
            weights: Names and full tensors.
            global_steps: The trainer's step.

        Returns:
            Metrics of this update.
        """
        if self._rank:
            for _ in weights:
                pass
            return {}
        number = self._publisher.publish(weights, self._choose(global_steps))
        return {"shardckpt/version": number}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Yield the tensors of the version once it is published. Collective over the rollout's workers.

        Args:
            global_steps: The trainer's step.

        Yields:
            Name and full tensor.

        Raises:
            SourceNotFoundError: The version is not published within the limit.
            PoisonedError: A worker failed while it loaded the version.
        """
        if self._unfinished is not None:
            with suppress(PoisonedError):  # the other workers wait for this one, and raise it
                self._finish(self._unfinished, is_loaded=False)
        number = self._choose(global_steps)
        staged = await asyncio.to_thread(self._subscriber.stage, number, timeout_s=self._timeout_s)
        self._unfinished, is_loaded = staged, False
        try:
            # All tensors: verl converts them for the rollout, which may have no earlier values to change.
            for name, tensor in staged.iter_tensors():
                yield name, tensor
            is_loaded = True
        finally:
            self._finish(staged, is_loaded=is_loaded)

    def _choose(self, global_steps: int | None) -> int:
        """Return the version's number, the same on all ranks and workers."""
        return max(self._next, global_steps or 0)

    def _finish(self, staged: Staged, *, is_loaded: bool) -> None:
        """Let all workers count the version as loaded, or none."""
        if staged is self._unfinished:
            self._unfinished, self._rollout.is_loaded = None, is_loaded
            staged.commit(self._rollout)


class _Rollout:
    """Target of `Staged.commit`: the rollout has taken the tensors before, or failed."""

    is_loaded = False

    def apply(self, changes: Iterable[TensorChange]) -> None:
        """Raise if the rollout has failed."""
        if not self.is_loaded:
            raise UsageError("the rollout did not take all tensors")
        for _ in changes:  # it has them
            pass
