"""How torch's distributed checkpoints are written: each form that the installed torch has."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem

try:
    from torch.distributed.checkpoint._extension import ZStandard
except ImportError:
    ZStandard = None

ALONE: dict[str, Any] = {"no_dist": True} if "no_dist" in inspect.signature(dcp.save).parameters else {}
"""Arguments of `save` and `load` in a process of no group; torch 2.6 finds out by itself."""

SerializationFormat: Any = getattr(filesystem, "SerializationFormat", None)

FORMS: dict[str, Callable[[], dict[str, Any]]] = {"torch": dict}
"""Name of a form to the arguments of a writer; the writer's extensions may be used once."""
if SerializationFormat is not None:
    FORMS["safetensors"] = lambda: {"serialization_format": SerializationFormat.SAFETENSORS}
if ZStandard is not None:
    FORMS["zstd"] = lambda: {"_extensions": [ZStandard()]}


def choose_form(name: str) -> dict[str, Any]:
    """Return the arguments of a writer for a form; the test is skipped if the installed torch does not have it."""
    if name not in FORMS:
        pytest.skip(f"this torch does not write {name}")
    return FORMS[name]()
