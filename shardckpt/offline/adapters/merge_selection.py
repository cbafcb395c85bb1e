"""Merge adapters into a selection of their base's tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace

from shardckpt.boxes import Shape
from shardckpt.dtypes import FLOATS
from shardckpt.errors import NameCollisionError, UnsupportedError, UsageError
from shardckpt.manifest import TensorEntry
from shardckpt.offline.adapters.open_adapter import Adapter, find_prefix
from shardckpt.offline.adapters.values import (
    AdapterChange,
    AdapterReader,
    BiasSum,
    FiniteChange,
    LowRankSum,
    RowsCopy,
    ScaledSum,
    TensorCopy,
)
from shardckpt.offline.select.config_files import TIE
from shardckpt.offline.select.selection import Selection
from shardckpt.plan.adapter.merge_plan import Merge, list_changed, plan_merge
from shardckpt.plan.adapter.names import is_trained, sort_names
from shardckpt.plan.layout.coverage import locate
from shardckpt.plan.layout.output_files import Change, OutputTensor
from shardckpt.plan.naming.fqn import is_embedding, is_head, read_tie, require_unique
from shardckpt.plan.naming.weights import PEFT_PART, to_base_name
from shardckpt.plan.quantized_weights import QUANTIZATION_CONFIG, find_quantized
from shardckpt.readers.chunk_reader import same_bits
from shardckpt.storage.store import Store

__all__ = ["merge_selection"]

_UNTIED = (
    "{} and {} were tied in the base and differ now: config.json may have to say so (a written one has"
    " tie_word_embeddings false for a head)"
)
_NEW = "{} is not in the base: load the result with the adapter's model class, a classifier with num_labels={}"


def merge_selection(
    selection: Selection,
    store: Store,
    config: Mapping[str, object],
    adapters: Sequence[Adapter],
    dtype: str,
    *,
    allow_overflow: bool,
) -> Selection:
    """Return a base's tensors with their changes, and new ones, which are cast to `dtype` unless it is empty."""
    selection = _name_as_base(selection, store.url)
    _require_plain_base(selection, config, adapters)
    merged = _merge(_add_tied_heads(selection, config, adapters), store, adapters, config, dtype)
    heads = {_find_head(*tie) for tie in selection.ties.items() - merged.ties.items()} - {""}
    heads |= set(
        filter(is_head, {tensor.name for tensor in merged.model} - {tensor.name for tensor in selection.model})
    )
    values = {TIE: False} if heads else {}
    merged = _write_shared_biases(merged, heads)
    before = {tensor.name: tensor.change for tensor in selection.model}
    return replace(
        merged,
        model=tuple(
            tensor
            if allow_overflow or tensor.change is None or tensor.change is before.get(tensor.name)
            else replace(tensor, change=FiniteChange(tensor.change, tensor.name))
            for tensor in merged.model
        ),
        warnings=(*merged.warnings, *_warnings_of_ties(merged, config)),
        config_values={**merged.config_values, **values},
    )


def _name_as_base(selection: Selection, where: str) -> Selection:
    """Return a selection under the base's names, without adapters, if it has a PEFT model's names."""
    names = {tensor.name: 0 for tensor in selection.model}
    if not any(map(PEFT_PART.search, names)):
        return selection
    prefix = find_prefix(names, where)
    renamed = {
        name: to_base_name(name.removeprefix(prefix))
        for name in (*names, *selection.ties, *selection.order)
        if not is_trained(name)
    }
    require_unique(renamed)
    return replace(
        selection,
        model=tuple(replace(tensor, name=renamed[tensor.name]) for tensor in selection.model if tensor.name in renamed),
        ties={renamed[name]: renamed[kept] for name, kept in selection.ties.items() if {name, kept} <= renamed.keys()},
        order=tuple(renamed[name] for name in selection.order if name in renamed),
        packed={renamed.get(name, name): weight for name, weight in selection.packed.items()},
    )


def _require_plain_base(selection: Selection, config: Mapping[str, object], adapters: Sequence[Adapter]) -> None:
    """Require that adapters change only weights with plain numbers."""
    tensors = {tensor.name: tensor for tensor in selection.model}
    quantized = find_quantized({name: tensor.entry for name, tensor in tensors.items()})
    plain = {name for name, tensor in tensors.items() if tensor.entry.dtype in FLOATS} - {*quantized.values()}
    plain |= {name for name, tensor in tensors.items() if tensor.change is not None}  # dequantized fp8
    changed = {selection.ties.get(name, name) for name in _list_changed(tensors, adapters)}
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


def _list_changed(tensors: Mapping[str, OutputTensor], adapters: Sequence[Adapter]) -> set[str]:
    """Return the names of the tensors that adapters change."""
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    return {name for each in adapters for name in list_changed(each.config, each.entries, shapes, each.url)}


def _add_tied_heads(selection: Selection, config: Mapping[str, object], adapters: Sequence[Adapter]) -> Selection:
    """Add the heads that adapters change and that the files lack because the model ties them."""
    tensors = {tensor.name: tensor for tensor in selection.model}
    known = tensors.keys() | selection.ties.keys()
    embedding = next((tensor for tensor in selection.model if is_embedding(tensor.name)), None)
    if embedding is None or not _may_tie(config):
        return selection
    heads = sorted(filter(is_head, _list_changed(tensors, adapters) - known))
    return replace(
        selection,
        model=(*selection.model, *(replace(embedding, name=head) for head in heads)),  # starts as the embedding
        order=(*selection.order, *heads),
        warnings=(*selection.warnings, *(_UNTIED.format(head, embedding.name) for head in heads)),
    )


@dataclass(frozen=True, slots=True)
class _MergeBase:
    """What adapters change."""

    store: Store
    tensors: Mapping[str, OutputTensor]  # tied tensors under both names
    config: Mapping[str, object]  # of the model

    @property
    def shapes(self) -> dict[str, Shape]:
        """Shapes by name."""
        return {name: tensor.shape for name, tensor in self.tensors.items()}


def _merge(
    selection: Selection, store: Store, adapters: Sequence[Adapter], config: Mapping[str, object], dtype: str
) -> Selection:
    tensors = {tensor.name: tensor for tensor in selection.model}
    known = {**tensors, **{name: tensors[kept] for name, kept in selection.ties.items()}}
    base = _MergeBase(store, known, config)
    changes: dict[str, AdapterChange] = {}
    own: set[str] = set()
    resized: dict[str, OutputTensor] = {}
    for adapter in adapters:
        adapter = _add_resized(adapter, base)
        merge = _plan_changes(adapter, {**base.shapes, **{name: each.shape for name, each in resized.items()}}, base)
        for name, shape in merge.shapes.items():
            entry = TensorEntry((name,), shape, adapter.entries[merge.replaced[name]].stored, ())
            chosen = tensors[name].dtype if name in tensors else dtype or entry.stored
            resized[name] = OutputTensor(name, entry, chosen)
        _add_changes(adapter, merge, replace(base, tensors={**known, **resized}), changes)
        own |= merge.own
    ties, warnings = dict(selection.ties), list(selection.warnings)
    for name, kept in selection.ties.items():
        if {name, kept} & own or _find_head(name, kept) in changes:
            del ties[name]
            tensors[name] = replace(tensors[kept], name=name)
            warnings.append(_UNTIED.format(name, kept))
        elif name in changes:
            if kept in changes:
                raise UnsupportedError(
                    "the adapter changes one tensor under two names",
                    found=f"{name}, {kept}",
                    fix="The base ties them: use the model's folder, which has one of the names, as BASE.",
                )
            changes[kept] = changes.pop(name)  # one tensor with two names: both change, as in the module
    order = [name for name in selection.order if name in tensors] or list(tensors)
    for name, tensor in resized.items():
        if name not in tensors:
            order.append(name)
            warnings.append(_NEW.format(name, tensor.shape[0] if tensor.shape else 1))
        tensors[name] = tensor
    return replace(
        selection,
        model=tuple(replace(tensors[name], change=changes.get(name, tensors[name].change)) for name in order),
        ties=ties,
        warnings=tuple(warnings),
        config_values={**selection.config_values, **_describe_vocabulary(resized, known)},
    )


def _find_head(name: str, other: str) -> str:
    """Return which of two tied tensors is a head, not an embedding; empty if none is."""
    pairs = ((name, other), (other, name))
    return next((a for a, b in pairs if not is_embedding(a) and (is_head(a) or is_embedding(b))), "")


def _write_shared_biases(merged: Selection, heads: Set[str]) -> Selection:
    """Write the biases that a model class ties together with untied heads: then a reader wants both."""
    tensors = {tensor.name: tensor for tensor in merged.model}
    biases: dict[str, OutputTensor] = {}
    for head in sorted(heads):
        module = head.removesuffix(".weight")
        name, shared = f"{module}.bias", f"{module.rpartition('.')[0]}.bias"
        if module.endswith(".decoder") and name not in tensors and shared in tensors:
            biases[name] = replace(tensors[shared], name=name)
    return replace(
        merged,
        model=(*merged.model, *biases.values()),
        ties={name: kept for name, kept in merged.ties.items() if name not in biases},
        order=(*merged.order, *(name for name in biases if name not in merged.order)),
    )


def _add_resized(adapter: Adapter, base: _MergeBase) -> Adapter:
    """Return an adapter with the embeddings that its own model has for another vocabulary than the base."""
    resized = {
        name: entry
        for name, entry in adapter.model.items()
        if (is_embedding(name) or is_head(name))
        and name in base.tensors
        and entry.shape[1:] == base.tensors[name].shape[1:]
        and entry.shape != base.tensors[name].shape
    }
    taken = sort_names(adapter.entries, adapter.url).replaced
    return replace(adapter, entries={**adapter.entries, **{n: e for n, e in resized.items() if n not in taken}})


def _describe_vocabulary(resized: Mapping[str, OutputTensor], known: Mapping[str, object]) -> dict[str, object]:
    """Return the vocabulary size for the config if the adapter has changed it."""
    rows = [tensor.shape[0] for name, tensor in resized.items() if name in known]
    return {"vocab_size": rows[0]} if rows else {}


def _warnings_of_ties(merged: Selection, config: Mapping[str, object]) -> list[str]:
    """Return warnings about changed embeddings that only the merged model's head also uses."""
    tied = {each for tie in merged.ties.items() if _find_head(*tie) for each in tie}
    if not tied and (not _may_tie(config) or any(is_head(tensor.name) for tensor in merged.model)):
        return []
    # Trained tokens replace those of a tied head too.
    changed = [t.name for t in merged.model if isinstance(t.change, (LowRankSum, ScaledSum, TensorCopy))]
    return [
        f"{name} is changed, and the model may tie its head to it ({TIE}): then the merged model's head changes too,"
        " unlike the head in the model with the adapter"
        for name in changed
        if (name in tied if tied else is_embedding(name))
    ]


def _may_tie(config: Mapping[str, object]) -> bool:
    """Return True unless a model's config says that the head is not tied; classes have different defaults."""
    return bool(config) and read_tie(config) is not False


def _plan_changes(adapter: Adapter, known: Mapping[str, Shape], base: _MergeBase) -> Merge:
    """Plan an adapter's changes; require equal values for one tensor's two names."""
    shapes = {name: entry.shape for name, entry in adapter.entries.items()}
    parts = [part.get("model_type") for part in base.config.values() if isinstance(part, Mapping)]
    model_type = base.config.get("model_type")
    merge = plan_merge(adapter.config, shapes, known, adapter.url, model_type=model_type, part_types=parts)
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
    _require_full_weight(adapter, merge)
    return merge


def _require_full_weight(adapter: Adapter, merge: Merge) -> None:
    """Require the weight 1 for an adapter that does more than add values."""
    scaled = [each.weight for each in merge.added if each.magnitude]
    for kind, names in (
        ("fully trained tensors", [*merge.own]),
        ("trained tokens", [each.name for each in merge.tokens]),
        ("magnitudes (DoRA)", scaled),
    ):
        if names and adapter.weight != 1:
            raise UsageError(
                f"an adapter with {kind} must have the weight 1",
                where=adapter.url,
                found=f"{adapter.weight} for {min(names)}",
            )


def _add_changes(adapter: Adapter, merge: Merge, base: _MergeBase, changes: dict[str, AdapterChange]) -> None:
    """Add an adapter's changes to the earlier adapters' changes."""
    wanted = list(adapter.entries.values())
    entries = dict(zip(adapter.entries, locate(adapter.reader, adapter.reader.manifest, wanted), strict=True))
    source = AdapterReader(adapter.reader, entries)
    own: dict[str, AdapterChange] = {name: TensorCopy(source, stored) for name, stored in merge.replaced.items()}

    def find_before(name: str) -> Change | None:
        return own.get(name) or changes.get(name) or base.tensors[name].change

    for each in merge.added:
        low_rank = replace(each, scale=each.scale * adapter.weight)
        weight = base.tensors[each.weight]
        added = LowRankSum(source, low_rank, weight.shape, find_before(each.weight))
        is_scaled = bool(each.magnitude)
        own[each.weight] = ScaledSum(added, source, low_rank, weight.entry, base.store) if is_scaled else added
    for bias in merge.biases:
        own[bias.name] = BiasSum(source, bias, bias.scale * adapter.weight, find_before(bias.name))
    for rows in merge.tokens:
        own[rows.name] = RowsCopy(source, rows, find_before(rows.name))
    for name, change in own.items():
        before = changes.get(name)
        if before is not None and not (before.is_sum and change.is_sum):
            raise UsageError(f"two adapters change {name}, and one of them sets it in full", where=adapter.url)
    changes |= own
