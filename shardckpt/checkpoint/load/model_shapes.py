"""What the models of a state tell of flat parameters whose files tell nothing: names, shapes, order and ties."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from shardckpt.format.reader import ParamShapes
from shardckpt.state.local.local_shards import LocalModel


def shapes_of(models: Iterable[LocalModel]) -> ParamShapes | None:
    """Return what models consist of, however they are sharded; None where there is none.

    Args:
        models: Those of a state, each once.
    """
    found = [_model_shapes(model) for model in models]
    return replace(found[0], others=tuple(found[1:])) if found else None


def _model_shapes(model: LocalModel) -> ParamShapes:
    """Return a model's parameters, tied ones under each name; buffers lie in no flat parameter."""
    names = {name: model.aliases.get(name, name) for name in model.names}
    shapes = {
        name: model.arrays[first].shape
        for name, first in names.items()
        if first in model.arrays and first not in model.buffers
    }
    return ParamShapes(shapes, "the model that is loaded into", model.aliases)
