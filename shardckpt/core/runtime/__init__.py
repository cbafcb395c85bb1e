"""Forward and backward of FSDP units: order, prefetch, mixed precision."""
