"""Write the inputs of the consolidation benchmarks and check their outputs; only this script imports torch.

    python benchmarks/inputs.py make KIND FOLDER BYTES
    python benchmarks/inputs.py check KIND FOLDER BYTES DTYPE

The elements of a tensor follow from its name, so outputs are compared with expected tensors instead of the outputs of
other tools.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

with contextlib.suppress(ImportError):
    from torch_checkpointing import CheckpointManager, ItemSpec
    from torch_checkpointing.checkpoint_layout import LayoutInfo, SafetensorsSerialization
    from torch_checkpointing.config import SyncCheckpointSaverConfig
    from torch_checkpointing.default_resharder import DefaultResharder
    from torch_checkpointing.metadata_manager import DefaultMetadataManager
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

RANKS = 4
COLUMNS = 4096
LAYERS = 16
MATRICES = ("q", "k", "v", "o")
TINY_TENSORS = 20_000
TINY_ELEMENTS = 16
LISTED_TENSORS = 100_000
LISTED_FILES = 8


def shapes(kind: str, nbytes: int) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a checkpoint of about `nbytes`, float32."""
    if kind == "tiny":
        return {f"layers.{i // 10}.part_{i % 10}.bias": (TINY_ELEMENTS,) for i in range(TINY_TENSORS)}
    rows = max(nbytes // (4 * COLUMNS * LAYERS * len(MATRICES)) // RANKS, 1) * RANKS
    tensors: dict[str, tuple[int, ...]] = {}
    for layer in range(LAYERS):
        tensors.update({f"model.layers.{layer}.{name}.weight": (rows, COLUMNS) for name in MATRICES})
        tensors[f"model.layers.{layer}.norm.weight"] = (COLUMNS,)
    return tensors


def truth(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the elements of a tensor: uniform in [-1, 1), generator by its name."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.empty(shape).uniform_(-1, 1, generator=generator)


def shards(rank: int, nbytes: int, dim: int) -> dict[str, DTensor]:
    """Return a rank's shard of every tensor, along `dim` (vectors along their only dimension)."""
    mesh = DeviceMesh("cpu", list(range(RANKS)))
    tensors = {}
    for name, shape in shapes("large", nbytes).items():
        full = truth(name, shape)
        along = min(dim, full.ndim - 1)
        # copy, because a view would keep the full tensor in the memory of every rank
        local = full.chunk(RANKS, along)[rank].clone(memory_format=torch.contiguous_format)
        tensors[name] = DTensor.from_local(local, mesh, [Shard(along)], shape=full.size(), stride=full.stride())
    return tensors


def save_dcp(state: dict[str, DTensor], folder: Path) -> None:
    """Save with DCP, as FSDP jobs do."""
    dcp.save({"model": state}, checkpoint_id=folder)


def save_hf(state: dict[str, DTensor], folder: Path) -> None:
    """Save with torch's Hugging Face writer, one file for each rank."""
    dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True))


def torch_checkpointing(**layout: object) -> CheckpointManager:
    """Return a manager of torch_checkpointing; its gather of metadata is replaced, because it needs CUDA.

    Args:
        layout: Arguments of `ItemSpec`.
    """

    def gather(_self: object, data: object, process_group: dist.ProcessGroup | None = None) -> dict[int, object]:
        results: list[object] = [None] * dist.get_world_size(process_group)
        dist.all_gather_object(results, data, group=process_group)
        return dict(enumerate(results))

    DefaultMetadataManager._all_gather_pickled_data = gather
    config = CheckpointManager.Config(
        items={"model": ItemSpec(**layout, resharder=DefaultResharder())},
        save=SyncCheckpointSaverConfig(),
        storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
    )
    return CheckpointManager(config)


def save_torch_checkpointing(state: dict[str, DTensor], folder: Path) -> None:
    """Save with torch_checkpointing."""
    manager = torch_checkpointing(layout=LayoutInfo("model_{rank}.safetensors", SafetensorsSerialization()))
    manager.save(str(folder), {"model": state})
    manager.close()


SHARDED: dict[str, tuple[Callable[[dict[str, DTensor], Path], None], int]] = {
    "dcp": (save_dcp, 0),
    "dcp-dim1": (save_dcp, 1),
    "hf": (save_hf, 0),
    "hf-dim1": (save_hf, 1),
    "torch-checkpointing": (save_torch_checkpointing, 0),
}


def _save_as_rank(rank: int, kind: str, folder: Path, nbytes: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    save, dim = SHARDED[kind]
    save(shards(rank, nbytes, dim), folder)
    dist.destroy_process_group()


def make_sharded(kind: str, folder: Path, nbytes: int) -> None:
    """Write a checkpoint from `RANKS` processes."""
    with tempfile.TemporaryDirectory() as scratch:
        arguments = (kind, folder, nbytes, f"{scratch}/store")
        context = multiprocessing.get_context("fork")
        ranks = [context.Process(target=_save_as_rank, args=(rank, *arguments)) for rank in range(RANKS)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    if any(process.exitcode for process in ranks):
        raise SystemExit(f"writing the {kind} checkpoint failed")


def make_listed(folder: Path) -> None:
    """Write a safetensors folder of `LISTED_TENSORS` one-element tensors, as an index and `LISTED_FILES` files."""
    folder.mkdir(parents=True)
    weight_map = {}
    count = LISTED_TENSORS // LISTED_FILES
    for number in range(1, LISTED_FILES + 1):
        file = f"model-{number:05}-of-{LISTED_FILES:05}.safetensors"
        names = [f"model.layers.{number}.experts.{i}.weight" for i in range(count)]
        entries = {
            name: {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]} for i, name in enumerate(names)
        }
        header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
        header += b" " * (-len(header) % 8)
        (folder / file).write_bytes(len(header).to_bytes(8, "little") + header + os.urandom(4 * count))
        weight_map.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": 4 * LISTED_TENSORS}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def make(kind: str, folder: Path, nbytes: int) -> None:
    """Write the checkpoint of one kind."""
    if kind == "listed":
        make_listed(folder)
    elif kind == "tiny":
        tensors = {name: truth(name, shape) for name, shape in shapes("tiny", nbytes).items()}
        dcp.save({"model": tensors}, checkpoint_id=folder)
    else:
        make_sharded(kind, folder, nbytes)


def outputs(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor below a folder (or in a file of torch.save), by name."""
    for path in sorted(folder.rglob("*.safetensors")):
        with safe_open(path, "pt") as file:
            yield from ((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118  (no iterator)
    for path in sorted(folder.rglob("*.pt")):
        yield from torch.load(path, mmap=True)["model"].items()


def check(kind: str, folder: Path, nbytes: int, dtype: str) -> None:
    """Compare an output with the expected tensors, bit for bit; exit with a message if they differ."""
    wanted = shapes("tiny" if kind == "tiny" else "large", nbytes)
    seen = set()
    for name, tensor in outputs(folder):
        expected = truth(name, wanted[name]).to(getattr(torch, dtype))
        same = tensor.dtype == expected.dtype and torch.equal(tensor.view(torch.uint8), expected.view(torch.uint8))
        if not same or name in seen:
            raise SystemExit(f"{folder}: {name} differs from the expected tensor")
        seen.add(name)
    if seen != set(wanted):
        raise SystemExit(f"{folder}: {len(wanted) - len(seen)} tensors are missing")


if __name__ == "__main__":
    verb, the_kind, where, size, *more = sys.argv[1:]
    if verb == "make":
        make(the_kind, Path(where), int(size))
    else:
        check(the_kind, Path(where), int(size), *more)
