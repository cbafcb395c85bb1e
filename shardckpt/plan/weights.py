"""Which of a model's weights are meant: those that it trains with, or another set of them beside."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, get_args

from shardckpt.errors import UsageError
from shardckpt.manifest import Manifest, Path, TensorEntry
from shardckpt.plan.parts import find_parts

Weights = Literal["live", "master", "ema"]
WEIGHTS: tuple[Weights, ...] = get_args(Weights)
"""The module's own weights, an optimizer's copies of higher precision, and averages over steps."""


def choose(manifest: Manifest, kind: str, model_key: str = "") -> Manifest:
    """Return the checkpoint with the weights that were asked for in the place of the model's own.

    Other weights lie in a subtree of their kind (`master`, `ema`) under the names of the model. What has none, such as
    buffers and frozen parameters, stays as it is.

    Args:
        manifest: The checkpoint.
        kind: One of `WEIGHTS`; `live` changes nothing.
        model_key: Where the model is, if not where the rules look.

    Raises:
        UsageError: The checkpoint holds no such weights.
        AmbiguousError: Several subtrees could be the model.
    """
    if kind == "live":
        return manifest
    other = {path[1:]: entry for path, entry in manifest.tensors.items() if path[0] == kind and len(path) > 1}
    if not other:
        raise UsageError(
            f"--weights {kind}: the checkpoint holds no such weights",
            found=", ".join(dict.fromkeys(str(path[0]) for path in list(manifest.tensors)[:1000])) or "nothing",
            expected=f"a subtree `{kind}`",
            fix="Leave --weights out for the model's own.",
        )
    model = find_parts(manifest, model_key).model
    depth = len(model)
    tensors: dict[Path, TensorEntry] = {}
    for path, entry in manifest.tensors.items():
        if path[0] == kind:
            continue
        name = path[depth:] if path[:depth] == model else ()
        tensors[path] = other.pop(name)._replace(path=path) if name in other else entry
    for name, entry in other.items():
        path = (*model, *name)
        tensors[path] = entry._replace(path=path)
    return replace(
        manifest,
        tensors=tensors,
        objects={path: entry for path, entry in manifest.objects.items() if path[0] != kind},
        aliases={alias: first for alias, first in manifest.aliases.items() if alias[0] != kind and first[0] != kind},
    )
