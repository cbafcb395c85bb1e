"""Forward and backward of FSDP units: order, prefetch, precision."""
