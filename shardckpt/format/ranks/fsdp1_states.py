"""FSDP1's flat parameters in rank files: LOCAL states and optimizers.

A file contains `{module}._flat_param`, this rank's chunk of a unit's concatenated parameters; with
`use_orig_params=True` also each parameter by name, as a fragment without its shape. The files store no shapes, and
without fragments no names. These come from metadata files in the folder, from another checkpoint of the model, or from
the model that is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

from shardckpt.errors import UsageError
from shardckpt.format.merge_shards import ManifestBuilder
from shardckpt.format.ranks.fsdp1_model import FlatModel, is_flat, put_flat_model, read_flat_model
from shardckpt.format.ranks.fsdp1_optimizer import put_flat_optimizer
from shardckpt.format.ranks.rank_files import RankGroup
from shardckpt.format.reader import ParamShapes
from shardckpt.manifest import Path

FlatModels = Mapping[tuple[Path, Path], FlatModel]  # a group's root and the model's path in it, to the model


def read_flat_models(groups: Mapping[Path, RankGroup], url: str, known: ParamShapes | None) -> FlatModels:
    """Read the models with flat parameters in all rank files."""
    models: dict[tuple[Path, Path], FlatModel] = {}
    for group in groups.values():
        bases = {path[:-1] for content in group.ranks for path in content.shards if is_flat(path, content)}
        for base in sorted(bases, key=str):
            models[group.root, base] = _read_model(group, base, url, known)
    return models


def put_flat_states(
    builder: ManifestBuilder, group: RankGroup, models: FlatModels, known: ParamShapes | None
) -> set[Path]:
    """Add a group's flat parameters and their optimizers; return the added paths."""
    done: set[Path] = set()
    for (root, base), model in models.items():
        if root == group.root:
            done |= put_flat_model(builder, model) | {base}
            builder.warnings += model.warnings
    optimized = _find_model(models, group.root)
    if optimized is not None:
        for root in group.optimizers():
            done |= put_flat_optimizer(builder, group, root, optimized, known)
    return done


def _find_model(models: FlatModels, root: Path) -> FlatModel | None:
    """Return the model for a group's optimizers: the only one, or by its number."""
    if len(models) == 1:
        return next(iter(models.values()))
    near = [model for (other, _), model in models.items() if other == root or _number(other) == _number(root)]
    return near[0] if len(near) == 1 else None


def _read_model(group: RankGroup, base: Path, url: str, known: ParamShapes | None) -> FlatModel:
    """Return a model's flat parameters, with the first shapes that match."""
    if known is None or not known.others:
        return read_flat_model(group, base, url, known)
    try:
        return read_flat_model(group, base, url, replace(known, others=()))
    except UsageError:
        for other in known.others:
            with suppress(UsageError):
                return read_flat_model(group, base, url, other)
        raise


def _number(root: Path) -> str:
    """Return the number at a group name's end, which distinguishes several models."""
    return str(root[0]).rpartition("_")[2] if root and str(root[0])[-1:].isdigit() else ""
