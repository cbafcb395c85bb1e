"""LOCAL state: the shards of a rank as they are stored."""
