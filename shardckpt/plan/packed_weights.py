"""Weights that are stored as several tensors: wrapper subclasses, by their records, and bitsandbytes, by its names.

Names and metadata of written subclasses follow torchao (`prototype/safetensors/safetensors_support.py`, 0.18), whose
files transformers reads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NoReturn

from shardckpt.errors import UnsupportedError
from shardckpt.manifest import Manifest, ObjectEntry, Path, TensorEntry, dotted
from shardckpt.plan.subclass_record import SUBCLASS, SubclassRecord, find_record

# Classes that torchao reads from safetensors.
READABLE = frozenset(
    f"torchao.{name}"
    for name in (
        *("Float8Tensor", "Int4PlainInt32Tensor", "Int4Tensor", "Int4TilePackedTo4dTensor", "Int8Tensor"),
        *("IntxUnpackedToInt8Tensor", "MXTensor", "NVFP4Tensor"),
    )
)

_NAMES = "tensor_names"  # key of torchao's metadata
_TEXT = ".quant_state.bitsandbytes__"
_4BIT = ("nf4", "fp4")
_4BIT_PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
_8BIT_SCALES, _8BIT_FORMAT = "SCB", "weight_format"


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight that several tensors make up."""

    record: SubclassRecord
    parts: Mapping[str, str]  # tensor's name by inner tensor's name

    @property
    def kind(self) -> str:
        """Package and class, such as `torchao.Int8Tensor`."""
        return f"{self.record.name.partition('.')[0]}.{self.record.kind}"

    def name_for_torchao(self, name: str) -> PackedWeight:
        """Return the weight with the parts' names that torchao reads. The weight's name needs a dot."""
        module, _, last = name.rpartition(".")
        return replace(self, parts={inner: f"{module}._{last}_{inner}" for inner in self.parts})


def drop_records(manifest: Manifest, paths: Iterable[Path]) -> Iterator[Path]:
    """Yield paths to values, without the records of wrapper subclasses."""
    return (path for path in paths if _find_record(manifest.objects[path]) is None)


def _find_record(entry: ObjectEntry) -> SubclassRecord | None:
    return find_record({SUBCLASS: entry.value}) if entry.path and entry.path[-1] == SUBCLASS else None


def find_subclasses(manifest: Manifest, tensors: Mapping[str, TensorEntry]) -> dict[str, PackedWeight]:
    """Return the wrapper subclasses among a model's tensors, by the weight's name."""
    records = {path[:-1]: record for path, entry in manifest.objects.items() if (record := _find_record(entry))}
    parts: dict[str, dict[str, str]] = {}
    found: dict[str, PackedWeight] = {}
    for name, entry in tensors.items() if records else ():
        if entry.path[:-1] in records:
            inner = str(entry.path[-1])
            weight = name.removesuffix(f".{inner}")
            found[weight] = PackedWeight(records[entry.path[:-1]], parts.setdefault(weight, {}))
            parts[weight][inner] = name
    return found


def find_bitsandbytes(
    tensors: Mapping[str, TensorEntry], read_form: Callable[[str], tuple[str, tuple[int, ...], object]], dtype: str
) -> dict[str, PackedWeight]:
    """Return the weights of bitsandbytes, by name. `read_form` returns dtype, shape and values from a text's name."""
    found: dict[str, PackedWeight] = {}
    for name in tensors:
        weight, mark, kind = name.rpartition(_TEXT)
        module, _, last = name.rpartition(".")
        if mark and weight in tensors and kind in _4BIT:
            record = SubclassRecord(f"bitsandbytes.{kind}", "bitsandbytes", *read_form(name))
            parts = {part: f"{weight}.{part}" for part in _4BIT_PARTS if f"{weight}.{part}" in tensors}
            found[weight] = PackedWeight(record, {"weight": weight, **parts, "text": name})
        elif last == _8BIT_SCALES:
            weight = f"{module}.weight" if module else "weight"
            if weight in tensors and tensors[weight].dtype == "int8":
                record = SubclassRecord("bitsandbytes.int8", "bitsandbytes", dtype, tensors[weight].shape, None)
                marker = name.removesuffix(_8BIT_SCALES) + _8BIT_FORMAT
                more = {_8BIT_FORMAT: marker} if marker in tensors else {}
                found[weight] = PackedWeight(record, {"weight": weight, _8BIT_SCALES: name, **more})
    return found


def find_torchao(metadata: Mapping[str, str], tensors: Mapping[str, TensorEntry]) -> dict[str, PackedWeight]:
    """Return the weights that torchao's metadata of safetensors files describes, by name."""
    found: dict[str, PackedWeight] = {}
    for name, text in metadata.items() if _NAMES in metadata else ():
        described = _parse(text) if "." in name else {}
        kind, data, inner = (described.get(key) for key in ("_type", "_data", "_tensor_data_names"))
        if f"torchao.{kind}" not in READABLE or not isinstance(data, dict) or not isinstance(inner, list):
            continue
        dtype = data.get("dtype")
        record = SubclassRecord(
            f"torchao.{kind}", "torchao", str(dtype.get("_data")) if isinstance(dtype, dict) else "", (), data
        )
        weight = PackedWeight(record, {str(part): "" for part in inner}).name_for_torchao(name)
        values = tensors.get(weight.parts.get("qdata", ""))
        if values is not None:
            found[name] = replace(weight, record=replace(record, shape=values.shape))
    return found


def describe_as_plain(metadata: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """Return torchao's metadata of safetensors files after some weights were dequantized."""
    plain = json.dumps({"_type": "Tensor"})
    return {**metadata, **{name: plain for name in names if name in metadata}} if _NAMES in metadata else {**metadata}


def _parse(text: str) -> dict[str, object]:
    """Return a JSON object; an empty one for other text."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def build_metadata(packed: Mapping[str, PackedWeight], names: Iterable[str]) -> dict[str, str]:
    """Return torchao's safetensors metadata for a model's written tensors, given the weights of readable classes."""
    owners = {part: name for name, weight in packed.items() for part in weight.parts.values()}
    weights = list(dict.fromkeys(owners.get(name, name) for name in names))
    texts = {name: _describe(packed[name]) if name in packed else {"_type": "Tensor"} for name in weights}
    return {**{name: json.dumps(text) for name, text in texts.items()}, _NAMES: json.dumps(weights)}


def _describe(weight: PackedWeight) -> dict[str, object]:
    return {
        "_type": weight.record.kind,
        "_data": _encode(weight.record.context),
        "_tensor_data_names": list(weight.parts),
    }


def _encode(value: object) -> object:
    """Return a record's context as torchao's JSON."""
    if isinstance(value, list):
        return [_encode(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    if "$dtype" in value:
        return {"_type": "torch.dtype", "_data": value["$dtype"]}
    if "$tuple" in value:
        return _encode(value["$tuple"])
    for tag in ("$enum", "$type"):
        pair = value.get(tag)
        if isinstance(pair, list) and len(pair) == 2:
            return {"_type": pair[0], "_data": _encode(pair[1])}
    return {key: _encode(item) for key, item in value.items()}


def find_named(tensors: Mapping[str, TensorEntry], metadata: Mapping[str, str]) -> dict[str, PackedWeight]:
    """Return the weights that names or metadata describe, without the content of texts."""
    return {**find_torchao(metadata, tensors), **find_bitsandbytes(tensors, lambda _: ("", (), None), "")}


def refuse_rules(owners: Mapping[str, str]) -> NoReturn:
    """Refuse rules for names and shapes."""
    raise UnsupportedError(
        "rules and --rename cannot change a weight that several tensors make up",
        where=next(iter(owners.values())),
        fix="Write the checkpoint with --dequantize first; rules can change the result.",
    )


def list_low_bit(manifest: Manifest, root: Path) -> Iterator[str]:
    """Yield a warning about low-bit moments in an optimizer."""
    paths = [path[:-1] for path, entry in manifest.objects.items() if path[: len(root)] == root and _find_record(entry)]
    if paths:
        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        yield f"{dotted(paths[0])}{more}: low-bit moments, written as inner tensors, which no other tool reads"


def iter_parts(packed: Mapping[str, PackedWeight]) -> Iterator[tuple[str, str]]:
    """Yield each part's name and its weight's."""
    for name, weight in packed.items():
        for part in weight.parts.values():
            yield part, name
