"""torch's registry of composable APIs: what lets its `replicate` leave modules alone that `fully_shard` has sharded."""

from __future__ import annotations

import sys
from collections import OrderedDict

from torch import nn

_CONTRACT = "torch.distributed._composable.contract"


def register_fully_shard(module: nn.Module) -> None:
    """Note in torch's registry that a module is sharded by a `fully_shard`.

    The registry is private to torch and is not imported for this: nothing happens where no composable API of torch has
    been imported, or where this torch has no registry.

    Args:
        module: The module.
    """
    contract = sys.modules.get(_CONTRACT)
    key, item = getattr(contract, "REGISTRY_KEY", None), getattr(contract, "RegistryItem", None)
    if isinstance(key, str) and item is not None:
        module.__dict__.setdefault(key, OrderedDict())["fully_shard"] = item()
