"""Names and shapes for flat parameters, from any other checkpoint of the same model."""

from __future__ import annotations

from shardckpt.convert.selection import name_model, read_param_names
from shardckpt.format.detect import open_checkpoint
from shardckpt.format.reader import Reader, WholeShapes
from shardckpt.plan import parts


def with_whole_shapes(reader: Reader, shapes_from: str, param_names: str = "") -> Reader:
    """Return a reader that knows what lies in its flat parameters; the same one where it holds none.

    Args:
        reader: The open checkpoint.
        shapes_from: Checkpoint of the same model, in any format, that holds whole tensors; empty for none.
        param_names: JSON file from optimizer id to name; empty for none.

    Raises:
        UsageError: The shapes do not fit the flat parameters, or a file is not what it should be.
        CheckpointError: The other checkpoint cannot be read.
        StorageError: The store failed.
    """
    if not reader.is_flat or not (shapes_from or param_names):
        return reader
    ids = read_param_names(param_names) if param_names else {}
    if not shapes_from:
        return reader.with_shapes(WholeShapes({}, param_names, ids=ids))
    other = parts.split_flat_names(open_checkpoint(shapes_from).manifest)
    model = name_model(other, parts.find_parts(other)).tensors
    names = {entry.path: name for name, entry in model.items()}
    aliases = {names[a]: names[b] for a, b in other.aliases.items() if a in names and b in names}
    shapes = {name: entry.shape for name, entry in model.items()}
    return reader.with_shapes(WholeShapes(shapes, shapes_from, aliases, ids=ids))
