"""Load of a checkpoint: plan, read, cast, broadcast."""
