"""Weights that DeepSpeed saves in one file per pipeline layer or MoE expert."""

from __future__ import annotations

from collections.abc import Mapping

from shardckpt.boxes import Shape
from shardckpt.errors import AmbiguousError
from shardckpt.format.deepspeed.merge_partitions import MODEL
from shardckpt.format.deepspeed.state_files import StateFileContents
from shardckpt.format.deepspeed.zero_files import StateFiles
from shardckpt.format.merge_shards import ManifestBuilder
from shardckpt.manifest import TensorEntry

TIED = "tied_modules."  # prefix for modules that several pipeline stages share; the module's name follows


def put_experts(builder: ManifestBuilder, contents: StateFileContents, files: StateFiles) -> None:
    """Add the experts' weights, which have their names in the full model."""
    for _, file in sorted(files.experts.items()):
        for path, entry in contents.tensors(file).items():
            builder.put((MODEL, str(path[-1])), entry)


def put_layers(
    builder: ManifestBuilder, contents: StateFileContents, files: StateFiles, trained: Mapping[str, Shape]
) -> None:
    """Add pipeline layers' weights under the layer's number, or the shared module's name."""
    shared = _shared_modules(trained)
    for (layer, _), file in sorted(files.layers.items()):
        tensors = {str(path[0]): entry for path, entry in contents.tensors(file).items() if len(path) == 1}
        start = _start(layer, tensors, trained, shared, contents.where(file))
        for key, entry in tensors.items():
            if (MODEL, start + key) not in builder.tensors or not start.startswith(TIED):
                builder.put((MODEL, start + key), entry)


def _shared_modules(trained: Mapping[str, Shape]) -> dict[str, dict[str, Shape]]:
    """Return shared modules' shapes: prefix to the rest of the name and shape."""
    found: dict[str, dict[str, Shape]] = {}
    for name, shape in trained.items():
        key, _, rest = name.removeprefix(TIED).partition(".")
        if name.startswith(TIED) and rest:
            found.setdefault(f"{TIED}{key}.", {})[rest] = shape
    return found


def _start(
    layer: int,
    tensors: Mapping[str, TensorEntry],
    trained: Mapping[str, Shape],
    shared: Mapping[str, Mapping[str, Shape]],
    where: str,
) -> str:
    """Return the prefix that a layer's parameters have in the module."""
    own = f"{layer}."
    if not shared or any(own + key in trained for key in tensors):
        return own
    shapes = {key: entry.shape for key, entry in tensors.items()}
    matches = [start for start, params in shared.items() if params.items() <= shapes.items()]
    if len(matches) > 1:
        raise AmbiguousError(
            f"layer {layer} could be in several shared modules",
            where=where,
            found=", ".join(matches[:4]),
            fix="Point at a universal checkpoint (ds_to_universal.py), or leave them out with --exclude.",
        )
    return matches[0] if matches else own
