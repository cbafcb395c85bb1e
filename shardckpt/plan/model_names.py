"""A checkpoint's model under the names of the unwrapped model. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardckpt.manifest import Manifest, TensorEntry, dotted
from shardckpt.plan.names import clean as clean_names
from shardckpt.plan.names import cleaner, require_unique
from shardckpt.plan.parts import Parts, model_paths


@dataclass(frozen=True, slots=True)
class Named:
    """A checkpoint's tensors under canonical names.

    Attributes:
        tensors: Name to array, in saved order.
        clean: Cleans further names as these were.
    """

    tensors: dict[str, TensorEntry]
    clean: Callable[[str], str]


def name_model(manifest: Manifest, found: Parts) -> Named:
    """Return the model's tensors under the names of the unwrapped model.

    Raises:
        NameCollisionError: Two tensors would get one name.
    """
    depth = len(found.model)
    paths = list(model_paths(manifest, found))
    stored = {path: dotted(path[depth:]) or dotted(path) for path in paths}
    require_unique({str(path): name for path, name in stored.items()})
    cleaned = clean_names(stored.values())
    return Named({cleaned[stored[path]]: manifest.tensors[path] for path in paths}, cleaner(stored.values()))
