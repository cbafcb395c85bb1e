"""What DeepSpeed's state files say, checked: shapes by name, flat tensors, an optimizer's slots. No tensor is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from shardckpt.boxes import Shape
from shardckpt.errors import FormatError, UnsupportedError
from shardckpt.format.encodings.pickle_reader import InstanceStub
from shardckpt.manifest import Manifest, ObjectEntry, Path, TensorEntry, unflatten

_MOST_ELEMENTS = 1 << 60
_MOST_DIMS = 64
_MOST_RANKS = 1 << 24
_OPTIM = "optimizer_state_dict"
_FLAT_KEYS = ("single_partition_of_fp32_groups", "fp32_flat_groups")
_BASE_KEYS = ("base_optimizer_state", _OPTIM)
_MODEL_KEYS = frozenset(
    ("module", "buffer_names", "param_shapes", "frozen_param_shapes", "shared_params", "frozen_param_fragments")
)
"""What of a model file describes the model; the rest is the training loop's."""

Slot = TensorEntry | ObjectEntry


class StateFileContents:
    """Values and tensors of state files, by path below each file.

    Args:
        manifest: Of all files, paths starting with the file's name.
        url: Of the store, for messages.
    """

    def __init__(self, manifest: Manifest, url: str) -> None:
        self.url = url
        self.aliases = manifest.aliases
        self.tensors: dict[str, dict[Path, TensorEntry]] = {file: {} for file in manifest.files}
        self.objects: dict[str, dict[Path, ObjectEntry]] = {file: {} for file in manifest.files}
        for path, tensor in manifest.tensors.items():
            self.tensors[str(path[0])][path[1:]] = tensor
        for path, value in manifest.objects.items():
            self.objects[str(path[0])][path[1:]] = value

    def value(self, file: str, *path: str | int) -> object:
        """Return a value without tensors; None where there is none."""
        n = len(path)
        values = {p[n:]: entry.value for p, entry in self.objects[file].items() if p[:n] == path}
        return unflatten(values) if values else None

    def children(self, file: str, *path: str | int) -> dict[str | int, TensorEntry]:
        """Return the tensors directly in a dict or list."""
        n = len(path)
        return {p[n]: entry for p, entry in self.tensors[file].items() if len(p) == n + 1 and p[:n] == path}

    def where(self, file: str) -> str:
        """Return a file's place, for messages."""
        return f"{self.url}/{file}"


@dataclass(frozen=True, slots=True)
class ModelState:
    """The fields of one model file.

    Attributes:
        file: The file.
        module: Name to array of the module's state dict; in stage 3 placeholders without elements, but for buffers.
        shapes: For each flat tensor, name to shape of its parameters in order; None where no optimizer was split.
        frozen: Name to shape of the parameters that no optimizer has.
        fragments: Name to what this file holds of them.
        shared: Further name of a parameter to its first.
        step: Optimizer steps taken; -1 where it is not said.
        world: Data-parallel ranks; 0 where it is not said.
        tensor_ranks: Ranks that tensor parallelism cuts parameters for; 0 where it is not said.
    """

    file: str
    module: Mapping[str, TensorEntry]
    shapes: tuple[Mapping[str, Shape], ...] | None
    frozen: Mapping[str, Shape]
    fragments: Mapping[str, TensorEntry]
    shared: Mapping[str, str]
    step: int
    world: int
    tensor_ranks: int


@dataclass(frozen=True, slots=True)
class PartitionOptimState:
    """The fields of one rank's optimizer file.

    Attributes:
        file: The file.
        rank: Data-parallel rank, by the file's name.
        is_split: Whether each parameter is cut by itself (stage 3).
        flats: The rank's flat tensors of master weights.
        counts: Ranks that share each of them.
        slots: For each flat tensor, name to value of what the optimizer keeps.
        base: Path of the inner optimizer's state in the file.
        paddings: Elements behind each parameter of each flat tensor; None where they lie back to back.
        starts: For each flat tensor, name to elements and first element of this rank's part, where the file says so.
    """

    file: str
    rank: int
    is_split: bool
    flats: tuple[TensorEntry, ...]
    counts: tuple[int, ...]
    slots: tuple[Mapping[str, Slot], ...]
    base: Path
    paddings: tuple[tuple[int, ...], ...] | None
    starts: tuple[Mapping[str, tuple[int, int]], ...] | None = field(default=None)


def read_model_state(contents: StateFileContents, file: str) -> ModelState:
    """Read the fields of a model file.

    Raises:
        FormatError: It is not as DeepSpeed writes one.
    """
    where = contents.where(file)
    said = contents.value(file, "param_shapes")
    dims = contents.value(file, "checkpoint_parallel_dimensions")
    tensor_ranks = dims.get("tp_degree") if isinstance(dims, dict) else None
    return ModelState(
        file,
        {str(name): entry for name, entry in contents.children(file, "module").items()},
        None if said is None else tuple(_shapes(group, where) for group in _groups(said, where)),
        _shapes(contents.value(file, "frozen_param_shapes") or {}, where),
        {str(name): entry for name, entry in contents.children(file, "frozen_param_fragments").items()},
        _names(contents.value(file, "shared_params") or {}, where),
        _count(contents.value(file, "global_steps"), -1),
        _count(contents.value(file, "dp_world_size"), 0),
        _count(tensor_ranks, 0),
    )


def read_loop_state(contents: StateFileContents, file: str) -> Iterator[tuple[Path, Slot]]:
    """Yield what a model file holds beside the model, by path."""
    for held in (contents.tensors[file], contents.objects[file]):
        for path, entry in held.items():
            if path and path[0] not in _MODEL_KEYS and not (isinstance(entry, ObjectEntry) and entry.value is None):
                yield path, entry


def read_optim_state(contents: StateFileContents, file: str, rank: int) -> PartitionOptimState:
    """Read the fields of a rank's optimizer file.

    Raises:
        FormatError: It is not as DeepSpeed writes one.
        UnsupportedError: It is of a stage or version that is laid out in another way.
    """
    where = contents.where(file)
    is_split = bool(contents.children(file, _OPTIM, _FLAT_KEYS[1]))
    flats = _in_order(contents.children(file, _OPTIM, _FLAT_KEYS[is_split]), where)
    if not flats:
        raise UnsupportedError(
            "the optimizer file holds no flat tensors of master weights",
            where=where,
            found=", ".join(sorted({str(p[1]) for p in contents.tensors[file] if p[:1] == (_OPTIM,) and len(p) > 1})),
            expected=" or ".join(_FLAT_KEYS),
            fix="Files of DeepSpeed before 0.3.17, and those of offloaded NVMe swapping, are not read.",
        )
    if any(len(entry.shape) != 1 for entry in flats):
        raise FormatError(
            "a flat tensor of master weights is not flat", where=where, found=str([e.shape for e in flats])[:80]
        )
    if contents.value(file, _OPTIM, "ds_zero_partition_groups") is not None:
        raise UnsupportedError(
            "experts are cut over ranks of their own (AutoEP with ZeRO-3)",
            where=where,
            fix="Convert it with DeepSpeed's ds_to_universal.py, and point at the result.",
        )
    base: Path = (_OPTIM, _BASE_KEYS[is_split])
    return PartitionOptimState(
        file,
        rank,
        is_split,
        flats,
        _partition_counts(contents.value(file, _OPTIM, "partition_count"), len(flats), where),
        tuple(_slots(contents, file, base, unit) for unit in range(len(flats))),
        base,
        _paddings(contents.value(file, _OPTIM, "param_alignment_paddings"), where),
        _starts(contents.value(file, _OPTIM, "param_slice_mappings")),
    )


def read_groups(contents: StateFileContents, file: str, base: Path) -> list[dict[str, Slot]]:
    """Return what the optimizer's groups say, by key; nothing for elastic checkpoints, which leave them out."""
    root = (*base, "param_groups")
    said = contents.value(file, *root)
    told: dict[int, dict[str, Slot]] = {}
    listed = dict(enumerate(said)) if isinstance(said, list) else said if isinstance(said, dict) else {}
    for i, group in listed.items():
        if type(i) is int and isinstance(group, dict):
            told[i] = {str(key): ObjectEntry((str(key),), value) for key, value in group.items()}
    for path, tensor in contents.tensors[file].items():
        if path[: len(root)] == root and len(path) == len(root) + 2 and type(path[-2]) is int:
            told.setdefault(path[-2], {})[str(path[-1])] = tensor
    return [told[i] for i in sorted(told)]


def read_stage(contents: StateFileContents, file: str) -> int | None:
    """Return the ZeRO stage that an optimizer file names; None where it names none."""
    said = contents.value(file, _OPTIM, "zero_stage")
    if isinstance(said, InstanceStub) and said.args and type(said.args[0]) is int:
        return said.args[0]
    return said if type(said) is int else None


def _in_order(found: Mapping[str | int, TensorEntry], where: str) -> tuple[TensorEntry, ...]:
    if sorted(found, key=str) != sorted(range(len(found)), key=str):
        raise FormatError("the flat tensors are no list", where=where, found=list(found)[:8])
    return tuple(found[i] for i in range(len(found)))


def _slots(contents: StateFileContents, file: str, base: Path, unit: int) -> dict[str, Slot]:
    """Return what the optimizer keeps of one flat tensor; elastic checkpoints leave `state` out."""
    found: dict[str, Slot] = {}
    for root in ((*base, "state", unit), (*base, unit)):
        n = len(root)
        for path, tensor in contents.tensors[file].items():
            if path[:n] == root and len(path) == n + 1:
                found[str(path[n])] = tensor
        for path, value in contents.objects[file].items():
            if path[:n] == root and len(path) == n + 1:
                found[str(path[n])] = value
        if found:
            break
    return found


def _partition_counts(said: object, flats: int, where: str) -> tuple[int, ...]:
    counts = said if isinstance(said, list | tuple) else [said] * flats
    if len(counts) != flats or not all(type(n) is int and 0 < n <= _MOST_RANKS for n in counts):
        raise FormatError("the number of ranks is none", where=where, found=said, expected=f"{flats} counts")
    return tuple(n for n in counts if isinstance(n, int))


def _paddings(said: object, where: str) -> tuple[tuple[int, ...], ...] | None:
    if said is None:
        return None
    groups = said if isinstance(said, list | tuple) else ()
    found = tuple(tuple(group) if isinstance(group, list | tuple) else () for group in groups)
    if not all(type(n) is int and 0 <= n < 1 << 20 for group in found for n in group):
        raise FormatError("the paddings between parameters are no numbers", where=where, found=said)
    return found


def _starts(said: object) -> tuple[Mapping[str, tuple[int, int]], ...] | None:
    """Return where the file says that parameters lie in its rank's flat tensors; None where it says nothing known."""
    if not isinstance(said, list | tuple):
        return None
    found: list[Mapping[str, tuple[int, int]]] = []
    for group in said:
        part: dict[str, tuple[int, int]] = {}
        for name, address in group.items() if isinstance(group, dict) else ():
            told = address.state if isinstance(address, InstanceStub) else None
            numel, start = (told.get("numel"), told.get("start")) if isinstance(told, dict) else (None, None)
            if type(numel) is not int or type(start) is not int:
                return None
            part[str(name)] = (numel, start)
        found.append(part)
    return tuple(found)


def _groups(said: object, where: str) -> Sequence[object]:
    """Return the groups of shapes; files of before 0.4 hold one group without a list around it."""
    if isinstance(said, list | tuple):
        return said
    if isinstance(said, dict):
        return [said]
    raise FormatError("param_shapes is no list", where=where, found=type(said).__name__)


def _shapes(said: object, where: str) -> dict[str, Shape]:
    if not isinstance(said, dict):
        raise FormatError("the shapes of parameters are no dict", where=where, found=type(said).__name__)
    found: dict[str, Shape] = {}
    for name, shape in said.items():
        if not isinstance(name, str) or not _is_shape(shape):
            raise FormatError(f"parameter {str(name)[:80]!r} has no shape", where=where, found=shape)
        found[name] = tuple(shape)
    return found


def _is_shape(value: object) -> bool:
    return (
        isinstance(value, list | tuple)
        and len(value) <= _MOST_DIMS
        and all(type(n) is int and 0 <= n < _MOST_ELEMENTS for n in value)
        and prod(value) < _MOST_ELEMENTS
    )


def _names(said: object, where: str) -> dict[str, str]:
    pairs = said.items() if isinstance(said, dict) else ()
    if not isinstance(said, dict) or not all(isinstance(a, str) and isinstance(b, str) for a, b in pairs):
        raise FormatError("shared_params are no names", where=where, found=said)
    return {str(a): str(b) for a, b in pairs}


def _count(said: object, default: int) -> int:
    return said if type(said) is int and 0 <= said <= 1 << 60 else default
