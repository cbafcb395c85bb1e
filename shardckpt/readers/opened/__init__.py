"""An open checkpoint by name: a tree of values, and tensors read on indexing."""
