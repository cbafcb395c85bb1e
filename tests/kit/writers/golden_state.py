"""What the golden steps hold, and how they were written: once, since they are read for ever.

`python golden_state.py FOLDER` writes them again: their bytes change only with the format.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

import shardckpt
from shardckpt.boxes import Box, full_box
from shardckpt.checkpoint.save import planner
from tests.kit.writers.native_writer import with_grouped_hashes, write_step

BOXES = {
    ("model", "w"): [(0, Box((0, 0), (3, 2))), (1, Box((3, 0), (3, 2))), (2, Box((0, 2), (6, 2)))],
    ("optim", "state", "w", "exp_avg"): [
        (0, Box((0, 0), (2, 4))),
        (0, Box((2, 0), (1, 1))),
        (1, Box((2, 1), (1, 3))),
        (1, Box((3, 0), (3, 4))),
    ],
    ("model", "ids"): [(2, full_box((5,)))],
}


def small() -> dict[str, Any]:
    return {"model": {"w": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "b": torch.tensor([7])}, "step": 100}


def based() -> dict[str, Any]:
    """Return what `based` holds: all but `model.b` and the number lies in `digests`, which it refers to."""
    return {**small(), "ema": {"w": small()["model"]["w"] / 2}}


def before_based() -> dict[str, Any]:
    """Return what `digests` holds."""
    return {**based(), "step": 99, "model": {**small()["model"], "b": torch.tensor([6])}}


def large() -> dict[str, Any]:
    """Return what `large` holds: one file of several blocks."""
    w = (torch.arange(300_000) % 251).to(torch.uint8).reshape(300, 1000)
    return {"model": {"w": w}, "optim": torch.tensor([6]), "step": 99}


def large_based() -> dict[str, Any]:
    """Return what `large-based` holds: `model.w` lies in `large`, and its own file has one block."""
    return {**large(), "optim": torch.tensor([7]), "step": 100}


def full() -> dict[str, Any]:
    tied = torch.tensor([1.5, -2.0, 3.0], dtype=torch.bfloat16)
    w = torch.arange(24.0).reshape(6, 4)
    return {
        "model": OrderedDict([("w", w), ("ids", torch.tensor([1, 2, 3, 1 << 40, 5])), ("a.b", tied), ("tied", tied)]),
        "a": {"b": torch.tensor([True, False])},
        "optim": {
            "state": {"w": {"exp_avg": w / 2, "step": torch.tensor(3.0)}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999), "params": ["w"], "foreach": None, "capturable": False}],
        },
        "types": [
            torch.tensor([1 + 2j], dtype=torch.complex128),
            torch.tensor([1.0, 2.0], dtype=torch.float8_e4m3fn),
            torch.tensor(2.5, dtype=torch.float64),
            torch.zeros(0, 3, dtype=torch.float16),
            torch.tensor([65535], dtype=torch.uint16),
        ],
        "values": {
            "int": -(1 << 80),
            "floats": [0.1, -0.0, float("inf"), float("-inf")],
            "text": "snow ☃ \ud800 \0",
            "bytes": b"\x00\xff",
            "complex": 1 - 2j,
            "none": None,
            "set": {3},
            "frozen": frozenset({(1, 2)}),
            "keys": {0: "id", "0": "text", None: 1, True: 2, 1.5: 3, (1, "a"): 4},
            "tags": {"$array": 7},
            "numpy": np.float32(0.5),
            "dtype": torch.bfloat16,
            "empty": [{}, (), []],
        },
        0: {1: torch.tensor([9.0])},
    }


def write(folder: Path) -> None:
    """Write the golden steps."""
    write_step(folder / "small", small(), alone=("model",), save="0mwqkzsavex3s13")
    write_step(folder / "ranks", full(), BOXES, save="0mwqkzsavey7k2f")
    write_step(folder / "unhashed", small(), checksums=False, save="0mwqkzsavez0q9d")
    write_step(folder / "grouped", large(), change=with_grouped_hashes, save="0mwqkzsavf0h5rt")
    _save(folder / "digests", "0mwqt38b24ccy29", _as_module(before_based()), store_digests=True)
    _save(folder / "based", "0mwqt38cxwdztlk", _as_module(based()), base=folder / "digests")
    _save(folder / "large", "0mwsxi7zwmn53qv", large(), store_digests=True)
    _save(folder / "large-based", "0mwsxi8639vuzpo", large_based(), base=folder / "large")
    _save(folder / "stats", "0mwt4sspnb3m71k", small(), stats=True)


class _Model(torch.nn.Module):
    def __init__(self, w: torch.Tensor, b: torch.Tensor) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(w)
        self.register_buffer("b", b)


def _as_module(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state whose model is a module, with averages of its weights."""
    model = _Model(**state["model"])
    return {**state, "model": model, "ema": shardckpt.Variant(state["ema"], of=model)}


def _save(step: Path, save: str, state: dict[str, Any], **options: Any) -> None:
    with patch.object(planner, "new_save_id", lambda: save):
        shardckpt.save(state, step, **options)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
