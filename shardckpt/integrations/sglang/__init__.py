"""Weights of a stream in SGLang: each worker loads the version that an update names.

The server runs with `--custom-weight-loader shardckpt.integrations.sglang.apply`.
"""

from __future__ import annotations

from shardckpt.errors import require_packages

require_packages("shardckpt.integrations.sglang", "torch", install="'shardckpt[torch]'")

from shardckpt.integrations.sglang.weight_loader import LOADER, apply, make_update

__all__ = ["LOADER", "apply", "make_update"]
