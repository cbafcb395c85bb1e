"""Keys of optimizer state: names, ids, slots, param groups."""
