"""Parse and check DeepSpeed's state files; reads no tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from shardckpt.boxes import Shape
from shardckpt.encodings.budget import check_list, is_shape
from shardckpt.encodings.pickle_reader import InstanceStub
from shardckpt.errors import FormatError, UnsupportedError
from shardckpt.manifest import Manifest, ObjectEntry, Path, TensorEntry, unflatten
from shardckpt.readers.merge_shards import split_content

_MAX_RANKS = 1 << 24
_OPTIM = "optimizer_state_dict"
_FLAT_KEYS = ("single_partition_of_fp32_groups", "fp32_flat_groups")
_BASE_KEYS = ("base_optimizer_state", _OPTIM)
# Keys of a model file that describe the model; other keys belong to the training loop.
_MODEL_KEYS = frozenset(
    ("module", "buffer_names", "param_shapes", "frozen_param_shapes", "shared_params", "frozen_param_fragments")
)

Slot = TensorEntry | ObjectEntry


class StateFileContents:
    """Values and tensors in state files, by file and path."""

    def __init__(self, manifest: Manifest, url: str) -> None:
        self.url = url
        self.aliases = manifest.aliases
        self._files, _ = split_content(manifest, [(file,) for file in manifest.files])

    def tensors(self, file: str) -> Mapping[Path, TensorEntry]:
        """Return the tensors in a file."""
        return self._files[file,].tensors

    def objects(self, file: str) -> Mapping[Path, ObjectEntry]:
        """Return the values in a file."""
        return self._files[file,].objects

    def value(self, file: str, *path: str | int) -> object:
        """Return a value without tensors; None if it does not exist."""
        n = len(path)
        values = {p[n:]: entry.value for p, entry in self.objects(file).items() if p[:n] == path}
        return unflatten(values) if values else None

    def children(self, file: str, *path: str | int) -> dict[str | int, TensorEntry]:
        """Return the tensors directly in a dict or list."""
        n = len(path)
        return {p[n]: entry for p, entry in self.tensors(file).items() if len(p) == n + 1 and p[:n] == path}

    def where(self, file: str) -> str:
        """Return a file's URL, for messages."""
        return f"{self.url}/{file}"


@dataclass(frozen=True, slots=True)
class ModelState:
    """A model file's fields."""

    file: str
    # State dict of the module; in stage 3 placeholders without elements, except buffers.
    module: Mapping[str, TensorEntry]
    # For each flat tensor, the shapes of its parameters in order; None if no optimizer state is partitioned.
    shapes: tuple[Mapping[str, Shape], ...] | None
    frozen: Mapping[str, Shape]  # shapes of the parameters without optimizer state
    fragments: Mapping[str, TensorEntry]  # partitions of the frozen parameters in this file
    shared: Mapping[str, str]  # further name of a parameter to its first name
    step: int  # number of optimizer steps; -1 if not stored
    world: int  # number of data-parallel ranks; 0 if not stored
    tensor_ranks: int  # number of tensor-parallel ranks; 0 if not stored


@dataclass(frozen=True, slots=True)
class PartitionOptimState:
    """A rank's optimizer file's fields."""

    file: str
    rank: int  # data-parallel rank, from the file's name
    is_split: bool  # whether each parameter is partitioned individually (stage 3)
    flats: tuple[TensorEntry, ...]  # flat tensors of the rank's master weights
    counts: tuple[int, ...]  # number of ranks that share each flat tensor
    slots: tuple[Mapping[str, Slot], ...]  # for each flat tensor, the optimizer's slots
    base: Path  # path of the inner optimizer's state in the file
    # Padding elements after each parameter in each flat tensor; None without padding.
    paddings: tuple[tuple[int, ...], ...] | None
    # For each flat tensor, name to element count and first element of this rank's partition, if stored.
    starts: tuple[Mapping[str, tuple[int, int]], ...] | None = field(default=None)


def read_model_state(contents: StateFileContents, file: str) -> ModelState:
    """Read a model file's fields."""
    where = contents.where(file)
    shapes = contents.value(file, "param_shapes")
    dims = contents.value(file, "checkpoint_parallel_dimensions")
    tensor_ranks = dims.get("tp_degree") if isinstance(dims, dict) else None
    return ModelState(
        file,
        {str(name): entry for name, entry in contents.children(file, "module").items()},
        None if shapes is None else tuple(_parse_shapes(group, where) for group in _parse_groups(shapes, where)),
        _parse_shapes(contents.value(file, "frozen_param_shapes") or {}, where),
        {str(name): entry for name, entry in contents.children(file, "frozen_param_fragments").items()},
        _parse_ties(contents.value(file, "shared_params") or {}, where),
        _count_or(contents.value(file, "global_steps"), -1),
        _count_or(contents.value(file, "dp_world_size"), 0),
        _count_or(tensor_ranks, 0),
    )


def read_loop_state(contents: StateFileContents, file: str) -> Iterator[tuple[Path, Slot]]:
    """Yield a model file's values that do not belong to the model, by path."""
    for entries in (contents.tensors(file), contents.objects(file)):
        for path, entry in entries.items():
            if path and path[0] not in _MODEL_KEYS and not (isinstance(entry, ObjectEntry) and entry.value is None):
                yield path, entry


def read_optim_state(contents: StateFileContents, file: str, rank: int) -> PartitionOptimState:
    """Read the fields in a rank's optimizer file."""
    where = contents.where(file)
    is_split = bool(contents.children(file, _OPTIM, _FLAT_KEYS[1]))
    flats = _in_order(contents.children(file, _OPTIM, _FLAT_KEYS[is_split]), where)
    if not flats:
        raise UnsupportedError(
            "the optimizer file has no flat master weights",
            where=where,
            found=", ".join(sorted({str(p[1]) for p in contents.tensors(file) if p[:1] == (_OPTIM,) and len(p) > 1})),
            expected=" or ".join(_FLAT_KEYS),
            fix="Files by DeepSpeed before 0.3.17, and by NVMe swapping, are not read.",
        )
    if any(len(entry.shape) != 1 for entry in flats):
        raise FormatError(
            "a flat tensor with master weights is not flat", where=where, found=str([e.shape for e in flats])[:80]
        )
    if contents.value(file, _OPTIM, "ds_zero_partition_groups") is not None:
        raise UnsupportedError(
            "experts are sharded over separate ranks (AutoEP with ZeRO-3)",
            where=where,
            fix="Convert it with DeepSpeed's ds_to_universal.py, and point at the result.",
        )
    base: Path = (_OPTIM, _BASE_KEYS[is_split])
    return PartitionOptimState(
        file,
        rank,
        is_split,
        flats,
        _parse_counts(contents.value(file, _OPTIM, "partition_count"), len(flats), where),
        tuple(_read_slots(contents, file, base, unit) for unit in range(len(flats))),
        base,
        _parse_paddings(contents.value(file, _OPTIM, "param_alignment_paddings"), where),
        _parse_starts(contents.value(file, _OPTIM, "param_slice_mappings")),
    )


def read_groups(contents: StateFileContents, file: str, base: Path) -> list[dict[str, Slot]]:
    """Return the options in the optimizer's groups; empty for elastic checkpoints."""
    root = (*base, "param_groups")
    value = contents.value(file, *root)
    groups: dict[int, dict[str, Slot]] = {}
    items = dict(enumerate(value)) if isinstance(value, list) else value if isinstance(value, dict) else {}
    for i, group in items.items():
        if type(i) is int and isinstance(group, dict):
            groups[i] = {str(key): ObjectEntry((str(key),), option) for key, option in group.items()}
    for path, tensor in contents.tensors(file).items():
        if path[: len(root)] == root and len(path) == len(root) + 2 and type(path[-2]) is int:
            groups.setdefault(path[-2], {})[str(path[-1])] = tensor
    return [groups[i] for i in sorted(groups)]


def _in_order(found: Mapping[str | int, TensorEntry], where: str) -> tuple[TensorEntry, ...]:
    if sorted(found, key=str) != sorted(range(len(found)), key=str):
        raise FormatError("the flat tensors must be a list", where=where, found=list(found)[:8])
    return tuple(found[i] for i in range(len(found)))


def _read_slots(contents: StateFileContents, file: str, base: Path, unit: int) -> dict[str, Slot]:
    """Return one flat tensor's slots; elastic checkpoints omit `state`."""
    for root in ((*base, "state", unit), (*base, unit)):
        n = len(root)
        slots: dict[str, Slot] = {}
        for entries in (contents.tensors(file), contents.objects(file)):
            slots |= {str(p[n]): entry for p, entry in entries.items() if p[:n] == root and len(p) == n + 1}
        if slots:
            return slots
    return {}


def _parse_counts(value: object, flats: int, where: str) -> tuple[int, ...]:
    counts = value if isinstance(value, list | tuple) else [value] * flats
    if len(counts) != flats or not all(type(n) is int and 0 < n <= _MAX_RANKS for n in counts):
        raise FormatError("the world size is malformed", where=where, found=value, expected=f"{flats} counts")
    return tuple(n for n in counts if isinstance(n, int))


def _parse_paddings(value: object, where: str) -> tuple[tuple[int, ...], ...] | None:
    if value is None:
        return None
    groups = value if isinstance(value, list | tuple) else ()
    paddings = tuple(tuple(group) if isinstance(group, list | tuple) else () for group in groups)
    if not all(type(n) is int and 0 <= n < 1 << 20 for group in paddings for n in group):
        raise FormatError("the paddings between parameters must be numbers", where=where, found=value)
    return paddings


def _parse_starts(value: object) -> tuple[Mapping[str, tuple[int, int]], ...] | None:
    """Return the parameter ranges in the rank's flat tensors; None if unknown."""
    if not isinstance(value, list | tuple):
        return None
    starts: list[Mapping[str, tuple[int, int]]] = []
    for group in value:
        part: dict[str, tuple[int, int]] = {}
        for name, address in group.items() if isinstance(group, dict) else ():
            fields = address.state if isinstance(address, InstanceStub) else None
            numel, start = (fields.get("numel"), fields.get("start")) if isinstance(fields, dict) else (None, None)
            if type(numel) is not int or type(start) is not int:
                return None
            part[str(name)] = (numel, start)
        starts.append(part)
    return tuple(starts)


def _parse_groups(value: object, where: str) -> Sequence[object]:
    """Return the groups with their shapes."""
    # Files before version 0.4 contain one group without a surrounding list.
    return [value] if isinstance(value, dict) else check_list(value, where)


def _parse_shapes(value: object, where: str) -> dict[str, Shape]:
    if not isinstance(value, dict):
        raise FormatError("parameter shapes must be a dict", where=where, found=type(value).__name__)
    shapes: dict[str, Shape] = {}
    for name, shape in value.items():
        if not isinstance(name, str) or not is_shape(shape):
            raise FormatError(f"parameter {str(name)[:80]!r} has no shape", where=where, found=shape)
        shapes[name] = tuple(shape)
    return shapes


def _parse_ties(value: object, where: str) -> dict[str, str]:
    pairs = value.items() if isinstance(value, dict) else ()
    if not isinstance(value, dict) or not all(isinstance(a, str) and isinstance(b, str) for a, b in pairs):
        raise FormatError("shared_params must be names", where=where, found=value)
    return {str(a): str(b) for a, b in pairs}


def _count_or(value: object, default: int) -> int:
    return value if type(value) is int and 0 <= value <= 1 << 60 else default
