"""Keys of optimizer state: FQNs, ids, slots, param groups."""
