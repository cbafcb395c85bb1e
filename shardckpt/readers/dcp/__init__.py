"""Checkpoints by `torch.distributed.checkpoint`."""
