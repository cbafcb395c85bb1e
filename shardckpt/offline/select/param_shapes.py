"""Load names and shapes for flat parameters from another checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardckpt.errors import UsageError
from shardckpt.manifest import Manifest, TensorEntry, dotted
from shardckpt.plan.naming import sections
from shardckpt.plan.naming.fqn import name_model
from shardckpt.reader import ParamShapes, Reader
from shardckpt.readers.registry import open_checkpoint


def load_param_shapes(reader: Reader, shapes_from: str, ids: Mapping[int, str] | None = None) -> Reader:
    """Return a reader that knows its flat parameters' members."""
    if not reader.is_flat:
        return reader
    if reader.needs_param_shapes and not shapes_from:
        raise UsageError(
            "these are flat parameters, and no file has the shapes of their members",
            where=reader.store.url,
            found="a chunk of each unit on each rank, as FSDP1's LOCAL_STATE_DICT gives it",
            fix="Give --shapes-from SRC, any checkpoint of the same model that holds full tensors.",
        )
    if not shapes_from and not ids:
        return reader
    known_ids = dict(ids or {})
    if not shapes_from:
        return reader.with_param_shapes(ParamShapes({}, reader.store.url, ids=known_ids))
    opened = open_checkpoint(shapes_from)
    if opened.needs_param_shapes:
        raise UsageError(
            "this checkpoint has no shapes: it holds flat parameters itself",
            where=shapes_from,
            expected="full tensors",
            fix="Give another checkpoint of the same model, or save model.state_dict() on the meta device.",
        )
    other = sections.split_flat_names(opened.manifest)
    model = name_model(other, sections.find_sections(other)).tensors
    names = {entry.path: name for name, entry in model.items()}
    aliases = {names[a]: names[b] for a, b in other.aliases.items() if a in names and b in names}
    shapes = {name: entry.shape for name, entry in model.items()}
    known = ParamShapes(
        shapes, shapes_from, aliases, ids=known_ids, is_ordered=_keeps_order(other, list(model.values()))
    )
    return reader.with_param_shapes(known)


def _keeps_order(manifest: Manifest, entries: Sequence[TensorEntry]) -> bool:
    """Return True if a checkpoint's tensors are in model order."""
    if manifest.keeps_order:
        return True
    # safetensors files are usually sorted by dtype and name; DCP spreads replicated tensors over ranks.
    by_file: dict[tuple[str, str], list[str]] = {}
    for entry in entries:
        for file in {piece.file for piece in entry.pieces}:
            by_file.setdefault((file, entry.stored), []).append(dotted(entry.path))
    if len({file for file, _ in by_file}) > 1 and all(len(entry.pieces) <= 1 for entry in entries):
        return False
    return not all(names == sorted(names) for names in by_file.values())
