"""Adapters, one class per way to shard parameters."""
