"""Names of tensors: FQNs, shared tensors, sections of a checkpoint."""
