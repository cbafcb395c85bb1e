"""Rank files: merge shards of DTensors, FSDP1 and LOCAL states."""
