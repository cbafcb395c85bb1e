"""Any trainer's sharding reaches any receiver's layout: published versions are received bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed import fsdp as theirs
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardckpt
from shardckpt import core as ours
from shardckpt.boxes import Box, Shape, chunk_box, narrow_to_box
from shardckpt.stream.receive.targets import TensorChange
from tests.kit.ranks.harness import run

WIDTH = 12
VERSIONS = (1, 2, 3)


class Model(nn.Module):
    """Shapes that no number of ranks divides, a buffer, a tied head and a norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(7, WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.odd = nn.Parameter(torch.randn(5, 3))
        self.register_buffer("scalar", torch.tensor(2.0))
        self.head = nn.Linear(WIDTH, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("counts", torch.arange(7))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        hidden = self.norm(self.down(torch.tanh(self.up(self.embed(tokens)))))
        return self.head(hidden) * self.scalar + self.odd.sum()


def shard_ours(model: Model) -> nn.Module:
    ours.fully_shard(model.up)
    ours.fully_shard(model)
    return model


def shard_theirs(model: Model) -> nn.Module:
    theirs.fully_shard(model.up)
    theirs.fully_shard(model)
    return model


def wrap_ours(model: Model) -> nn.Module:
    return ours.FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))


def shard_over_tensor_parallel(model: Model) -> nn.Module:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    theirs.fully_shard(model, mesh=mesh["dp"])
    return model


def replicate(model: Model) -> nn.Module:
    return model


TRAINERS: dict[str, tuple[int, Callable[[Model], nn.Module]]] = {
    "one process": (1, replicate),
    "replicas": (2, replicate),
    "fully_shard": (2, shard_ours),
    "fully_shard on 3": (3, shard_ours),
    "wrapper": (3, wrap_ours),
    "torch's FSDP2": (2, shard_theirs),
    "TP x FSDP": (4, shard_over_tensor_parallel),
}


def train_and_publish(rank: int, world: int, url: str, kind: str) -> list[dict[str, torch.Tensor]]:
    """Publish versions while training; return the full weights of each as torch gathers them, cast."""
    model = TRAINERS[kind][1](Model())
    optim = torch.optim.SGD(model.parameters(), lr=0.01)
    publisher = shardckpt.Publisher(url, anchors=shardckpt.Anchors(max_chain=2))
    made = []
    for version in VERSIONS:
        model(torch.arange(7)).square().mean().backward()
        optim.step()
        optim.zero_grad()
        publisher.publish(version, model)
        full = shardckpt.model_state_dict(model)
        made.append({name: cast(value) for name, value in full.items()} if rank == 0 else {})
    publisher.close()
    return made


def cast(value: torch.Tensor) -> torch.Tensor:
    return value.detach().clone().to(torch.bfloat16) if value.is_floating_point() else value.clone()


GetLayout = Callable[[int, int], Callable[[str, Shape], "Box | None"]]


def take_all(rank: int, size: int) -> Callable[[str, Shape], Box | None]:
    """Return the layout of a worker that cuts its slices from full tensors."""
    return lambda name, shape: chunk_box(shape, 0, 1, 0) if shape else Box((), ())


def slice_rows(rank: int, size: int) -> Callable[[str, Shape], Box | None]:
    """Return a tensor-parallel layout: matrices by rows or columns, the rest on every worker."""

    def layout(name: str, shape: Shape) -> Box | None:
        if len(shape) < 2:
            return chunk_box(shape, 0, 1, 0) if shape else Box((), ())
        return chunk_box(shape, 1 if "down" in name else 0, size, rank)

    return layout


class Worker:
    """An engine's worker with its slices."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def apply(self, changes: Iterable[TensorChange]) -> None:
        """Write the changes."""
        for change in changes:
            empty = torch.empty(change.box.size, dtype=change.values.dtype)
            tensor = self.tensors.setdefault(change.name, empty)
            if change.indices is None:
                tensor.copy_(change.values.view(change.box.size))
            else:
                tensor.view(-1)[change.indices] = change.values


def receive(
    rank: int, size: int, url: str, expected: list[dict[str, torch.Tensor]], get_layout: GetLayout = slice_rows
) -> None:
    """Receive one version, then the next two at once; compare every element of the slices."""
    layout, worker = get_layout(rank, size), Worker()
    subscriber = shardckpt.Subscriber(url, layout=layout)
    for version in (VERSIONS[0], VERSIONS[-1]):
        staged = subscriber.stage(version)
        for full in staged.iter_weights():
            value = narrow_to_box(expected[version - 1][full.name], full.box)
            assert full.indices is None and torch.equal(full.values.view(full.box.size), value), (version, full.name)
        assert staged.commit(worker) == (1, version)
        for name, value in expected[version - 1].items():
            box = layout(name, tuple(value.shape))
            if name != "head.weight" and box is not None and box.volume:  # the head is tied to the embedding
                assert torch.equal(worker.tensors[name], narrow_to_box(value, box)), (version, name)


@pytest.mark.parametrize("kind", TRAINERS)
def test_every_trainer_publishes_the_weights_that_torch_gathers(kind: str, tmp_path: Path) -> None:
    url = str(tmp_path / "stream")
    expected = run(TRAINERS[kind][0], train_and_publish, url, kind)[0]
    receive(0, 1, url, expected)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_receivers_of_any_size_get_their_slices(size: int, tmp_path: Path) -> None:
    url = str(tmp_path / "stream")
    expected = run(2, train_and_publish, url, "fully_shard")[0]
    run(size, receive, url, expected)


def test_workers_that_all_need_full_tensors_get_them(tmp_path: Path) -> None:
    url = str(tmp_path / "stream")
    expected = run(2, train_and_publish, url, "fully_shard")[0]
    run(2, receive, url, expected, take_all)
