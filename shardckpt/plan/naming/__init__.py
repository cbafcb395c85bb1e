"""Tensor names: FQNs, shared tensors, sections in a checkpoint."""
