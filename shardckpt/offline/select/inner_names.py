"""Names for inner tensors of wrapper subclasses that stay quantized."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from shardckpt.offline.select.selection import Selection
from shardckpt.plan.naming.fqn import require_unique
from shardckpt.plan.packed_weights import READABLE, PackedWeight


def name_inner_tensors(selection: Selection, *, is_read: bool) -> Selection:
    """Return a selection with the names that torchao reads, and a warning about weights that no reader knows.

    The latter's inner tensors keep their names with dots. `is_read` says whether torchao reads the target's format.
    """
    written = {tensor.name for tensor in selection.model}
    packed = {
        name: weight for name, weight in selection.packed.items() if not written.isdisjoint(weight.parts.values())
    }
    named = {name: weight for name, weight in packed.items() if is_read and weight.kind in READABLE and "." in name}
    renamed = {name: weight.name_for_torchao(name) for name, weight in named.items()}
    names = {part: renamed[name].parts[inner] for name in named for inner, part in named[name].parts.items()}
    require_unique({tensor.name: names.get(tensor.name, tensor.name) for tensor in selection.model})
    return replace(
        selection,
        model=tuple(replace(tensor, name=names.get(tensor.name, tensor.name)) for tensor in selection.model),
        packed=renamed,
        ties={name: names.get(kept, kept) for name, kept in selection.ties.items()},
        order=tuple(names.get(name, name) for name in selection.order),
        warnings=(*selection.warnings, *_warn({name: weight for name, weight in packed.items() if name not in named})),
    )


def _warn(packed: Mapping[str, PackedWeight]) -> Iterator[str]:
    """Yield a warning about weights whose parts no reader puts together."""
    if packed:
        name, weight = next(iter(packed.items()))
        more = f" and {len(packed) - 1} more" if len(packed) > 1 else ""
        part = next(iter(weight.parts.values()), "")
        yield (
            f"{name} ({weight.record.kind}){more}: written as inner tensors, such as {part}, which no reader puts"
            " together; --dequantize writes plain weights"
        )
