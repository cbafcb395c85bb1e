"""Names that PEFT gives to a model's tensors, in memory and in files."""

from __future__ import annotations

import re

_PREFIX = re.compile(r"^base_model\.model\.")
_WRAPPED = re.compile(r"(\.token_adapter)?\.(base_layer|original_module)(?=\.|$)")
_SAVED_MODULE = re.compile(r"\.modules_to_save\.[^.]+(?=\.)")
_ADAPTER = re.compile(r"\.(lora_[A-Za-z_]+|trainable_tokens_[a-z]+)\.[^.]+(?=\.|$)")
_MAGNITUDE = re.compile(r"\.lora_magnitude_vector\.weight$")

# Name parts that mark a base model's tensors in a PEFT model's state dict.
BASE_PARTS = ("base_model.model.", ".base_layer.", ".original_module.")

# Options that write a model and its adapter from a PEFT model's state dict.
WAY_TO_BASE = (
    r"Write the model alone with --exclude '*.lora_*' --rename 'base_model\.model\.(.*)=\1' --rename"
    r" '(.*)\.base_layer(\..*)=\1\2', and its adapter with --include '*.lora_*' --rename"
    r" '(.*\.lora_[^.]*)\.default(.*)=\1\2' to adapter_model.safetensors."
)


def to_base_name(name: str) -> str:
    """Return a tensor's name in the base model, without PEFT's wrappers."""
    return _WRAPPED.sub("", _PREFIX.sub("", name))


def to_file_name(name: str) -> str:
    """Return a tensor's name in `save_pretrained` files, which omit the adapter's name."""
    return _MAGNITUDE.sub(".lora_magnitude_vector", _ADAPTER.sub(r".\1", _SAVED_MODULE.sub("", name)))
