"""Every example runs as it stands, from another folder, and says that it succeeded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

EQUAL = "equal, bit for bit"
RUNS = {
    "consolidate_fsdp2.py": [
        ([], (EQUAL,)),
        (["--tied"], (EQUAL, "tied: lm_head.weight is model.embed_tokens.weight")),
    ],
    "save_and_load.py": [
        ([], ("3 ranks, rows, from step 4", "head.weight in the checkpoint: SavedTensor(", *["step 7: loss 4.009"] * 2))
    ],
    "train_fsdp.py": [([], ("2 ranks; rank 0 stores 108,160 of 216,320 parameters", "  19   0."))],
    "train_fully_shard.py": [([], ("head.weight: (256, 64), of which rank 0 stores (128, 64)", "  19   0."))],
}


@pytest.mark.parametrize(("name", "arguments", "said"), [(name, *run) for name, runs in RUNS.items() for run in runs])
def test_an_example_runs(name: str, arguments: list[str], said: tuple[str, ...], tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [words for words in said if words not in done.stdout] == []
    assert list(tmp_path.iterdir()) == []


def test_every_example_is_run() -> None:
    assert set(RUNS) == {path.name for path in EXAMPLES.glob("*.py")}
