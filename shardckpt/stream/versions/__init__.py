"""Read a stream's versions without torch: as checkpoints, as a list, and in another dialect."""
