"""`replace_torch_fsdp`: names of torch's modules are ours, all of them, and torch's again afterwards."""

from __future__ import annotations

from importlib import import_module

import pytest

from shardckpt import core

MODULES = ("", ".api", ".fully_sharded_data_parallel", ".wrap", ".sharded_grad_scaler")


def public_names() -> dict[str, object]:
    """Return the public objects that torch's modules define for FSDP, by name."""
    modules = [import_module(f"torch.distributed.fsdp{name}") for name in MODULES]
    return {
        f"{module.__name__}.{name}": value
        for module in modules
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", "").startswith("torch.distributed.fsdp")
    }


def test_every_exported_name_is_replaced_and_restored() -> None:
    before = public_names()
    exported = {f"torch.distributed.fsdp.{name}" for name in import_module("torch.distributed.fsdp").__all__}
    assert exported <= before.keys()
    with core.replace_torch_fsdp():
        assert not exported & public_names().keys()
        from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        import shardckpt.core.wrap

        assert FullyShardedDataParallel is core.FullyShardedDataParallel
        assert StateDictType is core.StateDictType
        assert ShardedGradScaler is core.ShardedGradScaler
        assert ModuleWrapPolicy is shardckpt.core.wrap.ModuleWrapPolicy
    assert public_names() == before


def test_the_names_stay_replaced_until_they_are_given_back() -> None:
    fsdp = import_module("torch.distributed.fsdp")
    theirs = fsdp.fully_shard
    replaced = core.replace_torch_fsdp()
    try:
        assert fsdp.fully_shard is core.fully_shard
    finally:
        replaced.close()
    assert fsdp.fully_shard is theirs


def test_an_error_in_the_context_gives_the_names_back() -> None:
    fsdp = import_module("torch.distributed.fsdp")
    theirs = fsdp.FSDPModule
    with pytest.raises(KeyError), core.replace_torch_fsdp():
        raise KeyError
    assert fsdp.FSDPModule is theirs
