"""Entries in torch's registry for composable APIs: `replicate` skips these modules."""

from __future__ import annotations

import sys
from collections import OrderedDict

from torch import nn

_CONTRACT = "torch.distributed._composable.contract"


def register_fully_shard(module: nn.Module) -> None:
    """Record in torch's registry that `fully_shard` sharded a module."""
    # The registry is private to torch and is not imported here. Nothing is recorded if no composable torch API was
    # imported, or if this version of torch does not have a registry.
    contract = sys.modules.get(_CONTRACT)
    key, item = getattr(contract, "REGISTRY_KEY", None), getattr(contract, "RegistryItem", None)
    if isinstance(key, str) and item is not None:
        module.__dict__.setdefault(key, OrderedDict())["fully_shard"] = item()
