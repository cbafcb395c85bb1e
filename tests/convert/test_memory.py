"""`--max-memory` is a cap on what a process adds to its start-up, however large a tensor is."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from shardckpt.convert.options import LEAST_MEMORY_BYTES
from shardckpt.format.safetensors import Placed, encode_header

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peaks are read from /proc")

CAP = LEAST_MEMORY_BYTES
ROWS, COLUMNS = 8 * CAP // 4 // 2048, 2048
FEWER_ROWS = 3 * CAP // 4 // 2048
"""Of what is put in order element by element, which takes long."""


def peak_bytes(code: str) -> int:
    """Return the peak resident memory of a fresh process that runs `code`."""
    tail = "\nprint(next(l for l in open('/proc/self/status') if l.startswith('VmHWM')).split()[1])"
    done = subprocess.run([sys.executable, "-c", code + tail], check=True, capture_output=True, text=True)
    return int(done.stdout.split()[-1]) << 10


def by_columns(folder: Path) -> None:
    """Two ranks, cut in the second dimension: every row of the result comes from both."""
    folder.mkdir()
    for rank in range(2):
        half = np.full((ROWS, COLUMNS // 2), rank, np.float32)
        info = f'{{"w": {{"saved_offsets": [0, {rank * COLUMNS // 2}]}}}}'
        name = f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"
        save_file({"w": half}, folder / name, {"DCP_SHARDING_INFO": info})


def whole(folder: Path) -> None:
    folder.mkdir()
    header = encode_header([Placed("w", "float32", (ROWS, COLUMNS))], {})
    with (folder / "model.safetensors").open("wb") as file:
        file.write(header)
        file.truncate(len(header) + 8 * CAP)


def transposed(folder: Path) -> None:
    folder.mkdir()
    torch.save({"w": torch.zeros(COLUMNS, FEWER_ROWS).T}, folder / "a.pt")


@pytest.mark.parametrize(
    ("make", "options", "times"),
    [(by_columns, "", 8), (whole, "", 8), (whole, "dtype='bf16', ", 4), (transposed, "", 3)],
    ids=["by columns", "whole", "cast", "transposed"],
)
def test_a_tensor_of_many_times_the_cap_is_written_under_it(
    make: Callable[[Path], None], options: str, times: int, tmp_path: Path
) -> None:
    src = tmp_path / "src"
    make(src)
    start = peak_bytes(f"import shardckpt; shardckpt.inspect({str(src)!r})")
    call = f"shardckpt.consolidate({str(src)!r}, {str(tmp_path / 'out')!r}, {options}max_memory={CAP})"
    added = peak_bytes(f"import shardckpt; {call}") - start
    assert added <= CAP, f"{added / 2**20:.1f} MiB"
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > times * CAP


def test_the_measure_sees_a_tensor_that_is_held(tmp_path: Path) -> None:
    """The control: a process that reads the tensor as a whole breaks the cap by this measure."""
    src = tmp_path / "src"
    whole(src)
    start = peak_bytes(f"import shardckpt; shardckpt.inspect({str(src)!r})")
    held = peak_bytes(
        f"import shardckpt; shardckpt.inspect({str(src)!r}); data = open({str(src / 'model.safetensors')!r}, 'rb').read()"
    )
    assert held - start > 7 * CAP
