"""Choose tensors and settings of a source, under which names."""
