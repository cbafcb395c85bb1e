"""The state of an open checkpoint by name: a tree of values, and tensors that are read when they are indexed."""
