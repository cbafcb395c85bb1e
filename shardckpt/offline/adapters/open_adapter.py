"""Open adapters: folders that peft wrote, and steps that hold a model with its adapter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardckpt.errors import AmbiguousError, UsageError
from shardckpt.manifest import TensorEntry
from shardckpt.plan.adapter.names import PREFIX, is_trained
from shardckpt.plan.adapter.settings import require_lora
from shardckpt.plan.naming.fqn import name_model, require_unique
from shardckpt.plan.naming.model_files import ADAPTER_CONFIG
from shardckpt.plan.naming.sections import Sections, find_sections
from shardckpt.plan.naming.weights import PEFT_PART, to_base_name
from shardckpt.reader import Reader
from shardckpt.readers.huggingface.index_files import read_json
from shardckpt.readers.registry import open_checkpoint

__all__ = ["Adapter", "find_prefix", "open_adapter"]

_FILES = ("adapter_model.safetensors", "adapter_model.bin")


@dataclass(frozen=True, slots=True)
class Adapter:
    """An open adapter."""

    reader: Reader
    config: Mapping[str, Any]
    weight: float  # multiplies its products
    entries: Mapping[str, TensorEntry]  # by name without wrappers
    # Tensors of the model that the adapter was trained with, by their names in the base; empty for a peft folder.
    model: Mapping[str, TensorEntry]

    @property
    def url(self) -> str:
        """Path or URL of the adapter."""
        return self.reader.store.url


def open_adapter(path: str, weight: float) -> Adapter:
    """Open an adapter, which gets a weight."""
    opened = open_checkpoint(path)
    if ADAPTER_CONFIG in opened.model_files:
        return _open_step(opened, weight)
    names = {entry.name for entry in opened.store.list()}
    if ADAPTER_CONFIG not in names:
        raise UsageError(
            f"found no adapter: {ADAPTER_CONFIG} is missing",
            where=path,
            fix="The base comes first, then adapters: folders that peft wrote, or steps with model_files=, the model"
            " with its one adapter.",
        )
    file = next((name for name in _FILES if name in names), "")
    if file and file not in opened.manifest.files:  # readers prefer the model in a folder that has both
        opened = open_checkpoint(f"{opened.store.url.rstrip('/')}/{file}")
    config = read_json(opened.store, ADAPTER_CONFIG)
    require_lora(config, opened.store.url)
    return Adapter(opened, config, weight, name_model(opened.manifest, Sections((), (), ())).tensors, {})


def _open_step(opened: Reader, weight: float) -> Adapter:
    """Open the adapter in a step, whose model has peft's names."""
    found = name_model(opened.manifest, find_sections(opened.manifest)).tensors
    prefix = find_prefix(found, opened.store.url)
    named = {name.removeprefix(prefix): entry for name, entry in found.items() if name.startswith(prefix)}
    trained = {name: entry for name, entry in named.items() if is_trained(name)}
    own = {name: to_base_name(name) for name in named if name not in trained}
    require_unique(own)
    config = read_json(opened.model_store, ADAPTER_CONFIG)
    require_lora(config, opened.store.url)
    if config.get("bias", "none") != "none":  # then peft trains biases in place
        trained |= {name: named[name] for name in own if name.endswith(".bias")}
    return Adapter(opened, config, weight, trained, {base: named[name] for name, base in own.items()})


def find_prefix(names: Mapping[str, object], where: str) -> str:
    """Return what precedes peft's prefix in names: the path to the model in another module."""
    found = sorted({name.partition(PREFIX)[0] for name in names if PREFIX in name and PEFT_PART.search(name)})
    if len(found) > 1:
        raise AmbiguousError(
            "several models have adapters", where=where, found=", ".join(map(repr, found)), fix="Write them one by one."
        )
    return found[0] if found else ""
