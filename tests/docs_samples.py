"""Writes the checkpoints that the documentation's commands work on; run as a program, so that forking is safe.

python tests/docs_samples.py FOLDER
"""

from __future__ import annotations

import shutil
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import LlamaForCausalLM


def example() -> ModuleType:
    """Return the example as a module: the documentation shows the checkpoint that it trains."""
    path = Path(__file__).resolve().parents[1] / "examples" / "consolidate_fsdp2.py"
    spec = spec_from_file_location("consolidate_fsdp2", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(folder: Path) -> None:
    """Write `run/step-8` (DCP), `config`, `shards` (Hugging Face), `last.pt` (torch.save) and `golden` (native)."""
    demo = example()
    config = demo.small_llama(tied=False)
    work = folder / "work"
    work.mkdir(parents=True)
    demo.run_ranks(work, config)
    (folder / "run").mkdir()
    (work / "step-8").rename(folder / "run" / "step-8")

    config.save_pretrained(folder / "config")
    dcp_to_torch_save(folder / "run" / "step-8", work / "merged.pt")
    state = torch.load(work / "merged.pt")
    torch.save({"model": state["model"], "optimizer": state["optim"], "epoch": 2}, folder / "last.pt")
    model = LlamaForCausalLM(config)
    model.load_state_dict(state["model"])
    model.save_pretrained(folder / "shards", max_shard_size="2MB")
    shutil.rmtree(work)
    shutil.copytree(Path(__file__).parent / "format" / "golden" / "1.0" / "small", folder / "golden")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
