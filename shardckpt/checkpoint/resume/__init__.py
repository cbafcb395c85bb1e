"""Proof of a resume: record training steps behind a save, compare them after a restore."""
