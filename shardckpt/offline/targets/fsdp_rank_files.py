"""`reshard --to torch`: a file of `torch.save` for each rank, tensors as the DTensors that FSDP2 loads, cut in rows.

The pickles are those of torch 2.13: a mesh of one dimension over all ranks, `Shard(0)`. Values that are no tensors, and
tensors that are whole on each rank (buffers, steps), are in every rank's file. Which those are, a source that is cut
shows: what has several rows and lies there in one piece. Where a source has nothing cut, everything with rows is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod

from shardckpt.boxes import Shape, full_box, strides
from shardckpt.format.encodings.pickle_writer import GlobalCall, GlobalName
from shardckpt.format.reader import Reader
from shardckpt.format.torchsave.writer import ArchiveWriter, Storage, TensorValue, TorchArchive, lay_out
from shardckpt.manifest import Path, dotted, unflatten
from shardckpt.offline.select.checkpoint_content import Content
from shardckpt.offline.write.report import Meter
from shardckpt.offline.write.resolve import row_shard
from shardckpt.offline.write.stream import MemoryBudget, TensorPart, write_parts
from shardckpt.plan.layout.output_files import OutputTensor
from shardckpt.plan.naming.fqn import require_matches
from shardckpt.storage.store import Writer

_STATE = "state"
_TENSOR = "torch.distributed.tensor"
_LAYOUT = "torch.distributed._mesh_layout"


@dataclass(frozen=True, slots=True)
class RankFileOutput:
    """One planned rank file.

    Attributes:
        name: In the target.
        archive: Where its bytes go.
        ranks: Content of the storage that lists the mesh's ranks.
        parts: What its other storages hold, in order.
    """

    name: str
    archive: TorchArchive
    ranks: bytes
    parts: tuple[TensorPart, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole file."""
        return self.archive.nbytes

    @property
    def count(self) -> int:
        """Tensors in it."""
        return len(self.parts)

    def write(
        self, reader: Reader, writer: Writer, *, budget: MemoryBudget, allow_overflow: bool, meter: Meter
    ) -> tuple[int, ...]:
        """Write it from start to end; the caller closes the writer.

        Raises:
            CheckpointError: The source's bytes cannot be read.
            StorageError: Reading or writing failed.
        """
        archive = ArchiveWriter(self.archive, writer.write)
        archive.write(self.ranks)
        write_parts(reader, self.parts, archive, budget=budget, allow_overflow=allow_overflow, meter=meter)
        archive.close()
        return ()


def sharded_paths(content: Content, keep_whole: Sequence[str]) -> frozenset[Path]:
    """Return the paths of sharded tensors; every rank has the others in full.

    Args:
        content: What is written.
        keep_whole: Globs of dotted names that are not cut.

    Raises:
        UsageError: A glob that matches nothing.
    """
    names = {path: dotted(path) for path in content.arrays}
    require_matches(keep_whole, list(names.values()))
    kept = {path for path, name in names.items() if any(fnmatchcase(name, glob) for glob in keep_whole)}
    return frozenset(_sharded_in_source(content.arrays) - kept)


def _sharded_in_source(arrays: Mapping[Path, OutputTensor]) -> set[Path]:
    """Return what a source has cut, or would have if it had more rows; all with rows where it has nothing cut."""
    rows = {path: tensor for path, tensor in arrays.items() if tensor.shape and 0 not in tensor.shape}
    pieces = {path: sum(1 for piece in tensor.entry.pieces if piece.box.volume) for path, tensor in rows.items()}
    if all(count < 2 for count in pieces.values()):
        return set(rows)
    return {path for path, tensor in rows.items() if pieces[path] > 1 or tensor.shape[0] == 1}


def plan_rank_files(content: Content, cut: Collection[Path], world_size: int) -> list[RankFileOutput]:
    """Return a file for each rank, `rank0.pt` first.

    Args:
        content: What is saved.
        cut: Paths in it of what is cut.
        world_size: How many ranks.

    Raises:
        UnsupportedError: A value or a type that torch would not read back.
    """
    return [_rank_file(content, cut, rank, world_size) for rank in range(world_size)]


def _rank_file(content: Content, cut: Collection[Path], rank: int, world: int) -> RankFileOutput:
    parts: list[TensorPart] = []
    storages = [Storage("int32", world)]
    mesh = _mesh(rank, world)
    made: dict[Path, object] = {}
    for path, tensor in content.arrays.items():
        box = row_shard(tensor.shape, world, rank) if path in cut else None
        local = TensorValue(len(storages), tensor.dtype, tensor.shape if box is None else box.size)
        storages.append(Storage(tensor.dtype, prod(local.shape)))
        parts.append(TensorPart(tensor, full_box(tensor.shape) if box is None else box))
        made[path] = local if box is None else _dtensor(local, tensor.shape, mesh)
    leaves = {
        path: made[content.ties.get(path, path)] for path in content.order if content.ties.get(path, path) in made
    }
    ranks = b"".join(number.to_bytes(4, "little") for number in range(world))
    archive = lay_out(unflatten({**leaves, **content.values}, "the checkpoint", has_lists=True), storages)
    return RankFileOutput(f"rank{rank}.pt", archive, ranks, tuple(parts))


def _instance(module: str, name: str, state: Mapping[str, object]) -> GlobalCall:
    return GlobalCall(GlobalName(module, name), state=dict(state), is_new=True)


def _mesh(rank: int, world: int) -> GlobalCall:
    """Return the mesh of all ranks as one of them has it; its ranks lie in storage 0."""
    axis = _instance(_LAYOUT, "_FlatLayout", {"shape": (world,), "stride": (1,)})
    state: dict[str, object] = {
        "_device_type": "cpu",
        "_layout": _instance(_LAYOUT, "_MeshLayout", {"axes": (axis,)}),
        "_rank_map": TensorValue(0, "int32", (world,)),
        "_mesh_dim_names": None,
        "_root_mesh": None,
        "_flatten_rank_map": tuple(range(world)),
        "_thread_id": None,
        "_flatten_mapping": {},
        "_dim_group_names": ["0"],
        "_rank": rank,
        "_coordinate_on_dim": (rank,),
        "_hash": None,
    }
    return _instance("torch.distributed.device_mesh", "DeviceMesh", state)


def _dtensor(local: TensorValue, shape: Shape, mesh: GlobalCall) -> GlobalCall:
    dtype, steps = GlobalName("torch", local.dtype), strides(shape)
    order = GlobalCall(GlobalName(f"{_TENSOR}._dtensor_spec", "ShardOrderEntry"), (0, (0,)), is_new=True)
    meta = GlobalCall(
        GlobalName(f"{_TENSOR}._dtensor_spec", "TensorMeta"),
        (GlobalCall(GlobalName("torch", "Size"), (shape,)), steps, dtype),
        is_new=True,
    )
    spec = {
        "mesh": mesh,
        "placements": (_instance(f"{_TENSOR}.placement_types", "Shard", {"dim": 0}),),
        "tensor_meta": meta,
        "shard_order": (order,),
        "use_strided_shard_as_shard_order": True,
        "_hash": None,
    }
    kind = GlobalName(_TENSOR, "DTensor")
    layout = GlobalCall(GlobalName("torch.serialization", "_get_layout"), ("torch.strided",))
    rebuilt = (kind, dtype, shape, steps, 0, layout, GlobalCall(GlobalName("torch", "device"), ("cpu",)), False)
    state = (None, {"_local_tensor": local, "_spec": _instance(f"{_TENSOR}._dtensor_spec", "DTensorSpec", spec)})
    function = GlobalName("torch._utils", "_rebuild_wrapper_subclass")
    return GlobalCall(GlobalName("torch._tensor", "_rebuild_from_type_v2"), (function, kind, rebuilt, state))
