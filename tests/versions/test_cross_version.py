"""Checkpoints that one torch wrote are read by another: `matrix.py` runs the script with several, this with one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.versions import cross_version


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_each_form_is_read_bit_for_bit_and_another_value_is_found(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    cross_version.write(tmp_path)

    assert cross_version.read(tmp_path) == 0
    read = re.findall(r"(?m)^[a-z_-]+: .*", capfd.readouterr().out)  # torch 2.9's gloo prints, too
    assert read == [f"{form}: ok" for form in cross_version.FORMS]

    file = tmp_path / "full-state" / "pytorch_model.bin"
    state = torch.load(file)
    state["second.weight"][0, 0] += 1
    torch.save(state, file)

    assert cross_version.read(tmp_path) == 1
    assert "full-state: AssertionError: second.weight differs" in capfd.readouterr().out
