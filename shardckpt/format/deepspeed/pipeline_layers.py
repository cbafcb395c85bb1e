"""Weights that DeepSpeed saves a layer or an expert a file: of pipelines, and of `deepspeed.moe`."""

from __future__ import annotations

from collections.abc import Mapping

from shardckpt.boxes import Shape
from shardckpt.errors import AmbiguousError
from shardckpt.format.deepspeed.merge_partitions import MODEL, DeepSpeedManifestBuilder
from shardckpt.format.deepspeed.state_files import StateFileContents
from shardckpt.format.deepspeed.zero_files import StateFiles
from shardckpt.manifest import TensorEntry

TIED = "tied_modules."
"""What names of modules that several pipeline stages share start with; they have a name between this and the rest."""


def put_experts(made: DeepSpeedManifestBuilder, contents: StateFileContents, files: StateFiles) -> None:
    """Add the weights of experts, which carry their names in the whole model."""
    for _, file in sorted(files.experts.items()):
        for path, entry in contents.tensors[file].items():
            made.put((MODEL, str(path[-1])), entry)


def put_layers(
    made: DeepSpeedManifestBuilder, contents: StateFileContents, files: StateFiles, trained: Mapping[str, Shape]
) -> None:
    """Add the weights of a pipeline's layers under the names of the module: the layer's number, or the shared module.

    Args:
        made: Where they go.
        contents: What the files hold.
        files: Which files there are.
        trained: Parameters that an optimizer has, to their shapes.

    Raises:
        AmbiguousError: Several shared modules are alike, and nothing says which one a layer is.
    """
    shared = _shared_modules(trained)
    for (layer, _), file in sorted(files.layers.items()):
        held = {str(path[0]): entry for path, entry in contents.tensors[file].items() if len(path) == 1}
        start = _start(layer, held, trained, shared, contents.where(file))
        for key, entry in held.items():
            if (MODEL, start + key) not in made.tensors or not start.startswith(TIED):
                made.put((MODEL, start + key), entry)


def _shared_modules(trained: Mapping[str, Shape]) -> dict[str, dict[str, Shape]]:
    """Return what names of shared modules start with, to the rest of the name and the shape."""
    found: dict[str, dict[str, Shape]] = {}
    for name, shape in trained.items():
        key, _, rest = name.removeprefix(TIED).partition(".")
        if name.startswith(TIED) and rest:
            found.setdefault(f"{TIED}{key}.", {})[rest] = shape
    return found


def _start(
    layer: int,
    held: Mapping[str, TensorEntry],
    trained: Mapping[str, Shape],
    shared: Mapping[str, Mapping[str, Shape]],
    where: str,
) -> str:
    """Return what the names of a layer's parameters start with in the module."""
    own = f"{layer}."
    if not shared or any(own + key in trained for key in held):
        return own
    shapes = {key: entry.shape for key, entry in held.items()}
    alike = [start for start, params in shared.items() if params.items() <= shapes.items()]
    if len(alike) > 1:
        raise AmbiguousError(
            f"layer {layer} could be any of several shared modules",
            where=where,
            found=", ".join(alike[:4]),
            fix="Point at a universal checkpoint (ds_to_universal.py), or leave them out with --exclude.",
        )
    return alike[0] if alike else own
