"""`reshard --to torch`: one file per rank, with DTensors that FSDP2 loads.

Tensors are sharded by rows. The pickles are as in torch 2.13: a 1-D mesh over all ranks, `Shard(0)`. Every rank's file
has the replicated tensors (buffers, steps) and the values that are not tensors. In a sharded source, a tensor with
several rows in one piece is replicated. If the source has no sharded tensor, all tensors with rows are split.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from math import prod

from shardckpt.boxes import Shape, chunk_box, full_box, strides
from shardckpt.encodings.pickle_writer import GlobalCall, GlobalName
from shardckpt.errors import UsageError
from shardckpt.manifest import Path, dotted, unflatten
from shardckpt.offline.targets.base import PlannedRanks, RankOptions
from shardckpt.offline.targets.torch_archive import Content, archive_file, full_content
from shardckpt.offline.write.conversion import Layout, PlannedFiles
from shardckpt.offline.write.stream import OutputFile, TensorPart
from shardckpt.plan.layout.output_files import OutputTensor
from shardckpt.plan.naming.fqn import require_matches
from shardckpt.reader import Reader
from shardckpt.readers.torchsave.writer import Storage, TensorValue, plan_archive
from shardckpt.storage.replaceable import FolderKind

MAX_RANKS = 4096  # each file lists all ranks: work grows with the square of their number

_STATE = "state"
_TENSOR = "torch.distributed.tensor"
_LAYOUT = "torch.distributed._mesh_layout"


_KIND = FolderKind("one checkpoint of a torch file for each rank", payload=re.compile(r"rank\d+\.pt"))


def plan_rank_files(reader: Reader, options: RankOptions, title: str) -> PlannedRanks:
    """Plan one file per rank, `rank0.pt` first."""
    if options.world_size > MAX_RANKS:
        raise UsageError(
            f"--world-size of {title} is too large", found=options.world_size, expected=f"at most {MAX_RANKS}"
        )
    content = full_content(reader, title, allow_loss=options.allow_loss)
    split = sharded_paths(content, options.keep_whole)
    world, keeps_order = options.world_size, reader.manifest.keeps_order
    payload = tuple(_rank_file(content, split, rank, world, keeps_order=keeps_order) for rank in range(world))
    layout = Layout(payload, {})
    copies = {path: 1 if path in split else options.world_size for path in content.arrays}
    nbytes = sum(tensor.nbytes * copies[path] for path, tensor in content.arrays.items())
    files = PlannedFiles(_KIND, payload[-1].name, lambda *_: layout, nbytes)
    return PlannedRanks(files, content.arrays, content.ties, (*reader.manifest.warnings, *content.left_out))


def sharded_paths(content: Content, keep_whole: Sequence[str]) -> frozenset[Path]:
    """Return the paths of the tensors to shard; all others are replicated."""
    names = {path: dotted(path) for path in content.arrays}
    require_matches(keep_whole, list(names.values()))
    kept = {path for path, name in names.items() if any(fnmatchcase(name, glob) for glob in keep_whole)}
    return frozenset(_sharded_in_source(content.arrays) - kept)


def _sharded_in_source(arrays: Mapping[Path, OutputTensor]) -> set[Path]:
    """Return the tensors to split: the ones that the source splits, or all."""
    rows = {path: tensor for path, tensor in arrays.items() if tensor.shape and 0 not in tensor.shape}
    pieces = {path: sum(1 for piece in tensor.entry.pieces if piece.box.volume) for path, tensor in rows.items()}
    if all(count < 2 for count in pieces.values()):
        return set(rows)
    # A tensor with one row would be split if it had more.
    return {path for path, tensor in rows.items() if pieces[path] > 1 or tensor.shape[0] == 1}


def _rank_file(content: Content, split: Collection[Path], rank: int, world: int, *, keeps_order: bool) -> OutputFile:
    parts: list[TensorPart] = []
    storages = [Storage("int32", world)]
    mesh = _mesh(rank, world)
    made: dict[Path, object] = {}
    for path, tensor in content.arrays.items():
        box = chunk_box(tensor.shape, 0, world, rank) if path in split else None
        local = TensorValue(len(storages), tensor.dtype, tensor.shape if box is None else box.size)
        storages.append(Storage(tensor.dtype, prod(local.shape)))
        parts.append(TensorPart(tensor, full_box(tensor.shape) if box is None else box))
        made[path] = local if box is None else _dtensor(local, tensor.shape, mesh)
    leaves = {
        path: made[content.ties.get(path, path)] for path in content.order if content.ties.get(path, path) in made
    }
    ranks = b"".join(number.to_bytes(4, "little") for number in range(world))
    value = unflatten({**leaves, **content.values}, "the checkpoint", has_lists=True)
    archive = plan_archive(value, storages, keeps_order=keeps_order)
    return archive_file(f"rank{rank}.pt", archive, parts, len(parts), head=ranks)


def _instance(module: str, name: str, state: Mapping[str, object]) -> GlobalCall:
    return GlobalCall(GlobalName(module, name), state=dict(state), is_new=True)


def _mesh(rank: int, world: int) -> GlobalCall:
    """Return the mesh over all ranks, as one rank stores it."""
    axis = _instance(_LAYOUT, "_FlatLayout", {"shape": (world,), "stride": (1,)})
    state: dict[str, object] = {
        "_device_type": "cpu",
        "_layout": _instance(_LAYOUT, "_MeshLayout", {"axes": (axis,)}),
        "_rank_map": TensorValue(0, "int32", (world,)),  # storage 0 has the list of ranks
        "_mesh_dim_names": None,
        "_root_mesh": None,
        "_preserve_rank_order": False,  # read by torch 2.15; earlier ones ignore it
        "_flatten_rank_map": tuple(range(world)),
        "_thread_id": None,
        "_flatten_mapping": {},
        "_dim_group_names": ["0"],
        "_rank": rank,
        "_coordinate_on_dim": (rank,),
        "_hash": None,
    }
    return _instance("torch.distributed.device_mesh", "DeviceMesh", state)._replace(is_shared=True)


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
