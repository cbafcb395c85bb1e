"""Names that PEFT gives to the tensors of a model, and the other ones that its files have."""

from __future__ import annotations

import re

_PREFIX = re.compile(r"^base_model\.model\.")
_WRAPPED = re.compile(r"(\.token_adapter)?\.(base_layer|original_module)(?=\.|$)")
_SAVED_MODULE = re.compile(r"\.modules_to_save\.[^.]+(?=\.)")
_ADAPTER = re.compile(r"\.(lora_[A-Za-z_]+|trainable_tokens_[a-z]+)\.[^.]+(?=\.|$)")
_MAGNITUDE = re.compile(r"\.lora_magnitude_vector\.weight$")

# Parts of the names of a base model's tensors in the state dict of a PEFT model.
BASE_PARTS = ("base_model.model.", ".base_layer.", ".original_module.")

# Options that write a model and its adapter from the state dict of a PEFT model.
WAY_TO_BASE = (
    r"Write the model alone with --exclude '*.lora_*' --rename 'base_model\.model\.(.*)=\1' --rename"
    r" '(.*)\.base_layer(\..*)=\1\2', and its adapter with --include '*.lora_*' --rename"
    r" '(.*\.lora_[^.]*)\.default(.*)=\1\2' to adapter_model.safetensors."
)


def to_base_name(name: str) -> str:
    """Return the name in the base model of a tensor that PEFT has wrapped; any other name as it is."""
    return _WRAPPED.sub("", _PREFIX.sub("", name))


def to_file_name(name: str) -> str:
    """Return the name of an adapter's tensor in the files of `save_pretrained`, which lack the name of the adapter."""
    return _MAGNITUDE.sub(".lora_magnitude_vector", _ADAPTER.sub(r".\1", _SAVED_MODULE.sub("", name)))
