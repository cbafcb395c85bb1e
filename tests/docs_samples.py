"""Writes the checkpoints that the documentation's commands work on; run as a program, so that forking is safe.

python tests/docs_samples.py FOLDER
"""

from __future__ import annotations

import shutil
import sys
import warnings
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `tests.kit`

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


def rank_files(folder: Path) -> None:
    """Write what two ranks save by themselves: `local` (FSDP1), `ranks` (FSDP2), `verl-step`, `accelerate-step`."""
    from tests.kit.ranks import harness
    from tests.kit.writers import rank_writers

    harness.run(2, rank_writers.for_the_docs, folder, timeout=120)
    (folder / "accelerate-step").mkdir()
    (folder / "verl-step").mkdir()
    for file in (folder / "sharded").iterdir():
        kind, rank = file.stem.split("_rank")
        stem = {"model": "pytorch_model_fsdp_0", "optim": "optimizer_0"}[kind]
        shutil.copy(file, folder / "verl-step" / f"{kind}_world_size_2_rank_{rank}.pt")
        file.rename(folder / "accelerate-step" / f"{stem}_rank{rank}.bin")
        torch.save({"seed": 3}, folder / "accelerate-step" / f"random_states_{rank}.pkl")
    torch.save({"last_epoch": 2}, folder / "accelerate-step" / "scheduler.bin")
    (folder / "sharded").rmdir()


def deepspeed(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    """Write `zero3` as DeepSpeed does on two ranks."""
    from tests.kit.writers import deepspeed_writer

    groups = [
        {name: value for name, value in weights.items() if (value.dim() > 1) == is_matrix}
        for is_matrix in (True, False)
    ]
    deepspeed_writer.write(folder / "zero3", deepspeed_writer.Run(groups, order=list(weights)), 3, 2)


def main(folder: Path) -> None:
    """Write `run/step-8` (DCP), `config`, `shards` (Hugging Face), `last.pt` (torch.save) and `golden` (native)."""
    folder.mkdir(parents=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rank_files(folder)
    demo = example()
    config = demo.build_config(tied=False)
    work = folder / "work"
    work.mkdir(parents=True)
    demo.run_ranks(work, config)
    (folder / "run").mkdir()
    (work / "step-8").rename(folder / "run" / "step-8")

    config.save_pretrained(folder / "config")
    dcp_to_torch_save(folder / "run" / "step-8", work / "merged.pt")
    state = torch.load(work / "merged.pt")
    torch.save({"model": state["model"], "optimizer": state["optim"], "epoch": 2}, folder / "last.pt")
    deepspeed(folder, state["model"])
    model = LlamaForCausalLM(config)
    model.load_state_dict(state["model"])
    model.save_pretrained(folder / "shards", max_shard_size="2MB")
    shutil.rmtree(work)
    shutil.copytree(Path(__file__).parent / "native" / "golden" / "1" / "small", folder / "golden")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
