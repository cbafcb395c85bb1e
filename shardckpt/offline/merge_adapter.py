"""Implement `merge-adapter`: add LoRA adapters to their base, block by block."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Unpack

from shardckpt.boxes import Box, Shape, flat_index
from shardckpt.dtypes import FLOATS, nbytes
from shardckpt.encodings.element_values import numpy_dtype
from shardckpt.errors import NameCollisionError, UnsupportedError, UsageError
from shardckpt.events.progress import OnProgress
from shardckpt.manifest import TensorEntry
from shardckpt.offline.consolidate import export, parse_options
from shardckpt.offline.results.contents import Report
from shardckpt.offline.select.config_files import TIE
from shardckpt.offline.select.options import MergeParams, parse_dtype
from shardckpt.offline.select.selection import Selection
from shardckpt.plan.adapter import LowRank, Merge, list_changed, plan_merge
from shardckpt.plan.layout.coverage import locate
from shardckpt.plan.layout.output_files import Change, OutputTensor
from shardckpt.plan.naming.fqn import is_embedding, is_head, name_model, read_tie
from shardckpt.plan.naming.model_files import ADAPTER_CONFIG
from shardckpt.plan.naming.sections import Sections
from shardckpt.plan.quantized_weights import QUANTIZATION_CONFIG, TRANSPOSED, find_quantized
from shardckpt.reader import Reader
from shardckpt.readers.chunk_reader import PieceReader, ReadItem, same_bits
from shardckpt.readers.huggingface.index_files import read_json
from shardckpt.readers.registry import open_checkpoint, resolve_step
from shardckpt.storage.resolve_url import as_url

_FILES = ("adapter_model.safetensors", "adapter_model.bin")
_UNTIED = (
    "{} and {} were tied in the base and differ now: config.json may have to say so (a written one has"
    " tie_word_embeddings false for a head)"
)
_NEW = "{} is not in the base: load the result with the adapter's model class, a classifier with num_labels={}"


def merge_adapter(
    base: str | os.PathLike[str],
    adapter: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    dst: str | os.PathLike[str],
    *,
    adapter_weights: Sequence[float] | None = None,
    on_progress: OnProgress | None = None,
    **options: Unpack[MergeParams],
) -> Report:
    """Write a base model with one or more LoRA adapters merged into it.

    The result is the base plus `weight * scale * (B @ A)` for each adapter: `peft` calls this `cat`; its `linear` adds
    the factors instead. Products and sums are computed in float32 (float64 for a base in float64), and rounded once to
    the written dtype. Fully trained tensors replace the base's tensors. Memory is constant except for one factor per
    adapter at a time.

    Args:
        base: Checkpoint of the adapters' base model, in any readable format.
        adapter: Folder with `adapter_config.json` and the adapter's tensors, as `peft` saves it; or several folders.
        dst: As for `consolidate`.
        adapter_weights: A factor for each adapter's products, in adapter order; 1 by default.
        on_progress: As for `consolidate`.
        **options: Fields in `Options`, for the base; `part` is the model.

    Returns:
        Report with the written files.

    Raises:
        UsageError: The call is invalid: an adapter belongs to another base, two adapters set one tensor, or an option
            does not apply.
        CheckpointError: A checkpoint is damaged, incomplete or unsafe, or the kind of adapter cannot be merged (DoRA
            and others, by name).
        StorageError: Reading or writing failed.

    Examples:
        >>> shardckpt.merge_adapter("llama", "run/adapter", "merged")  # doctest: +SKIP
        >>> shardckpt.merge_adapter("llama", ["a", "b"], "merged", adapter_weights=[0.7, 0.3])  # doctest: +SKIP
    """
    chosen = parse_options("merge_adapter", {**options, "part": options.get("part", "model")})
    if chosen.part != "model":
        raise UsageError("an adapter changes a model alone", found=f"part {chosen.part}", expected="model")
    base, dst = resolve_step(base), as_url(dst)
    paths = [adapter] if not isinstance(adapter, Sequence) or isinstance(adapter, str) else list(adapter)
    weights = _check_weights(adapter_weights, len(paths))
    opened = [_open_adapter(resolve_step(path), weight) for path, weight in zip(paths, weights, strict=True)]

    def change(selection: Selection, config: Mapping[str, object]) -> Selection:
        _require_plain_base(selection, config, opened)
        merged = _merge(_add_tied_heads(selection, config, opened), opened, config, parse_dtype(chosen.dtype))
        new = {tensor.name for tensor in merged.model} - {tensor.name for tensor in selection.model}
        values = {TIE: False} if any(map(is_head, new)) else {}
        return replace(
            merged,
            warnings=(*merged.warnings, *_warnings_of_ties(merged, config)),
            config_values={**merged.config_values, **values},
        )

    return export(base, dst, chosen, on_progress, change=change)


def _check_weights(weights: Sequence[float] | None, adapters: int) -> Sequence[float]:
    """Return one finite weight for each adapter."""
    if not adapters:
        raise UsageError("merge-adapter needs an adapter", found="none")
    if weights is None:
        return [1.0] * adapters
    if len(weights) != adapters:
        raise UsageError(
            "each adapter must have a weight", found=f"{len(weights)} for {adapters}", fix="Give all weights, or none."
        )
    for weight in weights:
        if not isinstance(weight, (int, float)) or not isfinite(weight):
            raise UsageError("the weight of an adapter must be a finite number", found=repr(weight))
    return [float(weight) for weight in weights]


@dataclass(frozen=True, slots=True)
class _Adapter:
    reader: Reader
    config: Mapping[str, Any]
    weight: float  # multiplies its products
    entries: Mapping[str, TensorEntry]  # by name without wrappers

    @property
    def url(self) -> str:
        """Path or URL of the adapter."""
        return self.reader.store.url


def _open_adapter(path: str, weight: float) -> _Adapter:
    opened = open_checkpoint(path)
    names = {entry.name for entry in opened.store.list()}
    if ADAPTER_CONFIG not in names:
        raise UsageError(
            f"found no adapter: {ADAPTER_CONFIG} is missing",
            where=path,
            fix="The base comes first, then adapters: the folders that peft wrote.",
        )
    file = next((name for name in _FILES if name in names), "")
    if file and file not in opened.manifest.files:  # readers prefer the model in a folder that has both
        opened = open_checkpoint(f"{opened.store.url.rstrip('/')}/{file}")
    entries = name_model(opened.manifest, Sections((), (), ())).tensors
    return _Adapter(opened, read_json(opened.store, ADAPTER_CONFIG), weight, entries)


def _require_plain_base(selection: Selection, config: Mapping[str, object], adapters: Sequence[_Adapter]) -> None:
    """Require that adapters change only weights with plain numbers."""
    tensors = {tensor.name: tensor for tensor in selection.model}
    quantized = find_quantized({name: tensor.entry for name, tensor in tensors.items()})
    plain = {name for name, tensor in tensors.items() if tensor.entry.dtype in FLOATS} - {*quantized.values()}
    plain |= {name for name, tensor in tensors.items() if tensor.change is not None}  # dequantized fp8
    changed = {selection.ties.get(name, name) for each in adapters for name in list_changed(each.entries, each.url)}
    for name in sorted(changed):
        module, _, last = name.rpartition(".")
        packed = quantized.get(module, name) if last == "weight" else name
        if name in plain or packed not in tensors:
            continue
        method = config.get(QUANTIZATION_CONFIG)
        kind = method.get("quant_method") if isinstance(method, Mapping) else None
        raise UnsupportedError(
            f"the base is quantized, and nothing can be added to {name}",
            found=f"{packed} in {tensors[packed].entry.dtype}{f', quant_method {kind}' if kind else ''}",
            expected=", ".join(sorted(FLOATS)),
            fix="Merge into the base before quantization, or dequantize it: --dequantize takes torchao, bitsandbytes"
            " and fp8 with *_scale_inv; for others use transformers' model.dequantize().",
        )


def _add_tied_heads(selection: Selection, config: Mapping[str, object], adapters: Sequence[_Adapter]) -> Selection:
    """Add the heads that adapters change and that the files lack because the model ties them."""
    known = {tensor.name for tensor in selection.model} | selection.ties.keys()
    embedding = next((tensor for tensor in selection.model if is_embedding(tensor.name)), None)
    if embedding is None or not _may_tie(config):
        return selection
    changed = {name for each in adapters for name in list_changed(each.entries, each.url)}
    heads = sorted(filter(is_head, changed - known))
    return replace(
        selection,
        model=(*selection.model, *(replace(embedding, name=head) for head in heads)),  # starts as the embedding
        order=(*selection.order, *heads),
        warnings=(*selection.warnings, *(_UNTIED.format(head, embedding.name) for head in heads)),
    )


def _merge(selection: Selection, adapters: Sequence[_Adapter], config: Mapping[str, object], dtype: str) -> Selection:
    """Return the base's tensors with their changes, and new ones, which are cast to `dtype` unless it is empty."""
    is_transposed = config.get("model_type") in TRANSPOSED
    tensors = {tensor.name: tensor for tensor in selection.model}
    known = {**{n: t.shape for n, t in tensors.items()}, **{n: tensors[k].shape for n, k in selection.ties.items()}}
    given = {name: tensor.change for name, tensor in tensors.items() if tensor.change is not None}
    changes: dict[str, Change] = {}
    own: set[str] = set()
    resized: dict[str, TensorEntry] = {}
    for adapter in adapters:
        shapes = {name: entry.shape for name, entry in resized.items()}
        merge = _plan_changes(adapter, known | shapes, is_transposed=is_transposed)
        _add_changes(adapter, merge, known | shapes, changes, given)
        own |= merge.own
        for name, shape in merge.shapes.items():
            resized[name] = TensorEntry((name,), shape, adapter.entries[merge.replaced[name]].stored, ())
    ties, warnings = dict(selection.ties), list(selection.warnings)
    for name, kept in selection.ties.items():
        if name in own or kept in own:
            del ties[name]
            tensors[name] = replace(tensors[kept], name=name)
            warnings.append(_UNTIED.format(name, kept))
        elif name in changes:
            if kept in changes:
                raise UnsupportedError("the adapter changes one tensor under two names", found=f"{name}, {kept}")
            changes[kept] = changes.pop(name)  # one tensor with two names: both change, as in the module
    order = [name for name in selection.order if name in tensors] or list(tensors)
    for name, entry in resized.items():
        if name not in tensors:
            order.append(name)
            warnings.append(_NEW.format(name, entry.shape[0] if entry.shape else 1))
        chosen = tensors[name].dtype if name in tensors else dtype or entry.stored
        tensors[name] = OutputTensor(name, entry, chosen)
    return replace(
        selection,
        model=tuple(replace(tensors[name], change=changes.get(name, tensors[name].change)) for name in order),
        ties=ties,
        warnings=tuple(warnings),
        config_values={**selection.config_values, **_describe_vocabulary(resized, known)},
    )


def _describe_vocabulary(resized: Mapping[str, TensorEntry], known: Mapping[str, Shape]) -> dict[str, object]:
    """Return the vocabulary size for the config if the adapter has changed it."""
    rows = [entry.shape[0] for name, entry in resized.items() if name in known]
    return {"vocab_size": rows[0]} if rows else {}


def _warnings_of_ties(merged: Selection, config: Mapping[str, object]) -> list[str]:
    """Return warnings about changed embeddings that only the merged model's head also uses."""
    names = {tensor.name for tensor in merged.model} | merged.ties.keys()
    if not _may_tie(config) or any(map(is_head, names)):
        return []
    changed = [tensor.name for tensor in merged.model if tensor.change is not None]
    return [
        f"{name} is changed, and the model may tie its head to it ({TIE}): then the merged model's head changes too,"
        " unlike the head in the model with the adapter"
        for name in changed
        if is_embedding(name)
    ]


def _may_tie(config: Mapping[str, object]) -> bool:
    """Return True unless a model's config says that the head is not tied; classes have different defaults."""
    return bool(config) and read_tie(config) is not False


def _plan_changes(adapter: _Adapter, known: Mapping[str, Shape], *, is_transposed: bool) -> Merge:
    """Plan an adapter's changes; require equal values for one tensor's two names."""
    shapes = {name: entry.shape for name, entry in adapter.entries.items()}
    merge = plan_merge(adapter.config, shapes, known, adapter.url, is_transposed=is_transposed)
    for pair in merge.repeated:
        first, second = (adapter.entries[name] for name in pair)
        is_like = (first.shape, first.stored) == (second.shape, second.stored)
        if not is_like or not same_bits(adapter.reader, adapter.reader.manifest, first, second):
            raise NameCollisionError(
                "two adapter tensors belong to one base tensor, and their values differ",
                where=adapter.url,
                found=", ".join(pair),
                fix="Write the adapter without one of them: consolidate with --exclude.",
            )
    return merge


def _add_changes(
    adapter: _Adapter,
    merge: Merge,
    known: Mapping[str, Shape],
    changes: dict[str, Change],
    given: Mapping[str, Change],
) -> None:
    """Add an adapter's changes to the earlier adapters' changes."""
    wanted = list(adapter.entries.values())
    entries = dict(zip(adapter.entries, locate(adapter.reader, adapter.reader.manifest, wanted), strict=True))
    if merge.own and adapter.weight != 1:
        raise UsageError(
            "an adapter with fully trained tensors must have the weight 1",
            where=adapter.url,
            found=f"{adapter.weight} for {min(merge.own)}",
        )
    source = _AdapterReader(adapter.reader, entries)
    copies = {name: _TensorCopy(source, stored) for name, stored in merge.replaced.items()}
    sums: dict[str, Change] = {}
    shapes = {**known, **merge.shapes}
    for each in merge.added:
        low_rank = replace(each, scale=each.scale * adapter.weight)
        before = copies.get(each.weight) or changes.get(each.weight) or given.get(each.weight)
        sums[each.weight] = _LowRankSum(source, low_rank, shapes[each.weight], before)
    for name in copies.keys() | sums.keys():
        before = changes.get(name)
        if before is not None and (name in copies or not isinstance(before, _LowRankSum) or before.has_copy):
            raise UsageError(f"two adapters change {name}, and one of them sets it in full", where=adapter.url)
    changes |= {**copies, **sums}


class _AdapterReader:
    """Reads the adapter's factors as numbers; caches the last full one."""

    def __init__(self, reader: Reader, entries: Mapping[str, TensorEntry]) -> None:
        self._pieces, self._entries = PieceReader(reader.store), entries
        self._lock = threading.Lock()
        self._kept: tuple[str, str, NDArray[Any]] | None = None
        for name, entry in entries.items():
            if entry.stored not in FLOATS:
                raise UnsupportedError(f"{name} must have a float type", where=reader.store.url, found=entry.stored)

    def shape(self, name: str) -> Shape:
        return self._entries[name].shape

    def raw(self, name: str, box: Box) -> tuple[memoryview, str]:
        """Return the bytes in a tensor's box, and their dtype."""
        entry = self._entries[name]
        data = memoryview(bytearray(nbytes(entry.stored, box.volume)))
        with self._lock:  # threads share the decoders of encoded factors
            self._pieces.fill([ReadItem(entry.pieces, box, entry.stored, data)])
        return data, entry.stored

    def rows(self, name: str, dim: int, start: int, size: int, kind: str) -> NDArray[Any]:
        """Return a factor's rows (`dim` 0) or columns (`dim` 1); further dimensions count as columns."""
        shape = self._entries[name].shape
        offset = tuple(start if d == dim else 0 for d in range(len(shape)))
        box = Box(offset, tuple(size if d == dim else n for d, n in enumerate(shape)))
        found = _numbers(*self.raw(name, box), kind)
        return found.reshape(box.size[0], -1)

    def full_factor(self, name: str, kind: str) -> NDArray[Any]:
        kept = self._kept
        if kept is None or kept[:2] != (name, kind):
            kept = self._kept = (name, kind, self.rows(name, 0, 0, self._entries[name].shape[0], kind))
        return kept[2]


def _numbers(data: memoryview, stored: str, kind: str) -> NDArray[Any]:
    return np.frombuffer(data, numpy_dtype(stored)).astype(numpy_dtype(kind), copy=False)


class _LowRankSum:
    """Adds two factors' product to a weight."""

    def __init__(self, source: _AdapterReader, low_rank: LowRank, shape: Shape, before: Change | None) -> None:
        self._source, self._low_rank, self._shape, self._before = source, low_rank, shape, before

    @property
    def has_copy(self) -> bool:
        """Whether an adapter contains the weight to which products are added."""
        is_sum_of_copy = isinstance(self._before, _LowRankSum) and self._before.has_copy
        return is_sum_of_copy or isinstance(self._before, _TensorCopy)

    def __call__(self, box: Box, data: memoryview, stored: str) -> tuple[memoryview, str]:
        """Return the weight plus the product in a box, in the computation's dtype."""
        if self._before is not None:
            data, stored = self._before(box, data, stored)
        kind = "float64" if stored == "float64" else "float32"
        found = _numbers(data, stored, kind) + self._added(box, kind).reshape(-1)
        return memoryview(found).cast("B"), kind

    def _added(self, box: Box, kind: str) -> NDArray[Any]:
        """Return the product for a block: several rows, or a part of one row."""
        # Dimensions after the first (in a convolution's kernel) count as one.
        columns = self._shape[1] if len(self._shape) == 2 else int(np.prod(self._shape[1:]))
        first = flat_index(self._shape, box.offset)
        row, column = divmod(first, columns)
        rows = max(box.volume // columns, 1)
        width = columns if box.volume >= columns else box.volume
        factors, source = self._low_rank, self._source
        if factors.is_turned:
            a, b = source.rows(factors.a, 1, row, rows, kind), source.rows(factors.b, 0, column, width, kind)
            return np.asarray((a.T @ b.T) * np.asarray(factors.scale, a.dtype))
        b = source.rows(factors.b, 0, row, rows, kind)
        a = source.full_factor(factors.a, kind)[:, column : column + width]
        return np.asarray((b @ a) * np.asarray(factors.scale, a.dtype))


class _TensorCopy:
    """Replaces a tensor's values with another tensor's values."""

    def __init__(self, source: _AdapterReader, name: str) -> None:
        self._source, self._name = source, name

    def __call__(self, box: Box, data: memoryview, stored: str) -> tuple[memoryview, str]:  # noqa: ARG002
        """Return the other tensor's values in a box."""
        return self._source.raw(self._name, box)
