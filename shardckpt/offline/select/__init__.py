"""Select tensors and settings of a source, and their names."""
