"""Flat parameters of torch's FSDP1 taken apart: LOCAL states and the optimizers of flat shards, as ranks saved them.

A file holds `{module}._flat_param`, this rank's chunk of the parameters of a unit laid end to end; with
`use_orig_params=True` also each parameter by its name, as a fragment without its shape. Neither shapes nor, otherwise,
names stand in the files: they come from a note beside them, from another checkpoint of the model, or from the model
itself that they are loaded into.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

from shardckpt.errors import UsageError
from shardckpt.format.ranks.fsdp1_model import FlatModel, is_flat
from shardckpt.format.ranks.fsdp1_optimizer import FlatOptimizer
from shardckpt.format.ranks.rank_files import ManifestBuilder, RankGroup
from shardckpt.format.reader import ParamShapes
from shardckpt.manifest import Path


class FlatStates:
    """The flat parameters in rank files, and the optimizers over them.

    Args:
        groups: All rank files.
        made: Where whole arrays go.
        known: Shapes and names of the parameters, where they are told.

    Raises:
        FormatError: Files contradict one another.
        UsageError: The shapes do not fit.
    """

    def __init__(self, groups: Mapping[Path, RankGroup], made: ManifestBuilder, known: ParamShapes | None) -> None:
        self._made, self._known = made, known
        self._models: dict[tuple[Path, Path], FlatModel] = {}
        for group in groups.values():
            bases = {path[:-1] for content in group.ranks for path in content.shares if is_flat(path, content)}
            for base in sorted(bases, key=str):
                self._models[group.root, base] = _fit_model(group, base, made, known)

    def _find_model(self, root: Path) -> FlatModel | None:
        """Return the model that the optimizers in a group are of: the only one, or the one of the same number."""
        models = [model for (of, _), model in self._models.items() if of == root or _number(of) == _number(root)]
        every = list(self._models.values())
        return every[0] if len(every) == 1 else models[0] if len(models) == 1 else None

    def put(self, group: RankGroup) -> set[Path]:
        """Add what is flat in a group, and return the paths that were taken care of."""
        taken: set[Path] = set()
        for (root, base), model in self._models.items():
            if root == group.root:
                taken |= model.put()
                self._made.warnings += model.warnings
                taken.add(base)
        mine = self._find_model(group.root)
        if mine is not None:
            for root in group.optimizers():
                taken |= FlatOptimizer(group, root, mine, self._made, self._known).put()
        return taken


def _fit_model(group: RankGroup, base: Path, made: ManifestBuilder, known: ParamShapes | None) -> FlatModel:
    """Return the flat parameters of a model, taken for the first of the known models that fits them."""
    if known is None or not known.others:
        return FlatModel(group, base, made, known)
    try:
        return FlatModel(group, base, made, replace(known, others=()))
    except UsageError:
        for other in known.others:
            with suppress(UsageError):
                return FlatModel(group, base, made, other)
        raise


def _number(root: Path) -> str:
    """Return which of several models or optimizers a group is, by the number at the end of its name."""
    return str(root[0]).rpartition("_")[2] if root and str(root[0])[-1:].isdigit() else ""
