"""FSDP units' forward and backward: order, prefetch, mixed precision."""
