"""Names of a PEFT model, of its base, and of the files that PEFT writes."""

from __future__ import annotations

import pytest

from shardckpt.plan.naming.weights import to_base_name, to_file_name

PREFIX = "base_model.model."


@pytest.mark.parametrize(
    ("name", "base"),
    [
        (f"{PREFIX}x.base_layer.weight", "x.weight"),
        (f"{PREFIX}head.original_module.weight", "head.weight"),
        (f"{PREFIX}emb.token_adapter.base_layer.weight", "emb.weight"),
        (f"{PREFIX}norm.weight", "norm.weight"),
        ("my.base_layers.weight", "my.base_layers.weight"),
    ],
)
def test_a_wrapped_tensor_has_the_name_of_its_base(name: str, base: str) -> None:
    assert to_base_name(name) == base


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("x.lora_A.default.weight", "x.lora_A.weight"),
        ("x.lora_B.my_adapter.bias", "x.lora_B.bias"),
        ("x.lora_embedding_A.default", "x.lora_embedding_A"),
        ("x.lora_magnitude_vector.default.weight", "x.lora_magnitude_vector"),
        ("head.modules_to_save.default.weight", "head.weight"),
        ("emb.token_adapter.trainable_tokens_delta.default", "emb.token_adapter.trainable_tokens_delta"),
        ("x.base_layer.weight", "x.base_layer.weight"),
        ("head.original_module.weight", "head.original_module.weight"),
    ],
)
def test_a_file_lacks_the_name_of_the_adapter(name: str, stored: str) -> None:
    assert to_file_name(PREFIX + name) == PREFIX + stored
