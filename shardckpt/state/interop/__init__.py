"""State functions under the names of `torch.distributed`."""
