"""The boxes that a worker holds: from a function, or a module's shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from torch import nn

from shardckpt.boxes import Box, Shape, full_box
from shardckpt.errors import UsageError
from shardckpt.stream.receive.targets import TensorTarget

__all__ = ["Layout", "list_boxes", "read_layout"]

_Boxes: TypeAlias = Callable[[str, Shape], "Box | Sequence[Box] | None"]
Layout: TypeAlias = "nn.Module | _Boxes | None"


def read_layout(layout: Layout) -> _Boxes:
    """Return a layout as a function of a tensor's name and shape."""
    if layout is None:
        return lambda _, shape: full_box(shape)
    if isinstance(layout, nn.Module):
        known = TensorTarget(layout).list_boxes()
        return lambda name, _: known.get(name)
    return layout


def list_boxes(layout: _Boxes, name: str, shape: Shape) -> Sequence[Box]:
    """Return a worker's boxes of a tensor that have elements. Raises UsageError."""
    given = layout(name, shape)
    boxes = [] if given is None else [given] if isinstance(given, Box) else list(given)
    for box in boxes:
        if not (isinstance(box, Box) and len(box.offset) == len(shape) and box.within(shape)):
            raise UsageError("`layout` must return boxes in the tensor", where=name, found=box, expected=shape)
    return [box for box in boxes if box.volume]
