"""Load a checkpoint: plan, read, cast, broadcast."""
