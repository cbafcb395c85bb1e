"""LOCAL state: one rank's stored shards."""
