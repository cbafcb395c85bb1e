"""State functions with the names of `torch.distributed`."""
