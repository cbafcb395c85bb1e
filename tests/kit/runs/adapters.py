"""Small models with LoRA adapters of PEFT, on a base that `transformers` has saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from lightning.pytorch import LightningModule
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from shardckpt.state import model_state_dict, optim_state_dict
from tests.kit.models.states import whole
from tests.kit.runs.lightning_trainers import WholeAdamW

SHAPE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}


def save_base(folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """Save a base, and return its folder."""
    torch.manual_seed(seed)
    config = LlamaConfig(vocab_size=64, **SHAPE, use_cache=False, tie_word_embeddings=False)
    LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
    return folder


def build_adapted(base: Path, *, seed: int = 1, **options: Any) -> Any:
    """Return a model with a new adapter, and norms of its own."""
    model = LlamaForCausalLM.from_pretrained(base, **{"dtype": torch.float32, **options})
    torch.manual_seed(seed)
    settings = LoraConfig(r=16, target_modules=["q_proj", "v_proj"], modules_to_save=["norm"], task_type="CAUSAL_LM")
    return get_peft_model(model, settings)


def copy_whole(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """Return a copy of all parameters and moments, of all ranks."""
    found = {name: whole(value).clone() for name, value in model_state_dict(model, "FULL").items()}
    for name, slots in optim_state_dict(model, optimizer, "FULL")["state"].items():
        found |= {f"{name}.{slot}": whole(value).clone() for slot, value in slots.items()}
    return found


def count_bytes(folder: Path) -> int:
    """Return the bytes of a step's tensors, without its copies of configs."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def prepare_adapted(kind: str, base: Path, *, seed: int) -> tuple[Accelerator, Any, Any]:
    """Return an accelerator with an adapted model and its optimizer."""
    plugin = None
    if kind != "ddp":
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=int(kind[-1]),
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            use_orig_params=True,
            sync_module_states=False,
            state_dict_type="SHARDED_STATE_DICT",
        )
    accelerator, model = Accelerator(cpu=True, fsdp_plugin=plugin), build_adapted(base, seed=seed)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.05)
    return accelerator, *accelerator.prepare(model, optimizer)


def take_step(accelerator: Accelerator, model: Any, optimizer: Any) -> None:
    """Train a step."""
    ids = torch.arange(16).view(2, 8)
    accelerator.backward(model(input_ids=ids, labels=ids).loss)
    optimizer.step()
    optimizer.zero_grad()


class AdaptedModule(LightningModule):
    """A module of Lightning that holds an adapted model."""

    def __init__(self, kind: str, base: Path, *, seed: int) -> None:
        super().__init__()
        self.kind, self.net = kind, build_adapted(base, seed=seed)

    def configure_model(self) -> None:
        if self.kind == "fsdp2" and not hasattr(self.net, "unshard"):
            mesh = self.device_mesh["data_parallel"]
            for part in (*self.net.base_model.model.model.layers, self.net):
                fully_shard(part, mesh=mesh)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.arange(8 * 16).view(16, 8) % 64, batch_size=2)

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        return self.net(input_ids=batch, labels=batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return WholeAdamW([each for each in self.parameters() if each.requires_grad], lr=0.05)
