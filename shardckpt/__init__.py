"""Checkpoints of sharded PyTorch training: read any format, merge in constant memory, write safetensors."""
