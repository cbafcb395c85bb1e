"""Weight transfer for TRL: each sync is a version of a stream, which vLLM servers load."""

from __future__ import annotations

from shardckpt.errors import require_packages

require_packages("shardckpt.integrations.trl", "torch", install="'shardckpt[torch]'")

from shardckpt.integrations.trl.stream_transfer import StreamTransfer

__all__ = ["StreamTransfer"]
