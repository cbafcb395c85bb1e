"""Wrapper subclasses: tensors whose elements are in inner tensors, such as torchao's quantized weights.

A wrapper subclass is saved as a dict of its inner tensors and a record, which describes its class and context as data.
Each inner tensor has boxes of its own. They follow the boxes of the full tensor, if the class is known here.

The methods `__tensor_flatten__` and `__tensor_unflatten__` are torch's (`torch/utils/_python_dispatch.py`). Layouts of
inner tensors follow torchao 0.18: `quantization/quantize_/workflows/`, `optim/subclass_8bit.py`, `subclass_fp8.py`.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from math import isfinite, prod
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from shardckpt.boxes import Box, Shape, full_box
from shardckpt.errors import ShardckptError, UnsupportedError, describe_with_class
from shardckpt.plan.subclass_record import SubclassRecord
from shardckpt.state.local.tensor_shards import LocalShard, TensorShards, get_tensor_shards


class Replicated(Enum):
    """Marks an inner tensor that every rank has completely."""

    REPLICATED = "replicated"


# How an inner tensor's elements follow the full tensor's: elements per block along each dimension; elements per block
# of the flattened tensor; or not at all.
Blocks = tuple[int, ...] | int | Replicated


class InnerTensors(NamedTuple):
    """A wrapper subclass's shards on this rank."""

    record: SubclassRecord
    arrays: Mapping[str, TensorShards]  # by inner tensor's name


class _Class(NamedTuple):
    """What is known of a class beyond torch's two methods."""

    module: str  # to import it from
    # Blocks by inner tensor, for a context and the shapes of a tensor and its inner ones.
    get_blocks: Callable[[Any, Shape, Mapping[str, Shape]], Mapping[str, Blocks]]
    # The context's entries that do not depend on a shard's shape; and the context for a shard's record, shape and inner
    # tensors.
    get_context: Callable[[Any], Any] = lambda tensor: tensor.__tensor_flatten__()[1]
    make_context: Callable[[Any, SubclassRecord, Shape, Mapping[str, torch.Tensor]], Any] = lambda context, *_: context
    dtypes: Mapping[str, Sequence[torch.dtype]] = MappingProxyType({})  # of codes, by inner tensor


def take_apart(array: TensorShards, where: str) -> InnerTensors:
    """Return a wrapper subclass's record and the shards of its inner tensors.

    Raises:
        UnsupportedError: The context is not data, or a box divides a block, or the class's layout is unknown.
    """
    (shard,) = array.shards
    tensor: Any = shard.tensor
    inner = dict(_iter_inner(tensor))
    record = _describe(tensor, array, where)
    if shard.box == full_box(array.shape):
        return InnerTensors(record, {name: _as_full(value) for name, value in inner.items()})
    shapes = {name: tuple(value.shape) for name, value in inner.items()}
    blocks = _get_blocks(record, tuple(tensor.shape), shapes)
    arrays = {}
    for name, value in inner.items():
        if name not in blocks:
            raise UnsupportedError(
                "shards of this tensor class cannot be saved: where its inner tensors belong is unknown",
                where=where,
                found=f"{type(tensor).__name__}.{name}",
                fix="Save it unsharded, or dequantized (`dequantize()`).",
            )
        arrays[name] = _place(value, blocks[name], array.shape, shard.box, f"{where}.{name}")
    return InnerTensors(record, arrays)


def _get_blocks(record: SubclassRecord, shape: Shape, inner: Mapping[str, Shape]) -> Mapping[str, Blocks]:
    """Return how the inner tensors follow a tensor; empty if its class is unknown."""
    known = _find_class(record)
    return {} if known is None else known.get_blocks(record.context, shape, inner)


def _iter_inner(tensor: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for name in tensor.__tensor_flatten__()[0]:
        yield name, getattr(tensor, name).detach()


def _as_full(value: torch.Tensor) -> TensorShards:
    shape = tuple(value.shape)
    return TensorShards(shape, value.dtype, (LocalShard(full_box(shape), value),))


# ------------------------------------------------------------------------------------------------------------- records


def fill_inner(tensor: torch.Tensor, saved: torch.Tensor) -> bool:
    """Copy a wrapper subclass's inner tensors to another one with the same class and context; False if they differ."""
    own, other = (take_apart(get_tensor_shards(each), "") for each in (tensor, saved))
    if find_difference(own.record, other.record) is not None or own.arrays.keys() != other.arrays.keys():
        return False
    pairs = [(own.arrays[name], other.arrays[name]) for name in own.arrays]
    if any((one.shape, one.dtype) != (two.shape, two.dtype) or not one.shards for one, two in pairs):
        return False
    with torch.no_grad():
        for one, two in pairs:
            one.shards[0].tensor.copy_(two.shards[0].tensor)
    return True


def _describe(tensor: Any, array: TensorShards, where: str) -> SubclassRecord:
    kind = type(tensor)
    package = kind.__module__.partition(".")[0]
    known = _CLASSES.get(f"{package}.{kind.__qualname__}")
    context = tensor.__tensor_flatten__()[1] if known is None else known.get_context(tensor)
    return SubclassRecord(
        f"{kind.__module__}.{kind.__qualname__}",
        f"{package} {getattr(sys.modules.get(package), '__version__', 'of unknown version')}",
        _name_dtype(tensor.dtype),
        array.shape,
        _encode(context, f"{where}: context of {kind.__name__}"),
    )


def _name_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _encode(value: Any, where: str) -> Any:
    """Return a context as JSON: tagged objects for what JSON does not have."""
    if value is None or type(value) in (bool, int, str) or (type(value) is float and isfinite(value)):
        return value
    if isinstance(value, torch.dtype):
        return {"$dtype": _name_dtype(value)}
    if isinstance(value, Enum):
        return {"$enum": [type(value).__name__, value.name]}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: _encode(getattr(value, field.name), where) for field in dataclasses.fields(value)}
        return {"$type": [type(value).__name__, fields]}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {"$type": [type(value).__name__, {name: _encode(getattr(value, name), where) for name in value._fields}]}
    if isinstance(value, (list, tuple)):
        items = [_encode(item, where) for item in value]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, dict):
        return {str(key): _encode(item, where) for key, item in value.items()}
    raise UnsupportedError(
        "a tensor of this class cannot be saved: its context must be plain values",
        where=where,
        found=type(value).__name__,
        fix="Leave it out and keep it with `torch.save`, or save it dense (`dequantize()`).",
    )


def find_difference(own: SubclassRecord, saved: SubclassRecord | None) -> str | None:
    """Return how a saved record differs from this tensor's, as text; None if a load can fill the tensor."""
    if saved is None:
        return f"it was saved as a plain tensor, and this is a {own.kind}"
    if saved.name != own.name:
        return f"it was saved as a {saved.kind}, and this is a {own.kind}"
    if saved.shape != own.shape:
        return f"shape differs: found {list(saved.shape)}, expected {list(own.shape)}"
    if saved.dtype != own.dtype:
        return f"dtype differs: found {saved.dtype}, expected {own.dtype}"
    theirs, ours = saved.context, own.context
    if theirs == ours:
        return None
    if isinstance(theirs, Mapping) and isinstance(ours, Mapping):
        keys = [key for key in {**ours, **theirs} if theirs.get(key) != ours.get(key)]
        texts = [f"{key}: found {theirs.get(key)}, expected {ours.get(key)}" for key in keys]
        return f"{own.kind} differs in {'; '.join(texts)}"
    return f"{own.kind} differs: found {theirs}, expected {ours}"


# --------------------------------------------------------------------------------------------------------------- boxes


def _place(value: torch.Tensor, blocks: Blocks, shape: Shape, box: Box, where: str) -> TensorShards:
    """Return an inner tensor's shard, for a box in the full tensor."""
    full, inner = _locate(value, blocks, shape, box, where)
    if inner.size != tuple(value.shape):
        raise UnsupportedError(
            "an inner tensor must have one element for each block",
            where=where,
            found=list(value.shape),
            expected=list(inner.size),
        )
    return TensorShards(full, value.dtype, (LocalShard(inner, value),))


def _locate(value: torch.Tensor, blocks: Blocks, shape: Shape, box: Box, where: str) -> tuple[Shape, Box]:
    """Return an inner tensor's full shape, and its box for a box in the full tensor."""
    if isinstance(blocks, Replicated):
        return tuple(value.shape), full_box(tuple(value.shape))
    place = _place_run if isinstance(blocks, int) else _place_by_dim
    return place(blocks, shape, box, where)  # type: ignore[arg-type]


def _place_by_dim(blocks: Sequence[int], shape: Shape, box: Box, where: str) -> tuple[Shape, Box]:
    rows = zip(blocks, shape, box.offset, box.size, strict=True)
    for dim, (block, length, start, size) in enumerate(rows):
        if start % block or ((start + size) % block and start + size != length):
            raise _split_error(where, f"dimension {dim}", (start, start + size, length), block)
    full = tuple(-(-length // block) for block, length in zip(blocks, shape, strict=True))
    offset = tuple(start // block for block, start in zip(blocks, box.offset, strict=True))
    return full, Box(offset, tuple(-(-size // block) for block, size in zip(blocks, box.size, strict=True)))


def _place_run(block: int, shape: Shape, box: Box, where: str) -> tuple[Shape, Box]:
    """As above, for a tensor that is flattened into blocks."""
    if box.size[1:] != shape[1:]:
        raise UnsupportedError(
            "blocks of a flattened tensor can be sharded along the first dimension only",
            where=where,
            found=f"{list(box.size)} of {list(shape)}",
            fix="Shard it with Shard(0).",
        )
    row, total = prod(shape[1:]), prod(shape)
    start, stop = box.offset[0] * row, (box.offset[0] + box.size[0]) * row
    if start % block or (stop % block and stop != total):
        raise _split_error(where, "elements", (start, stop, total), block)
    return (-(-total // block),), Box((start // block,), (-(-(stop - start) // block),))


def _split_error(where: str, what: str, run: tuple[int, int, int], block: int) -> ShardckptError:
    start, stop, length = run
    nearest = round(stop / block) * block or block
    return UnsupportedError(
        "a shard must not divide a block of a quantized tensor",
        where=where,
        found=f"{what} {start} to {stop} of {length}",
        expected=f"multiples of {block}, such as {min(nearest, length)}",
        fix="Shard it over another number of ranks, or save it unsharded.",
    )


# -------------------------------------------------------------------------------------------------------------- build


def build(
    record: SubclassRecord, inner: Mapping[str, torch.Tensor], where: str, shape: Shape | None = None
) -> torch.Tensor | None:
    """Build a wrapper subclass; None if its class is unknown here, or its package is missing.

    `shape` is the shape of a shard, if it is not the full tensor's.
    """
    known = _find_class(record)
    kind = _import_named(known.module, record.kind) if known is not None else None
    if known is None or kind is None:
        return None
    size = record.shape if shape is None else shape
    try:
        context = known.make_context(_decode(record.context), record, size, inner)
        stride = tuple(prod(size[at + 1 :]) for at in range(len(size)))
        built: torch.Tensor = kind.__tensor_unflatten__(dict(inner), context, torch.Size(size), stride)
        misfit = next(_find_misfits(record, known, built, inner, size), None)
    except (ShardckptError, *_MISFITS) as error:
        raise _build_error(record, where, describe_with_class(error)) from error
    if misfit is not None:
        raise _build_error(record, where, misfit)
    return built


_MISFITS = (LookupError, TypeError, ValueError, RuntimeError, AttributeError, AssertionError, ArithmeticError)


def _find_misfits(
    record: SubclassRecord, known: _Class, built: torch.Tensor, inner: Mapping[str, torch.Tensor], size: Shape
) -> Iterator[str]:
    """Yield where a record contradicts the tensor that was built from it, or its inner tensors."""
    if (tuple(built.shape), _name_dtype(built.dtype)) != (size, record.dtype):
        found = f"{_name_dtype(built.dtype)} {list(built.shape)}"
        yield f"inner tensors for {found}, and a record for {record.dtype} {list(size)}"
    names: Any = built
    if unknown := sorted(inner.keys() - set(names.__tensor_flatten__()[0])):
        yield f"inner tensors that {record.kind} does not have: {', '.join(unknown)}"
    blocks = known.get_blocks(record.context, size, {name: tuple(value.shape) for name, value in inner.items()})
    for name, value in inner.items() if prod(size) else ():
        if name in known.dtypes and value.dtype not in known.dtypes[name]:
            yield f"{name} is {_name_dtype(value.dtype)}"
        rule = blocks.get(name, Replicated.REPLICATED)
        expected = _locate(value, rule, size, full_box(size), name)[0]
        if prod(expected) != value.numel():  # one scale for all elements has no dimensions in some classes
            yield f"{name} has {value.numel()} elements, and its blocks need {prod(expected)}"


def _build_error(record: SubclassRecord, where: str, found: str) -> ShardckptError:
    return UnsupportedError(
        "a tensor cannot be built from its inner tensors",
        where=where,
        found=f"{record.name}: {found}",
        fix=f"It was saved with {record.package}; use this version, or read its inner tensors with `open`.",
    )


def build_empty(
    record: SubclassRecord, inner: Mapping[str, tuple[Shape, torch.dtype]], box: Box, device: torch.device, where: str
) -> torch.Tensor | None:
    """Build a wrapper subclass for a box, with uninitialized inner tensors; None as for `build`."""
    shape = record.shape
    try:
        blocks = _get_blocks(record, shape, {name: size for name, (size, _) in inner.items()})
    except _MISFITS as error:
        raise _build_error(record, where, describe_with_class(error)) from error
    tensors = {}
    for name, (size, dtype) in inner.items():
        like = torch.empty(size, dtype=dtype, device="meta")
        if box != full_box(shape):
            if name not in blocks:
                return None
            size = _locate(like, blocks[name], shape, box, f"{where}.{name}")[1].size
        tensors[name] = torch.zeros(size, dtype=dtype, device=device)
    return build(record, tensors, where, box.size)


def _import_named(module: str, name: str) -> Any:
    """Return a class that this module's tables name; None if its package is missing."""
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None


def _decode(value: Any) -> Any:
    """Return a context for JSON from a file. Only classes in `_VALUES` are called."""
    if isinstance(value, list):
        return list(map(_decode, value))
    if not isinstance(value, dict):
        return value
    if "$dtype" in value:
        return find_dtype(value["$dtype"])
    if "$tuple" in value:
        return tuple(map(_decode, value["$tuple"]))
    if "$enum" in value:
        kind, name = value["$enum"]
        return _import_named(_VALUES[kind], kind)[name]
    if "$type" in value:
        kind, fields = value["$type"]
        return _import_named(_VALUES[kind], kind)(**{key: _decode(item) for key, item in fields.items()})
    return {key: _decode(item) for key, item in value.items()}


def find_dtype(name: object) -> torch.dtype:
    """Return a dtype by the name that torch spells."""
    found = getattr(torch, str(name), None)
    if not isinstance(found, torch.dtype):
        raise UnsupportedError("torch has no such type", found=name, fix="Read it with a newer torch.")
    return found


# Values in contexts that may be built from a file: plain data, by name, with the module that defines each.
_VALUES = {
    "KernelPreference": "torchao.quantization.quantize_.common",
    "Float8MMConfig": "torchao.float8.inference",
    "MappingType": "torchao.quantization",
    "PerRow": "torchao.quantization",
    "PerTensor": "torchao.quantization",
    "QuantizeTensorToFloat8Kwargs": "torchao.quantization.quantize_.workflows",
    "QuantizeTensorToInt8Kwargs": "torchao.quantization.quantize_.workflows",
}


# ------------------------------------------------------------------------------------------------------- known classes


def _find_class(record: SubclassRecord) -> _Class | None:
    return _CLASSES.get(f"{record.name.partition('.')[0]}.{record.kind}")


def _get_weight_blocks(context: Any, shape: Shape, inner: Mapping[str, Shape]) -> Mapping[str, Blocks]:
    del inner
    block = _decode(context["block_size"])
    return {"qdata": (1,) * len(shape), "scale": tuple(block), "zero_point": tuple(block)}


def _get_nf4_blocks(context: Any, shape: Shape, inner: Mapping[str, Shape]) -> Mapping[str, Blocks]:
    del shape, inner
    return {
        "quantized_data": 2,
        "quantized_scalers": context["block_size"],
        "quantization_factor": context["block_size"] * context["scaler_block_size"],
        "scaler_mean": Replicated.REPLICATED,
        "nf4": Replicated.REPLICATED,
    }


def _make_nf4_context(context: Any, record: SubclassRecord, size: Shape, inner: Mapping[str, torch.Tensor]) -> Any:
    made = _import_named("torchao.quantization.quantize_.workflows.nf4.nf4_tensor", "SubclassTensorArgs")
    stride = tuple(prod(size[at + 1 :]) for at in range(len(size)))
    meta = made(torch.Size(size), stride, 0, find_dtype(record.dtype), inner["quantized_data"].device, False)
    return {**context, "n_blocks": inner["quantized_scalers"].numel(), "tensor_meta": meta}


def _get_state_blocks(context: Any, shape: Shape, inner: Mapping[str, Shape]) -> Mapping[str, Blocks]:
    del context
    codes: Blocks = (1,) * len(shape) if inner["codes"] == shape else 2
    return {"codes": codes, "scale": prod(shape) // prod(inner["scale"]), "qmap": Replicated.REPLICATED}


_TORCHAO = "torchao.quantization"
_FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
_INT8 = _Class(_TORCHAO, _get_weight_blocks, dtypes={"qdata": [torch.int8]})
_PACKED = ("Int4Tensor", "Int4PlainInt32Tensor", "Int4TilePackedTo4dTensor")  # blocks follow no dimension

_CLASSES: Mapping[str, _Class] = {
    "torchao.Int8Tensor": _INT8,
    "torchao.IntxUnpackedToInt8Tensor": _INT8,
    "torchao.Float8Tensor": _INT8._replace(dtypes={"qdata": _FLOAT8}),
    **dict.fromkeys((f"torchao.{name}" for name in _PACKED), _Class(_TORCHAO, lambda *_: {})),
    "torchao.NF4Tensor": _Class(
        "torchao.quantization.quantize_.workflows.nf4.nf4_tensor",
        _get_nf4_blocks,
        lambda tensor: {"block_size": tensor.block_size, "scaler_block_size": tensor.scaler_block_size},
        _make_nf4_context,
        {"quantized_data": [torch.uint8]},
    ),
    "torchao.OptimState8bit": _Class("torchao.optim.subclass_8bit", _get_state_blocks),
    "torchao.OptimState4bit": _Class(
        "torchao.optim.subclass_4bit",
        _get_state_blocks,
        lambda tensor: {"signed": tensor.signed},
        lambda context, record, size, _: [context["signed"], torch.Size(size), find_dtype(record.dtype)],
    ),
    "torchao.OptimStateFp8": _Class("torchao.optim.subclass_fp8", _get_state_blocks),
}
