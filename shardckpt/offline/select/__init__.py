"""Select a source's tensors and settings, and their names."""
