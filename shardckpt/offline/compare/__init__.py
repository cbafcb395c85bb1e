"""Compare two checkpoints under common names: tensors, values, param groups."""
