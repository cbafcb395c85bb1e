"""Weights of a stream in vLLM: an engine for workers, which load versions, and one for trainers, which publish them.

A server takes it with `--weight-transfer-config '{"backend": "shardckpt"}'`.
"""

from __future__ import annotations

from shardckpt.errors import require_packages

require_packages("shardckpt.integrations.vllm", "torch", "vllm", install="vllm")

import logging
import os
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Thread
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import distributed as dist
from vllm.distributed.parallel_state import get_world_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from shardckpt import Subscriber
from shardckpt.errors import UsageError
from shardckpt.integrations.vllm_model import ServedModel, keeps_checkpoint_layout

if TYPE_CHECKING:
    from shardckpt.stream.receive.subscriber import Staged

__all__ = ["Engine", "StreamInit", "StreamUpdate"]

_LOG = logging.getLogger("shardckpt")


@dataclass
class StreamInit(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is not typed
    """Value of `init_info`: the stream to follow.

    Attributes:
        url: The stream.
        mirror: Folder for the held version, as for `Subscriber`.
        load: How to load a version. `patch` writes changed elements into the parameters, which is right only if the
            model computes with them as loaded. `reload` loads all weights as at the start. `auto` chooses `patch`
            where that is known to be right.
        timeout_s: Seconds to wait for a version that an update names.
    """

    url: str
    mirror: str | None = None
    load: Literal["auto", "patch", "reload"] = "auto"
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        """Require a known way to load."""
        if self.load not in ("auto", "patch", "reload"):
            raise UsageError("`load` must be auto, patch or reload", found=repr(self.load))


@dataclass
class StreamUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Value of `update_info`: the version to load.

    Attributes:
        version: Its number. None takes the newest one when the update started.
    """

    version: int | None = None


class Engine(WeightTransferEngine[StreamInit, StreamUpdate]):  # type: ignore[misc]
    """Engine of one worker: all workers load a version, or none of them serves.

    `start_weight_update` lets a thread read a version while the server serves. `update_weights` waits for it, and
    loads. If that fails before the first write, the server keeps its version. If it fails later, the model computes no
    logits: a server that resumes stops. The next update replaces all weights.
    """

    init_info_cls = StreamInit
    update_info_cls = StreamUpdate
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._served = ServedModel(self.model, self.model_config)
        self._workers: dist.ProcessGroup | None = None
        self._subscriber: Subscriber | None = None
        self._timeout_s = 0.0
        self._reading: Future[Staged] | None = None
        self._has_loaded = self._has_failed = False  # in this update

    def init_transfer_engine(self, init_info: StreamInit) -> None:
        """Open the stream."""
        self.shutdown()
        if init_info.load == "auto":
            self._served.in_place = keeps_checkpoint_layout(self.model, self.model_config)
        else:
            self._served.in_place = init_info.load == "patch"
        if self._workers is None:
            self._workers = _group_workers()
        mirror = init_info.mirror
        if mirror is not None and self.parallel_config.data_parallel_size > 1:
            mirror = os.path.join(mirror, f"replica-{self.parallel_config.data_parallel_index:05d}")
        self._timeout_s = init_info.timeout_s
        self._subscriber = Subscriber(init_info.url, mirror=mirror, process_group=self._workers)

    def start_weight_update(self) -> None:
        """Start to read the newest version."""
        self._stop_reading()
        self._has_loaded = self._has_failed = False
        if self._subscriber is not None:
            self._reading = _stage_in_background(self._subscriber)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load a version. If that fails, it fails on all workers, and the last one reports it.

        vLLM reads answers up to the first error, and takes the rest for answers to its next calls.
        """
        try:
            self.receive_weights(self.parse_update_info(update_info))
        except Exception as error:
            self._has_failed = True
            if self.parallel_config.rank == self.parallel_config.world_size - 1:
                raise
            _LOG.error("The update failed; the last worker reports it: %s", error)
        if self.device.type != "cpu":  # a CPU has nothing to wait for
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: StreamUpdate) -> None:
        """Load a version."""
        if self._has_failed:
            raise UsageError("this update has failed", fix="Call finish_weight_update, and start another one.")
        staged = self._take_staged(self._require_stream(), update_info.version)
        self._served.prepare(staged)
        staged.commit(self._served)
        self._served.open()
        self._has_loaded = True

    def finish_weight_update(self) -> None:
        """End an update. If it has loaded no version, vLLM must not label the weights."""
        if not (self._has_loaded or self._has_failed):
            raise UsageError("this update has loaded no version", fix="Call update_weights before it finishes.")
        self._has_loaded = self._has_failed = False

    def shutdown(self) -> None:
        """Leave the stream. The weights stay as they are."""
        self._stop_reading()
        if self._subscriber is not None:
            self._subscriber.close()
            self._subscriber = None

    def _require_stream(self) -> Subscriber:
        if self._subscriber is None:
            raise UsageError("no stream is open", fix="Call init_weight_transfer_engine with its `url` first.")
        return self._subscriber

    def _take_staged(self, subscriber: Subscriber, version: int | None) -> Staged:
        reading, self._reading = self._reading, None
        if reading is not None and (version is None or reading.exception() is None):
            staged = reading.result()
            if version in (None, staged.version.number):
                return staged
        return subscriber.stage(version, timeout_s=self._timeout_s)

    def _stop_reading(self) -> None:
        reading, self._reading = self._reading, None
        if reading is not None and reading.exception() is None:
            reading.result().abort()


def _stage_in_background(subscriber: Subscriber) -> Future[Staged]:
    reading: Future[Staged] = Future()

    def read() -> None:
        try:
            reading.set_result(subscriber.stage())
        except BaseException as error:  # noqa: BLE001  (raised where the result is taken)
            reading.set_exception(error)

    Thread(target=read, name="shardckpt-stage", daemon=True).start()
    return reading


def _group_workers() -> dist.ProcessGroup | None:
    """Return a group of all workers that only this engine uses, since it votes in a thread of its own."""
    workers = get_world_group()
    if workers.world_size == 1:
        return None
    group: dist.ProcessGroup = dist.new_group(workers.ranks, backend="gloo", use_local_synchronization=True)
    return group
