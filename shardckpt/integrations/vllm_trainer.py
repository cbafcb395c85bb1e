"""vLLM's interface for trainers, over a stream: each rank publishes its shards, and the servers load the version."""

from __future__ import annotations

from shardckpt.errors import require_packages

require_packages("shardckpt.integrations.vllm_trainer", "torch", "vllm", install="vllm")

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine

from shardckpt import Anchors, Publisher
from shardckpt.errors import UnsupportedError, UsageError

__all__ = ["StreamTrainerInit", "Trainer"]


@dataclass
class StreamTrainerInit(TrainerInitInfo):  # type: ignore[misc]  # vLLM is not typed
    """What `WeightTransferTrainerFactory.trainer_init` takes.

    Attributes:
        url: The stream, which trainers and servers reach.
        mirror: As `StreamInit.mirror`, on the servers.
        load: As `StreamInit.load`.
        dtype: As for `Publisher`.
        key_map: As for `Publisher`.
        anchors: As for `Publisher`.
    """

    backend: ClassVar[str] = "shardckpt"

    url: str
    mirror: str | None = None
    load: Literal["auto", "patch", "reload"] = "auto"
    dtype: str | None = "bfloat16"
    key_map: Mapping[str, str] | None = None
    anchors: Anchors = field(default_factory=Anchors)


class Trainer(TrainerWeightTransferEngine[StreamTrainerInit]):  # type: ignore[misc]
    """Engine of one trainer rank.

    A source with `iter_local` is published shard by shard. From an older one, each rank takes full tensors.
    """

    init_info_cls = StreamTrainerInit
    _publisher: Publisher
    _meshes: dict[Any, DeviceMesh]
    _version = 0  # the last one

    @classmethod
    def trainer_init(cls, init_info: StreamTrainerInit, *, client: Any, source: Any = None) -> Trainer:
        """Open the stream, and let the servers open it. On every rank."""
        if source is None:
            raise UsageError("a stream needs a WeightSource", fix="Pass `source`.")
        engine = cls(client=client, source=source, is_sender=init_info.is_sender)
        engine._publisher = Publisher(
            init_info.url, dtype=init_info.dtype, key_map=init_info.key_map, anchors=init_info.anchors
        )
        engine._meshes = _build_meshes(source)
        if engine.is_sender:
            follow = {"url": init_info.url, "mirror": init_info.mirror, "load": init_info.load}
            client.init_weight_transfer_engine(follow)
        return engine

    def send_weights(self, version: int | None = None) -> None:
        """Publish the source's weights, and let the servers load them. On every rank.

        Args:
            version: Its number, such as the step; by default one more than the last.
        """
        self._version = self._version + 1 if version is None else version
        self._publisher.publish(self._version, self._read_source()).result()
        if self.is_sender:
            self.client.start_weight_update()
            self.client.update_weights({"version": self._version})
            self.client.finish_weight_update(str(self._version))

    def resume(self) -> int | None:
        """Find the version that has the source's weights, after a restart. On every rank; see `Publisher.resume`."""
        found: int | None = self._publisher.resume(self._read_source())
        self._version = found or 0
        return found

    def shutdown(self) -> None:
        """Wait for the last version."""
        self._publisher.close()

    def _read_source(self) -> dict[str, torch.Tensor]:
        if not hasattr(self.source, "iter_local"):
            return dict(self.source)
        if not self.source.implements_iter_local():
            return dict(self.source.iter_full())
        layouts = {meta.name: meta for meta in self.source.metadata}
        return {name: self._place(tensor, layouts[name]) for name, tensor in self.source.iter_local()}

    def _place(self, tensor: torch.Tensor, meta: Any) -> torch.Tensor:
        if meta.placements is None:
            return tensor
        mesh = self._meshes[meta.owners, meta.mesh_shape]
        strides = torch.empty(meta.shape, device="meta").stride()
        placements = [_as_placement(each) for each in meta.placements]
        return DTensor.from_local(
            tensor, mesh, placements, run_check=False, shape=torch.Size(meta.shape), stride=strides
        )


def _build_meshes(source: Any) -> dict[Any, DeviceMesh]:
    """Return a mesh for each layout; all ranks build all of them, in the metadata's order."""
    meshes: dict[Any, DeviceMesh] = {}
    if not (hasattr(source, "iter_local") and source.implements_iter_local()):
        return meshes
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = "cpu" if accelerator is None else accelerator.type
    for meta in source.metadata:
        if meta.placements is not None and (meta.owners, meta.mesh_shape) not in meshes:
            ranks = torch.tensor(meta.owners).view(meta.mesh_shape)
            meshes[meta.owners, meta.mesh_shape] = DeviceMesh(device, ranks)
    return meshes


def _as_placement(placement: Any) -> Placement:
    kind = type(placement).__name__
    if kind == "Shard":
        return Shard(placement.dim)
    if kind == "Replicate":
        return Replicate()
    raise UnsupportedError("a source's placement must be Shard or Replicate", found=kind)
