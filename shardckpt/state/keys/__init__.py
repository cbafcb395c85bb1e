"""Keys in optimizer state: FQNs, ids, slots, param groups."""
