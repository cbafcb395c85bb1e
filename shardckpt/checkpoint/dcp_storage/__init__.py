"""Storage of `torch.distributed.checkpoint`: write steps with its planners, and read checkpoints of every format."""
