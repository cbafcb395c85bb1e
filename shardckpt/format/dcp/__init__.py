"""Checkpoints of `torch.distributed.checkpoint`."""
