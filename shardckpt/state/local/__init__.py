"""LOCAL state: the stored shards of one rank."""
