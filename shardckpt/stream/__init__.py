"""A stream of weights: versions as verified changes, from a sharded trainer to any server."""
